"""What `drafter="auto"` knows before it has seen anything: a machine's costs of a model's steps, and the acceptance to
expect. Measured once and kept in a file of the user's cache folder; `surefoot tune` writes a better one there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from surefoot.drafters.policy import StepCosts
from surefoot.engine.calibrate import FAR, batches_for, measure_costs
from surefoot.engine.hardware import device_name
from surefoot.engine.memory import memory_of
from surefoot.errors import InputError
from surefoot.model import Decoder, DraftHead, MTPHead

FORMAT = 1
PACKAGES = ("surefoot", "torch")


@dataclass(frozen=True)
class Profile:
    """Costs of steps, and chances by arm and place of the draft (`drafters.auto.PRIORS` where none are given)."""

    costs: StepCosts
    priors: Mapping[str, Seq[float]] = field(default_factory=dict)


def profile_file(
    decoder: Decoder,
    head: MTPHead | None,
    draft_head: DraftHead | None = None,
    folder: Path | None = None,
    recorded: int | None = None,
) -> Path:
    """Where the profile of such a model on this machine is kept: in `folder`, the user's own if not given. The name has
    a digest of all that costs depend on: shapes, weights' types, device, threads and versions. `recorded`: it is about
    a device's own steps of up to so many draft tokens, not about the host's loop."""
    told: dict[str, Any] = {
        "format": FORMAT,
        "model": asdict(decoder.config),
        "dtype": str(decoder.dtype),
        "weights": memory_of((decoder, head)).weights,
        "head": head is not None,
        "draft_vocab": 0 if draft_head is None else len(draft_head.ids),
        "device": device_name(decoder.device),
        "recorded": recorded,
        "threads": torch.get_num_threads(),
        "context": min(FAR, decoder.max_len),
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return (Path.home() / ".cache" / "surefoot" if folder is None else folder) / f"profile-{digest}.json"


def load_profile(file: Path) -> Profile | None:
    """The profile in a file; None if there is none that can be read. Raises nothing: it can be measured again."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        priors = {str(arm): tuple(float(chance) for chance in chances) for arm, chances in data["priors"].items()}
        if data["format"] != FORMAT or not all(0 <= chance <= 1 for own in priors.values() for chance in own):
            return None
        return Profile(StepCosts.from_json(data["costs"]), priors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def save_profile(file: Path, profile: Profile) -> None:
    """Write the profile, whole or not at all. Raises InputError if the file cannot be written."""
    data = {"format": FORMAT, "costs": profile.costs.as_json(), "priors": dict(profile.priors)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as temporary:
            json.dump(data, temporary, indent=1)
        os.replace(temporary.name, file)
    except OSError as error:
        raise InputError(f"{file}: expected to write the profile there, found: {error.strerror or error}") from error


def profile_of(
    decoder: Decoder, head: MTPHead | None, slots: int, draft_head: DraftHead | None = None, folder: Path | None = None
) -> Profile:
    """The profile of the host's loop for so many slots; see `kept_profile`."""
    file = profile_file(decoder, head, draft_head, folder)
    return kept_profile(file, slots, lambda sizes: measure_costs(decoder, head, sizes, draft_head))


def kept_profile(file: Path, slots: int, measure: Callable[[list[int]], StepCosts]) -> Profile:
    """The profile in the file with what it lacks for so many slots, or a new one; `measure` gives costs by batch size.
    It is kept if it can be: a folder that cannot be written costs the next start a second, and nobody their output."""
    known = load_profile(file)
    missing = [size for size in batches_for(slots) if known is None or size not in known.costs.batches]
    if missing:
        costs = measure(missing)
        known = Profile(costs) if known is None else replace(known, costs=known.costs.joined(costs))
        with suppress(InputError):
            save_profile(file, known)
    assert known is not None
    return known
