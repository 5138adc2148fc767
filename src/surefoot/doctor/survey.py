"""Files and headers of a folder, read as far as they can be: every problem is a finding, none an exception."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.config import ModelConfig
from surefoot.doctor.findings import Finding, listing
from surefoot.errors import CheckpointError, shown
from surefoot.loading.checkpoint import canonical
from surefoot.loading.config import DENSE_TYPES, MOE_TYPES, parse_config
from surefoot.loading.files import (
    INDEX,
    MLX,
    Stored,
    layout_of,
    listed_files,
    only_mtp,
    open_safetensors,
    read_json,
    stored_in,
)
from surefoot.loading.names import Place, place

LENGTH_BYTES = 8  # in front of a safetensors header
MOST_HEADER = 100_000_000  # bytes; the format's own limit
HEAD_SIGN = "pre_fc_norm_hidden.weight"  # no other part of the family has a tensor of this name
COPY_AGAIN = "Copy or download the file again."


@dataclass
class Survey:
    """`config` is None if config.json cannot be used; `raw` is what it says, {} if it cannot be read. `found`: by
    canonical name, the stored tensors that make one up. `lost`: canonical names that the index promises in files that
    are missing or unreadable. `sidecars`: files outside the index with nothing but an MTP head. `unsound`: files that
    nothing can be read from. `layout`: who wrote the files, "pt" or "mlx"."""

    folder: Path
    raw: Mapping[str, object] = field(default_factory=dict)
    config: ModelConfig | None = None
    tensors: list[Stored] = field(default_factory=list)
    found: dict[str, dict[Place, Stored]] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    sidecars: list[Path] = field(default_factory=list)
    unsound: list[Path] = field(default_factory=list)
    layout: str = "pt"
    findings: list[Finding] = field(default_factory=list)

    def error(self, code: str, sentence: str, advice: str) -> None:
        """The checkpoint gives no text, wrong text, or drafts that are not accepted."""
        self.findings.append(Finding("error", code, sentence, advice))

    def warning(self, code: str, sentence: str, advice: str) -> None:
        """It may do so."""
        self.findings.append(Finding("warning", code, sentence, advice))

    def note(self, code: str, sentence: str, advice: str = "") -> None:
        """Good to know."""
        self.findings.append(Finding("note", code, sentence, advice))


def take(folder: Path) -> Survey:
    """Look at config.json and every safetensors header of a folder that is there."""
    survey = Survey(folder)
    _read_config(survey)
    try:
        listed, promised = listed_files(folder)
    except CheckpointError as error:
        advice = "Fetch the index and all safetensors files, or delete a broken index if there is only one file."
        survey.error("files-missing", str(error), advice)
        return survey
    for file in listed:
        _read_file(survey, file, [name for name, shard in promised.items() if shard == file.name])
    _check_index(survey, listed, promised)
    survey.lost = frozenset(_names(name for name, shard in promised.items() if _is_lost(survey, folder / shard)))
    _look_beside(survey, listed)
    try:
        survey.found = canonical(survey.tensors)
    except CheckpointError as error:
        survey.error("tensor-twice", str(error), "Delete the copy that does not belong to the model.")
    return survey


def _read_config(survey: Survey) -> None:
    try:
        survey.raw = read_json(survey.folder / "config.json")
    except CheckpointError as error:
        survey.error("config-unreadable", str(error), "Fetch config.json from where the weights are from.")
        return
    try:
        survey.config = parse_config(survey.raw)
    except CheckpointError as error:
        kind = model_type(survey.raw)
        if kind in DENSE_TYPES + MOE_TYPES:
            advice = "Use an export with this setting as expected; Surefoot would load it and give wrong text."
            survey.error("config-refused", str(error), advice)
        else:
            sentence = f"model_type is {shown(kind)}, which is none of {', '.join(DENSE_TYPES + MOE_TYPES)}"
            advice = (
                "Use a checkpoint of the Qwen3.5/3.6 family; other models run through `surefoot.TransformersTarget`."
            )
            survey.error("architecture-unknown", sentence, advice)


def model_type(raw: Mapping[str, object]) -> object:
    """The architecture that a config names, of its text part if it has one."""
    nested = raw.get("text_config")
    return nested.get("model_type", raw.get("model_type")) if isinstance(nested, Mapping) else raw.get("model_type")


def _read_file(survey: Survey, file: Path, promised: Seq[str]) -> None:
    """The tensors of one file; of a damaged one as far as its header can be read."""
    if not file.exists():
        survey.unsound.append(file)
        names = f"{len(promised)} tensors should be in it: {listing(promised, 3)}"
        survey.error(
            "shard-missing",
            f"{file.name}: {INDEX} names it, but it is not there; {names}",
            "Download the missing file into the folder.",
        )
        return
    try:
        with open_safetensors(file) as reader:
            layout, tensors = layout_of(reader), stored_in(reader, file)
    except CheckpointError as error:
        survey.unsound.append(file)
        _read_damaged(survey, file, error)
        return
    survey.tensors += tensors
    if layout == MLX and survey.layout != MLX:
        survey.layout = MLX
        survey.error(
            "layout-mlx",
            f"{file.name} was written by MLX, which adds 1 to the norm weights; "
            "Surefoot reads Hugging Face exports and would add 1 once more",
            "Use the Hugging Face checkpoint that this one was converted from.",
        )


def _read_damaged(survey: Survey, file: Path, error: CheckpointError) -> None:
    header = _bare_header(file)
    if header is None:
        survey.error("file-damaged", str(error), COPY_AGAIN)
        return
    tensors, promised = header
    size = file.stat().st_size
    survey.tensors += tensors
    if size < promised:
        sentence = f"{file.name} is truncated: its header promises {promised:,} bytes, it has {size:,}"
        survey.error("file-truncated", sentence, COPY_AGAIN)
    else:
        survey.error("file-damaged", str(error), COPY_AGAIN)


def _bare_header(file: Path) -> tuple[list[Stored], int] | None:
    """The tensors that a header lists, and the bytes of a whole file; None if not even the header can be read."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if length > MOST_HEADER:
                return None
            header = json.loads(stream.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: tuple(int(size) for size in entry["shape"]) for name, entry in entries.items()}
        tensors = [Stored(name, file, shapes[name], str(entry["dtype"])) for name, entry in entries.items()]
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return tensors, LENGTH_BYTES + length + end


