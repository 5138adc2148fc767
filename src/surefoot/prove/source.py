"""Who runs a model on trial: the engine, or `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.loading.config import DENSE_TYPES, MOE_TYPES
from surefoot.loading.files import find_model, is_there, read_json


@dataclass(frozen=True)
class Source:
    """Where `transformers` finds a model: a folder, and in it a GGUF file or a config with weights."""

    folder: Path
    gguf: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As `from_pretrained` takes them. Code that a checkpoint brings is not run."""
        return {"pretrained_model_name_or_path": str(self.folder)} | ({"gguf_file": self.gguf} if self.gguf else {})


def find_source(name: str | Path) -> Source | Path:
    """The source of a model that is not of the engine's own family, or the folder of one that is (or whose config says
    nothing: what is wrong there, loading will say). Raises CheckpointError if there is no such model."""
    if str(name).endswith(".gguf") and is_there(file := Path(name)) and file.is_file():
        return Source(file.parent, file.name)
    folder = find_model(name)
    if not is_there(folder / "config.json"):
        files = sorted(folder.glob("*.gguf"))
        return Source(folder, files[0].name) if len(files) == 1 else folder
    raw = read_json(folder / "config.json")
    kinds = (part.get("model_type") for part in (raw, raw.get("text_config")) if isinstance(part, dict))
    named = [kind for kind in kinds if isinstance(kind, str)]
    return Source(folder) if named and not {*named} & {*DENSE_TYPES, *MOE_TYPES} else folder
