"""A checkpoint folder to a config, checked tensors under canonical names, and a tokenizer.

Two stages. `inspect` reads JSON and file headers and compares every tensor's name, shape and dtype with what the config
asks for; nothing is allocated before all of it agrees. `load_checkpoint` then copies file by file, tensor by tensor, so
that the peak is the finished model and one tensor. Weights that the files have in 8 bits come with scales, read first.
Norm weights are handed on as Hugging Face stores them (all but the
DeltaNet norm zero-centred); files in another convention are refused by their format, never guessed at from the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from surefoot.cache.memory import room_for
from surefoot.config import ModelConfig
from surefoot.errors import CheckpointError
from surefoot.kernels.quantise import FLOAT8, Quantised, Weight, from_stored
from surefoot.loading.config import merge_ids, parse_config, token_ids
from surefoot.loading.files import Stored, find_model, inventory, is_there, open_safetensors, read_json
from surefoot.loading.names import Place, is_mtp, pieces, place, scale_shapes, stored_shapes
from surefoot.loading.tokenizer import Tokenizer
from surefoot.model.tensors import NARROW, Shapes, mtp_shapes, target_shapes

__all__ = [
    "Checkpoint", "Differences", "Inspection", "MtpPolicy", "Problem", "canonical", "differences", "find_model",
    "inspect", "load_checkpoint",
]  # fmt: skip

MtpPolicy = Literal["require", "if-present", "skip"]
Progress = Callable[[int, int], None]

FLOATING = ("F64", "F32", "F16", "BF16")
EIGHT_BITS = "F8_E4M3"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Per-head constants of the recurrence and the gated norm: the model computes with float32 copies in any case.
KEPT_FLOAT32 = (".A_log", ".dt_bias", ".linear_attn.norm.weight")


@dataclass(frozen=True)
class Inspection:
    """What a folder holds, all checked. `sources` says for each canonical tensor which stored ones make it up."""

    path: Path
    config: ModelConfig
    sources: Mapping[str, Mapping[Place, Stored]]
    notes: tuple[str, ...]
    tied_head: Stored | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. `tensors` has exactly the names and shapes of `surefoot.model.tensors` for `config`, whose
    `mtp_layers` is 0 if the MTP head was not loaded; some may be `Quantised` if that was asked for. `notes` are
    sentences that the user should see."""

    path: Path
    config: ModelConfig
    tensors: dict[str, Weight]
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    notes: tuple[str, ...]


def inspect(path: str | Path, mtp: MtpPolicy = "if-present") -> Inspection:
    """Check a folder without reading a tensor.

    `mtp`: "require" raises if the head is not in the files, "if-present" leaves a note then, "skip" ignores it. A head
    of which some tensors are missing is an error unless skipped. A `lm_head.weight` beside tied embeddings is allowed
    in the embedding's shape. Matrices may be stored in 8 bits (e4m3), with scales for squares of 128 x 128, for rows or
    for the whole, named `*_scale_inv` or `*_scale`; which of them are, the files show. Raises CheckpointError naming
    the tensors, what was expected and what was found.
    """
    folder = Path(path)
    if not is_there(folder) or not folder.is_dir():
        raise CheckpointError(f"{path}: expected a folder with config.json and safetensors files, found no such folder")
    config = parse_config(read_json(folder / "config.json"))
    found = canonical(inventory(folder))
    if mtp == "skip":
        found = {name: parts for name, parts in found.items() if not is_mtp(name)}
        config = replace(config, mtp_layers=0)
        notes: tuple[str, ...] = ()
    else:
        config, notes = _settle_mtp(config, found, required=mtp == "require")
    expected = target_shapes(config) | mtp_shapes(config)
    tied_head = _take_tied_head(config, found)
    _check(config, expected, found)
    return Inspection(folder, config, {name: found[name] for name in expected}, notes, tied_head)


