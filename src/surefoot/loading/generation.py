"""What a checkpoint's generation_config.json says of sampling: the settings that its makers found good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.errors import CheckpointError, InputError
from surefoot.loading.files import is_there, read_json
from surefoot.sampling import SamplingParams

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Fields of `SamplingParams` by the folder's generation_config.json; none without such a file. `do_sample` is not
    looked at. Raises CheckpointError, naming the file, for values that cannot be."""
    file = folder / "generation_config.json"
    if not is_there(file):
        return {}
    given = read_json(file)
    found = {name: given[name] for name in SAMPLING if given.get(name) is not None}
    try:
        SamplingParams(**found)  # type: ignore[arg-type]  # which checks them
    except InputError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return found
