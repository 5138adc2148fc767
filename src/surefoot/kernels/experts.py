"""The experts of one layer in one tensor each for gate and up, and for down, the shared expert as the last one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.kernels.quantise import Weight, dense_of, on_rows


@dataclass(frozen=True)
class PackedExperts:
    """`router` [E + 1, H], its last row the shared expert's gate; `gate_up` [E + 1, 2 * I, H], an expert's gate rows
    first; `down` [E + 1, H, I]."""

    router: Tensor
    gate_up: Weight
    down: Weight


def pack_gate_up(gate_up: Tensor, shared_gate: Tensor, shared_up: Tensor) -> Tensor:
    """gate_up [E, 2 * Im, H], shared_gate and shared_up [Is, H] -> [E + 1, 2 * I, H], I = max(Im, Is), the narrower
    kind padded with zeros: a zero gate or up row gives a zero activation, so padding changes no sum."""
    experts, width, hidden = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    shared = shared_gate.shape[0]
    wide = max(width, shared)
    packed = gate_up.new_empty(experts + 1, 2, wide, hidden)
    packed[:experts, :, :width] = gate_up.view(experts, 2, width, hidden)
    packed[:experts, :, width:] = 0
    packed[experts, 0, :shared] = shared_gate
    packed[experts, 1, :shared] = shared_up
    packed[experts, :, shared:] = 0
    return packed.view(experts + 1, 2 * wide, hidden)


def pack_down(down: Tensor, shared_down: Tensor) -> Tensor:
    """down [E, H, Im], shared_down [H, Is] -> [E + 1, H, I]; see `pack_gate_up`."""
    experts, hidden, width = down.shape
    shared = shared_down.shape[1]
    packed = down.new_empty(experts + 1, hidden, max(width, shared))
    packed[:experts, :, :width] = down
    packed[:experts, :, width:] = 0
    packed[experts, :, :shared] = shared_down
    packed[experts, :, shared:] = 0
    return packed


def pack_experts(take: Callable[[str], Weight], cut: Callable[[Weight], Weight]) -> PackedExperts:
    """The packed tensors of a layer from those that `take(name)` hands over for good: each is let go as soon as it has
    been copied, so that no more than one of them is there twice. `cut` makes the experts' weights of the packed ones;
    the router keeps its type."""
    gate, up = take("shared_expert.gate_proj.weight"), take("shared_expert.up_proj.weight")
    gate_up = cut(on_rows(pack_gate_up, take("experts.gate_up_proj"), gate, up))
    down = cut(on_rows(pack_down, take("experts.down_proj"), take("shared_expert.down_proj.weight")))
    router = torch.cat([dense_of(take(name)) for name in ("gate.weight", "shared_expert_gate.weight")])
    return PackedExperts(router, gate_up, down)