def load_checkpoint(
    path: str | Path,
    *,
    mtp: MtpPolicy = "if-present",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    narrow: bool = False,
    progress: Progress | None = None,
) -> Checkpoint:
    """Inspect the folder (see `inspect` for `mtp`), then read every tensor into memory of its own.

    Tensors come in `dtype`, but A_log, dt_bias and the DeltaNet norm in float32, whatever the file has them in. With
    `narrow`, weights of linear layers that the file has in 8 bits stay so, as `Quantised`; without, a note says that
    they do not. A head that repeats a tied embedding is left out. End-of-sequence ids are those of config, generation
    config and tokenizer together, without ids outside the vocabulary. `progress(done, total)` counts elements as
    tensors arrive. Raises CheckpointError, or InputError for a device without room; nothing is allocated before the
    whole folder has been checked.
    """
    checked = inspect(path, mtp)
    tokenizer = Tokenizer.from_folder(checked.path)
    if tokenizer is not None and tokenizer.vocab_size > checked.config.vocab_size:
        expected = f"token ids below vocab_size = {checked.config.vocab_size}"
        raise CheckpointError(f"tokenizer.json: expected {expected}, found {tokenizer.vocab_size - 1}")
    eos_token_ids = _eos_ids(checked, tokenizer)
    tensors = _read(checked, dtype, torch.device(device), narrow, progress)
    config = replace(checked.config, eos_token_ids=eos_token_ids)
    notes = checked.notes
    if not narrow and any(spot.scale for parts in checked.sources.values() for spot in parts):
        notes = (*notes, f"weights that the files have in 8 bits are turned into {str(dtype).removeprefix('torch.')}")
    return Checkpoint(checked.path, config, tensors, eos_token_ids, tokenizer, notes)


def canonical(tensors: list[Stored]) -> dict[str, dict[Place, Stored]]:
    """By canonical name, the stored tensors that make one up. Raises CheckpointError for one that is there twice."""
    found: dict[str, dict[Place, Stored]] = {}
    for stored in tensors:
        spot = place(stored.name)
        if spot is None:
            continue
        parts = found.setdefault(spot.name, {})
        if spot in parts:
            places = f"{parts[spot].name} in {parts[spot].file.name} and {stored.name} in {stored.file.name}"
            raise CheckpointError(f"{spot.name}: expected one tensor, found two: {places}")
        parts[spot] = stored
    return found


def _settle_mtp(
    config: ModelConfig, found: Mapping[str, object], required: bool
) -> tuple[ModelConfig, tuple[str, ...]]:
    """The config with the MTP layers that the files are to be checked for, and what to tell the user."""
    present = any(is_mtp(name) for name in found)
    announced = config.mtp_layers
    if present and not announced:
        layers = {name.split(".")[2] for name in found if name.startswith("mtp.layers.")}
        config = replace(config, mtp_layers=max(1, len(layers)))
        return config, (f"config.json announces no MTP layers, the files hold {config.mtp_layers}; they are used",)
    if present:
        return config, ()
    says = f"config.json announces {announced}" if announced else "config.json announces none either"
    if required:
        raise CheckpointError(f"mtp.*: expected the tensors of an MTP head, found none in the files ({says})")
    note = (f"config.json announces an MTP head ({announced} layer), but the files have no mtp.* tensors",)
    return replace(config, mtp_layers=0), note if announced else ()


def _take_tied_head(config: ModelConfig, found: dict[str, dict[Place, Stored]]) -> Stored | None:
    """Remove and return a head that a tied checkpoint stores all the same; its shape is checked here."""
    if not config.tied or HEAD not in found:
        return None
    head = found.pop(HEAD).get(Place(HEAD))
    shape = (config.vocab_size, config.hidden_size)
    if head is not None and (head.shape != shape or head.dtype not in FLOATING):
        raise CheckpointError(f"{_shape_problem(HEAD, [shape], head)} (embeddings are tied)")
    return head


@dataclass(frozen=True)
class Problem:
    """What is wrong with a canonical tensor: a sentence with what was expected and what was found."""

    name: str
    text: str


@dataclass(frozen=True)
class Differences:
    """Between the tensors that a config asks for and those that are there."""

    missing: tuple[Problem, ...]
    wrong: tuple[Problem, ...]
    extra: tuple[Problem, ...]


