"""Where each stored tensor belongs: every spelling of a name to the canonical one of `surefoot.model.tensors`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from surefoot.config import ModelConfig
from surefoot.kernels.quantise import GROUP

Projection = Literal["gate", "up", "down"]

VISION_PREFIXES = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")
# First match wins, so the longer prefix stands first.
PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.mtp.", "mtp."),
    ("language_model.lm_head.", "lm_head."),
    ("model.mtp.", "mtp."),
)
EXPERT = re.compile(r"(?P<block>.*\.mlp\.experts\.)(?P<expert>0|[1-9]\d{0,5})\.(?P<part>gate|up|down)_proj\.weight")
# Scales of weights in 8 bits: the name behind which they stand, and how they are called. Despite "inv" all multiply.
SCALE = re.compile(r"(?P<weight>.*(?:\.weight|\.experts\.(?:gate_up|down)_proj))_scale(?:_inv)?")
# Follow from the config, or are scales of activations and caches, which keep their type here.
UNUSED = ("rotary_emb.inv_freq", ".input_scale", "activation_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class Place:
    """A canonical tensor, or one expert's share of a fused one (then `expert` and `part` say which); or the scales of
    either."""

    name: str
    expert: int | None = None
    part: Projection | None = None
    scale: bool = False


def place(stored: str) -> Place | None:
    """Where the tensor stored under this name goes; None if it is no part of the text model, or not needed."""
    if stored.startswith(VISION_PREFIXES) or stored.endswith(UNUSED):
        return None
    scales = SCALE.fullmatch(stored)
    if scales is not None:
        spot = place(scales["weight"])
        return None if spot is None else replace(spot, scale=True)
    name = stored
    for prefix, canonical in PREFIXES:
        if stored.startswith(prefix):
            name = canonical + stored[len(prefix) :]
            break
    match = EXPERT.fullmatch(name)
    if match is None:
        return Place(name)
    part: Projection = match["part"]  # type: ignore[assignment]  # the pattern admits these three only
    fused = "down_proj" if part == "down" else "gate_up_proj"
    return Place(match["block"] + fused, int(match["expert"]), part)


def is_mtp(name: str) -> bool:
    """Whether a canonical name belongs to the MTP head."""
    return name.startswith("mtp.")


def stored_shapes(place: Place, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes in which a tensor of canonical `shape` may be stored; the usual one first."""
    if place.part is not None:
        _, rows, columns = shape
        return [(rows, columns) if place.part == "down" else (rows // 2, columns)]
    if place.name.endswith("conv1d.weight"):
        return [shape, (shape[0], shape[2])]
    if place.name.endswith("shared_expert_gate.weight"):
        return [shape, (shape[1],)]
    return [shape]


def scale_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes in which the scales of a weight stored in 8 bits may come: of its squares, of its rows, of the whole;
    for every expert if these are stacked."""
    *stacked, rows, columns = shape
    lead = tuple(stacked)
    squares = (*lead, -(-rows // GROUP), -(-columns // GROUP))
    return [squares, (*lead, rows, 1), (*lead, 1, 1), *([] if lead else [(1,), ()])]


def pieces(name: str, config: ModelConfig) -> list[Place]:
    """The per-expert places that make up the canonical tensor `name`; empty if it is not a fused one."""
    if config.moe is None or not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return []
    parts: tuple[Projection, ...] = ("down",) if name.endswith("down_proj") else ("gate", "up")
    return [Place(name, expert, part) for expert in range(config.moe.num_experts) for part in parts]
