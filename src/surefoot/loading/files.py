"""Which files a checkpoint folder is made of, and what their headers say. Reads no tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from surefoot.errors import CheckpointError, shown
from surefoot.loading.names import is_mtp, place

BUNDLED = ("surefoot-demo",)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MLX = "mlx"


@dataclass(frozen=True)
class Stored:
    """One tensor as its file's header describes it. `dtype` is the format's own name ("BF16")."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


def find_model(name: str | Path) -> Path:
    """The folder of a model: a bundled name, a local folder, or a hub id `owner/name` (downloaded when not cached).

    Raises CheckpointError if it is none of these, or the hub cannot give it.
    """
    if not isinstance(name, (str, Path)):
        raise CheckpointError(f"model: expected a name or a path, found {shown(name)}")
    if name in BUNDLED:
        folder = Path(str(resources.files("surefoot") / "models" / str(name)))
        if not folder.is_dir():
            raise CheckpointError(f"{name}: expected this bundled model at {folder}, found nothing (broken install?)")
        return folder
    try:
        path = Path(name).expanduser()
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null byte
        raise CheckpointError(f"{str(name)[:200]}: expected a model's name or path, found {error}") from error
    if is_folder:
        return path
    if is_there:
        raise CheckpointError(f"{name}: expected a folder with config.json and *.safetensors, found a file")
    if HUB_ID.fullmatch(str(name)) is None:
        kinds = f"a folder, a bundled model ({', '.join(BUNDLED)}) or a hub id owner/name"
        raise CheckpointError(f"{name}: expected {kinds}, found none of them")
    return _download(str(name))


def read_json(file: Path) -> dict[str, object]:
    """The JSON object in `file`. Raises CheckpointError if it is missing, unreadable or not an object."""
    value = _parse(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def read_list(file: Path) -> list[object]:
    """The JSON list in `file`. Raises CheckpointError if it is missing, unreadable or not a list."""
    value = _parse(file)
    if not isinstance(value, list):
        raise CheckpointError(f"{file}: expected a JSON list, found {type(value).__name__}")
    return value


def is_there(file: Path) -> bool:
    """Whether there is a file or a folder of this name. Raises CheckpointError for a name that no file can have, and
    where the system does not let us look."""
    try:
        return file.exists()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(file)[:200]}: expected a file's name, found: {str(error)[:200]}") from error


def inventory(folder: Path) -> list[Stored]:
    """Every tensor of the checkpoint, from the headers of its safetensors files alone.

    The files are those of the index, or `model.safetensors`, or else every `*.safetensors`; to these come files beside
    them that hold nothing but MTP tensors (some exports put the head into a file that the index does not list).
    Raises CheckpointError for a damaged file, a missing shard, or a shard without a tensor that the index promises.
    """
    listed, promised = listed_files(folder)
    tensors: list[Stored] = []
    for file in listed:
        if not is_there(file):
            raise CheckpointError(f"{folder / INDEX}: expected the shard {file.name} beside it, found no such file")
        tensors += read_header(file)
    _check_index(promised, tensors)
    for file in sorted(folder.glob("*.safetensors")):
        if file not in listed:
            beside = read_header(file)
            if only_mtp(beside):
                tensors += beside
    return tensors


def listed_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that the model is made of, there or not, and the file that the index promises each tensor in (nothing
    without an index). Raises CheckpointError for an index that cannot be read, or if there is no file."""
    present = sorted(folder.glob("*.safetensors"))
    if is_there(folder / INDEX):
        promised = _read_index(folder / INDEX)
        listed = sorted({folder / shard for shard in promised.values()})
    else:
        promised = {}
        listed = [folder / SINGLE] if folder / SINGLE in present else present
    if not listed:
        raise CheckpointError(f"{folder}: expected {SINGLE} or {INDEX}, found no safetensors file")
    return listed, promised


def read_header(file: Path) -> list[Stored]:
    """The tensors that one safetensors file holds. Raises CheckpointError unless the file is sound: header readable,
    every tensor inside the file, none overlapping, no gaps."""
    with open_safetensors(file) as reader:
        if layout_of(reader) == MLX:
            # MLX adds 1 to the norm weights when it converts; guessing from the numbers has gone wrong elsewhere.
            raise CheckpointError(f"{file}: expected a Hugging Face export, found one in MLX's layout")
        return stored_in(reader, file)


def layout_of(reader: Any) -> str:
    """Who wrote an opened file, as it says itself: "pt" for PyTorch and for files that do not say."""
    return str((reader.metadata() or {}).get("format", "pt"))


def stored_in(reader: Any, file: Path) -> list[Stored]:
    """The tensors of an opened file."""
    slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118  # not a dict
    return [Stored(name, file, tuple(view.get_shape()), view.get_dtype()) for name, view in slices.items()]


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """`safetensors.safe_open` for PyTorch on the CPU; a file that it does not accept is a CheckpointError."""
    if file.is_dir():
        raise CheckpointError(f"{file}: expected a sound safetensors file, found a folder")
    try:
        opened = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: expected a sound safetensors file, found: {error}") from error
    with opened as reader:
        yield reader


def _parse(file: Path) -> object:
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file}: expected a JSON file, found nothing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected a JSON file, found {error}") from error


def _download(hub_id: str) -> Path:
    # Imported here: a local model needs no network code.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except Exception as error:  # the client lets requests', httpx's and its own errors through
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        message = f"{hub_id}: expected a local folder or a model on the Hugging Face hub, found neither: {first_line}"
        raise CheckpointError(message) from error


def _read_index(file: Path) -> dict[str, str]:
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{file}: weight_map: expected tensor names with their files, found {str(weight_map)[:80]}"
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or "\0" in shard or Path(shard).name != shard:
            found = shown(shard)
            raise CheckpointError(
                f"{file}: weight_map: {shown(name)}: expected a file name in this folder, found {found}"
            )
    return weight_map


def _check_index(promised: dict[str, str], tensors: Iterable[Stored]) -> None:
    found = {(stored.name, stored.file.name) for stored in tensors}
    for name, shard in promised.items():
        if (name, shard) not in found:
            raise CheckpointError(f"{name}: expected in {shard} (says {INDEX}), found no such tensor there")


def only_mtp(tensors: Iterable[Stored]) -> bool:
    """Whether these are tensors of an MTP head, and nothing else of the text model."""
    places = [place(stored.name) for stored in tensors]
    return any(places) and all(spot is None or is_mtp(spot.name) for spot in places)