def differences(config: ModelConfig, expected: Shapes, found: Mapping[str, Mapping[Place, Stored]]) -> Differences:
    """What is missing, what has another shape or type than it must, and what should not be there."""
    missing: list[Problem] = []
    wrong: list[Problem] = []
    for name, shape in expected.items():
        parts = found.get(name, {})
        # A tensor that came in pieces is judged as pieces; one that did not come at all is reported by its own name.
        wanted = [Place(name)] if not parts or Place(name) in parts else pieces(name, config)
        scales = []
        for spot in wanted:
            shapes = stored_shapes(spot, shape)
            stored = parts.get(spot)
            if stored is None:
                text = f"{_label(spot)}: expected {list(shapes[0])}, found no such tensor"
                missing.append(Problem(name, text))
                continue
            eight_bits = stored.dtype == EIGHT_BITS and len(stored.shape) > 1
            if stored.shape not in shapes or not (eight_bits or stored.dtype in FLOATING):
                wrong.append(Problem(name, _shape_problem(_label(spot), shapes, stored)))
            elif eight_bits:
                scales.append(replace(spot, scale=True))
                problem = _scale_problem(scales[-1], stored, parts.get(scales[-1]))
                if problem is not None:
                    wrong.append(Problem(name, problem))
        wanted += scales
        if set(parts) - set(wanted):
            other = next(stored for spot, stored in parts.items() if spot not in wanted)
            several = f" or {len(pieces(name, config))} pieces" if pieces(name, config) else ""
            wrong.append(Problem(name, f"{name}: expected one tensor{several}, found also {other.name}"))
    extra = [
        Problem(name, f"{name}: expected no such tensor, found it in {_files(found[name])}")
        for name in sorted(found.keys() - expected)
    ]
    return Differences(tuple(missing), tuple(wrong), tuple(extra))


def _check(config: ModelConfig, expected: Shapes, found: Mapping[str, Mapping[Place, Stored]]) -> None:
    """Raise one CheckpointError that names the missing, misshapen and unexpected tensors (the first few of each)."""
    found_out = differences(config, expected, found)
    groups = (found_out.missing, found_out.wrong, found_out.extra)
    problems = [text for group in groups for text in _first([problem.text for problem in group])]
    if problems:
        raise CheckpointError("; ".join(problems))


def _scale_problem(spot: Place, weight: Stored, scale: Stored | None) -> str | None:
    """What is wrong with the scales at `spot`, of a weight that is stored in 8 bits."""
    shapes = scale_shapes(weight.shape)
    if scale is None:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        return f"{_label(spot)}: expected {wanted} beside a weight of {weight.dtype}, found no such tensor"
    if scale.shape in shapes and scale.dtype in FLOATING:
        return None
    return _shape_problem(_label(spot), shapes, scale)


def _label(spot: Place) -> str:
    name = spot.name
    if spot.part is not None:
        name = f"{spot.name.rpartition('.')[0]}.{spot.expert}.{spot.part}_proj.weight"
    return f"{name}_scale(_inv)" if spot.scale else name


def _shape_problem(name: str, shapes: list[tuple[int, ...]], stored: Stored) -> str:
    wanted = " or ".join(str(list(shape)) for shape in shapes)
    return (
        f"{name}: expected {wanted} of {', '.join(FLOATING)}, "
        f"found {list(stored.shape)} of {stored.dtype} in {stored.file.name}"
    )


def _files(parts: Mapping[Place, Stored]) -> str:
    return ", ".join(sorted({stored.file.name for stored in parts.values()}))


def _first(problems: list[str], count: int = 3) -> list[str]:
    more = len(problems) - count
    return problems if more <= 0 else [*problems[:count], f"and {more} more of this kind"]