def _is_lost(survey: Survey, file: Path) -> bool:
    return file in survey.unsound and not any(stored.file == file for stored in survey.tensors)


def _check_index(survey: Survey, listed: Seq[Path], promised: Mapping[str, str]) -> None:
    """Tensors that the index promises in files that can be read, and that are not in them."""
    found = {(stored.name, stored.file.name) for stored in survey.tensors}
    readable = {file.name for file in listed if not _is_lost(survey, file)}
    broken = [name for name, shard in promised.items() if shard in readable and (name, shard) not in found]
    if broken:
        sentence = f"{INDEX} promises tensors in files that do not hold them: {listing(broken)}"
        advice = "Fetch index and files from one source: these are of different exports."
        survey.error("index-wrong", sentence, advice)


def _look_beside(survey: Survey, listed: Seq[Path]) -> None:
    """Files that the index does not list, here and one folder down: heads of their own, and what nobody reads."""
    for file in sorted([*survey.folder.glob("*.safetensors"), *survey.folder.glob("*/*.safetensors")]):
        if file in listed:
            continue
        try:
            with open_safetensors(file) as reader:
                beside = stored_in(reader, file)
        except CheckpointError as error:
            if file.parent != survey.folder:
                continue  # which nobody reads
            survey.error("file-damaged", str(error), f"{COPY_AGAIN} Or move it away if it is not needed.")
            continue
        name = str(file.relative_to(survey.folder))
        if only_mtp(beside) and file.parent == survey.folder:
            survey.sidecars.append(file)
            survey.tensors += beside
        elif only_mtp(beside):
            survey.warning(
                "mtp-elsewhere",
                f"{name} holds an MTP head in a folder where it is not read",
                "Move the file beside config.json.",
            )
        elif any(stored.name.endswith(HEAD_SIGN) for stored in beside):
            survey.warning(
                "mtp-unnamed",
                f"{name} looks like an MTP head, but its tensors are not named "
                f"mtp.*: {listing((stored.name for stored in beside), 3)}",
                "Rename its tensors to mtp.* (mtp.fc.weight, mtp.layers.0...).",
            )
        elif file.parent == survey.folder:
            survey.note("file-unused", f"{name} is not read: {INDEX} or model.safetensors stands for all")


def _names(stored: Iterable[str]) -> set[str]:
    """Canonical names of stored ones."""
    return {spot.name for name in stored if (spot := place(name)) is not None}
