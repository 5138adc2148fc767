"""Weights of 8 bits: float8_e4m3fn numbers and float32 scales. Activations keep their type.

A scale belongs to a whole row of the weight or to `GROUP` inputs of a row. Published checkpoints store one for a square
of `GROUP` rows and inputs; repeating it for every row costs three per cent and lets rows be merged and reordered.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # of FLOAT8
GROUP = 128
CHUNK = 2**26  # elements quantised at once, for they are float32 then


@dataclass(frozen=True)
class Quantised:
    """`weight` FLOAT8 [..., N, K] times `scale` float32 [..., N, 1], or [..., N, ceil(K / GROUP)] in groups; it stands
    for a weight of type `dtype`. If `halved`, every `GROUP` inputs' numbers stand in the order of `in_halves`."""

    weight: Tensor
    scale: Tensor
    dtype: torch.dtype
    halved: bool = False

    @property
    def shape(self) -> torch.Size:
        """That of the weight."""
        return self.weight.shape

    @property
    def is_cuda(self) -> bool:
        """Whether it is on a GPU."""
        return self.weight.is_cuda

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.scale.shape[-1]

    def unbind(self) -> tuple[Quantised, ...]:
        """Views along the first axis."""
        pairs = zip(self.weight.unbind(), self.scale.unbind(), strict=True)
        return tuple(replace(self, weight=weight, scale=scale) for weight, scale in pairs)

    def in_groups(self) -> Tensor:
        """The scales [..., N, ceil(K / GROUP)]."""
        return self.scale.expand(*self.scale.shape[:-1], -(-self.shape[-1] // GROUP))

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight in `dtype`, or another one."""
        numbers = _interleaved(self.weight, GROUP // 2, 2).view(self.shape) if self.halved else self.weight
        dense = numbers.to(dtype or self.dtype)
        width = GROUP if self.groups > 1 else dense.shape[-1]
        for part, scale in zip(dense.split(width, dim=-1), self.scale.split(1, dim=-1), strict=True):
            part.mul_(scale)  # in float32, rounded once
        return dense


Weight = Tensor | Quantised


def _interleaved(numbers: Tensor, rows: int, columns: int) -> Tensor:
    """Every `GROUP` numbers of the last axis, as `rows` of so many columns, column by column."""
    groups = numbers.view(torch.uint8).unflatten(-1, (-1, rows, columns))  # not every operation knows FLOAT8
    swapped: Tensor = groups.transpose(-1, -2).contiguous()
    return swapped.view(FLOAT8)


def in_halves(weight: Quantised) -> Quantised:
    """The weight with every `GROUP` inputs in the order 0, 64, 1, 65, ...: two neighbouring bytes then belong to the
    same place of the group's two halves, and a kernel widens them together, each half a tile of its own. Unchanged if
    the last group is not whole."""
    if weight.halved or weight.shape[-1] % GROUP:
        return weight
    return replace(weight, weight=_interleaved(weight.weight, 2, GROUP // 2).view(weight.shape), halved=True)


def dense_of(weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """A plain tensor, in the type that the weight has or stands for, or another one."""
    return weight.dense(dtype) if isinstance(weight, Quantised) else weight.to(dtype or weight.dtype)


def scales_of(weight: Weight) -> tuple[Tensor, Tensor, int]:
    """What a kernel reads: numbers, scales and how many of these a row has. Without any, something takes their place
    that is not to be read."""
    return (weight.weight, weight.scale, weight.groups) if isinstance(weight, Quantised) else (weight, weight, 0)


def quantise(weight: Tensor) -> Quantised:
    """weight [..., N, K] to the nearest FLOAT8 numbers, the largest of a row being `LARGEST`."""
    flat = weight.flatten(0, -2)
    out = torch.empty_like(flat, dtype=FLOAT8)
    scale = torch.empty(flat.shape[0], 1, device=weight.device)
    rows = max(1, CHUNK // flat.shape[1])
    for values, numbers, factors in zip(flat.split(rows), out.split(rows), scale.split(rows), strict=True):
        largest = values.abs().amax(dim=-1, keepdim=True).float()
        factors.copy_(torch.where(largest > 0, largest / LARGEST, 1.0))
        numbers.copy_(values.float() / factors)
    return Quantised(out.view(weight.shape), scale.view(*weight.shape[:-1], 1), weight.dtype)


def from_stored(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantised:
    """A published weight: FLOAT8 [..., N, K], and the scales that multiply it (those called `weight_scale_inv`, too):
    [..., n, k] for squares of `GROUP` rows and inputs, [..., N, 1] for rows, [..., 1, 1] for the whole."""
    rows = scale.float()
    if rows.shape[-2] != weight.shape[-2]:
        span = GROUP if rows.shape[-2] == -(-weight.shape[-2] // GROUP) else weight.shape[-2]
        rows = rows.repeat_interleave(span, dim=-2)[..., : weight.shape[-2], :]
    return Quantised(weight, rows.contiguous(), dtype)


def on_rows(change: Callable[..., Tensor], *weights: Weight) -> Weight:
    """`change(*weights)`, for a change that moves rows [..., K] and at most pads them with zeros: of weights in 8 bits
    it moves numbers and scales alike. Where only some are in 8 bits, these are made plain first, so that none loses
    any."""
    narrow = [weight for weight in weights if isinstance(weight, Quantised)]
    assert len({weight.halved for weight in narrow}) <= 1, "rows whose numbers stand in one order"
    if len(narrow) < len(weights):
        return change(*(dense_of(weight) for weight in weights))
    several = any(weight.groups > 1 for weight in narrow)
    scale = change(*(weight.in_groups() if several else weight.scale for weight in narrow))
    numbers = change(*(weight.weight.view(torch.uint8) for weight in narrow))  # not every operation knows FLOAT8
    return replace(narrow[0], weight=numbers.view(FLOAT8), scale=scale.contiguous())


def merge(weights: Seq[Weight]) -> Weight:
    """Weights [N_i, K], row after row; see `on_rows` for those of two kinds."""
    return weights[0] if len(weights) == 1 else on_rows(lambda *parts: torch.cat(parts), *weights)