def _eos_ids(checked: Inspection, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    generation = checked.path / "generation_config.json"
    named = token_ids(read_json(generation), generation.name) if is_there(generation) else ()
    own = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    merged = merge_ids(checked.config.eos_token_ids, named, own)
    return tuple(token for token in merged if 0 <= token < checked.config.vocab_size)


def _read(
    checked: Inspection, dtype: torch.dtype, device: torch.device, narrow: bool, progress: Progress | None
) -> dict[str, Weight]:
    shapes = target_shapes(checked.config) | mtp_shapes(checked.config)
    weights, scales = (
        [(spot, stored) for parts in checked.sources.values() for spot, stored in parts.items() if spot.scale == which]
        for which in (False, True)
    )
    scale_of = {spot: tensor.clone() for spot, tensor in _in_files(scales)}
    groups = {name: _groups(checked.sources[name]) if narrow and name.endswith(NARROW) else 0 for name in shapes}
    dtypes = {name: torch.float32 if name.endswith(KEPT_FLOAT32) else dtype for name in shapes}
    needed = sum(_bytes(shape, groups[name], dtypes[name]) for name, shape in shapes.items())
    with room_for("weights", needed, device):
        tensors = {name: _empty(shape, groups[name], dtypes[name], device) for name, shape in shapes.items()}
    done, total = 0, sum(_count(stored.shape) for _, stored in weights)
    for spot, tensor in _in_files(weights):
        _fill(tensors[spot.name], spot, tensor, scale_of.get(replace(spot, scale=True)))
        done += tensor.numel()
        if progress is not None:
            progress(done, total)
    if checked.tied_head is not None:
        _check_tied_head(checked, checked.tied_head)
    return tensors


def _in_files(jobs: Iterable[tuple[Place, Stored]]) -> Iterator[tuple[Place, Tensor]]:
    """The tensors, file by file, as they are mapped: to be copied before the next is asked for."""
    by_file: dict[Path, list[tuple[Place, Stored]]] = {}
    for spot, stored in jobs:
        by_file.setdefault(stored.file, []).append((spot, stored))
    for file in sorted(by_file):
        with open_safetensors(file) as reader:
            for spot, stored in by_file[file]:
                yield spot, _tensor(reader, stored)


def _groups(parts: Mapping[Place, Stored]) -> int:
    """How many scales a row of the tensor has in memory; 0 if not all its parts are stored in 8 bits."""
    if any(not spot.scale and stored.dtype != EIGHT_BITS for spot, stored in parts.items()):
        return 0
    return max(stored.shape[-1] if stored.shape else 1 for spot, stored in parts.items() if spot.scale)


def _bytes(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> int:
    return _count(shape) + 4 * _count((*shape[:-1], groups)) if groups else _count(shape) * dtype.itemsize


def _empty(shape: tuple[int, ...], groups: int, dtype: torch.dtype, device: torch.device) -> Weight:
    if not groups:
        return torch.empty(shape, dtype=dtype, device=device)
    scale = torch.empty(*shape[:-1], groups, device=device)
    return Quantised(torch.empty(shape, dtype=FLOAT8, device=device), scale, dtype)


def _fill(into: Weight, spot: Place, stored: Tensor, scale: Tensor | None) -> None:
    """Copy a stored tensor to where it goes: a copy of our own, not the mapped file, aligned, and safe when the file is
    replaced meanwhile."""
    if scale is None:
        assert isinstance(into, Tensor)
        part = _part(into, spot)
        part.copy_(stored.reshape(part.shape))
        return
    if scale.dim() < 2:
        scale = scale.reshape(1, 1)
    read = from_stored(stored, scale, into.dtype)
    if isinstance(into, Quantised):
        _part(into.weight, spot).copy_(read.weight)
        _part(into.scale, spot).copy_(read.scale)  # one of a row also where other rows have several
    else:
        part = _part(into, spot)
        part.copy_(read.dense().reshape(part.shape))


def _tensor(reader: object, stored: Stored) -> Tensor:
    try:
        tensor: Tensor = reader.get_tensor(stored.name)  # type: ignore[attr-defined]  # safetensors ships no types for it
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{stored.file}: {stored.name}: expected a readable tensor, found: {error}") from error
    if tuple(tensor.shape) != stored.shape:
        raise CheckpointError(f"{stored.file}: {stored.name}: expected {stored.shape} as before, the file has changed")
    return tensor


def _part(tensor: Tensor, spot: Place) -> Tensor:
    """The region of a canonical tensor that `spot` fills (gate rows stand before up rows)."""
    if spot.expert is None:
        return tensor
    expert = tensor[spot.expert]
    if spot.part == "down":
        return expert
    gate, up = expert.chunk(2)
    return gate if spot.part == "gate" else up


def _check_tied_head(checked: Inspection, head: Stored) -> None:
    """A head of its own beside `tie_word_embeddings` is harmless only while it repeats the embedding."""
    (embedding,) = checked.sources[EMBEDDING].values()
    with open_safetensors(head.file) as ours, open_safetensors(embedding.file) as other:
        if not torch.equal(_tensor(ours, head), _tensor(other, embedding)):
            raise CheckpointError(f"{HEAD}: expected the embedding's values (embeddings are tied), found others")


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
