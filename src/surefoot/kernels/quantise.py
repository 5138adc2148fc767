"""Weights of 8 bits: float8_e4m3fn numbers and float32 scales. Activations keep their type.

A scale belongs to a whole row of the weight or to `GROUP` inputs of a row. Published checkpoints store one for a square
of `GROUP` rows and inputs; repeating it for every row costs three per cent and lets rows be merged and reordered.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # of FLOAT8
GROUP = 128
CHUNK = 2**26  # elements quantised at once, for they are float32 then


@dataclass(frozen=True)
class Quantised:
    """`weight` FLOAT8 [..., N, K] times `scale` float32 [..., N, 1], or [..., N, ceil(K / GROUP)] in groups; it stands
    for a weight of type `dtype`."""

    weight: Tensor
    scale: Tensor
    dtype: torch.dtype

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
        return tuple(Quantised(weight, scale, self.dtype) for weight, scale in pairs)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight in `dtype`, or another one."""
        dense = self.weight.to(dtype or self.dtype)
        width = GROUP if self.groups > 1 else dense.shape[-1]
        for part, scale in zip(dense.split(width, dim=-1), self.scale.split(1, dim=-1), strict=True):
            part.mul_(scale)  # in float32, rounded once
        return dense


Weight = Tensor | Quantised


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


def take_rows(weight: Weight, rows: Tensor) -> Weight:
    """The rows int64 [M] of a weight [N, K], in memory of their own: [M, K]."""
    if isinstance(weight, Tensor):
        return weight[rows]
    numbers = weight.weight.view(torch.uint8)[rows].view(FLOAT8)  # not every device gathers FLOAT8
    return Quantised(numbers, weight.scale[rows], weight.dtype)


def from_blocks(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantised:
    """A published weight: FLOAT8 [N, K] and `weight_scale_inv` [ceil(N / GROUP), ceil(K / GROUP)], which multiplies the
    weight's squares despite its name."""
    rows = scale.float().repeat_interleave(GROUP, dim=0)[: weight.shape[0]]
    return Quantised(weight, rows.contiguous(), dtype)


def merge(weights: Seq[Weight]) -> Weight:
    """Weights [N_i, K] of one kind, row after row."""
    if len(weights) == 1:
        return weights[0]
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(plain) == len(weights):
        return torch.cat(plain)
    narrow = [weight for weight in weights if isinstance(weight, Quantised)]
    assert not plain, "weights of one kind"
    groups = max(weight.groups for weight in narrow)
    scales = [weight.scale.expand(-1, groups) for weight in narrow]
    return Quantised(torch.cat([weight.weight for weight in narrow]), torch.cat(scales), narrow[0].dtype)
