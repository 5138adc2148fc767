"""Muon over stacks of equal-shaped matrices, and the split of parameters between it and AdamW."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def orthogonalise(stack: Tensor) -> Tensor:
    """Push all singular values of [n, r, c] towards 1: five quintic Newton-Schulz steps in bf16."""
    x: Tensor = stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class StackedMuon(torch.optim.Optimizer):
    """Muon (momentum, orthogonalised update, decoupled decay); one parameter group per shape.

    torch.optim.Muon treats matrices one by one; stacking those of a shape makes a few large
    products of some hundred small ones. Updates are scaled to the size that AdamW's have, so
    both optimisers can use learning rates of one kind.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        compiled: bool = False,
    ) -> None:
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            if parameter.ndim != 2:
                raise ValueError(f"Muon: expected matrices, found shape {tuple(parameter.shape)}")
            shapes[tuple(parameter.shape)].append(parameter)
        groups = [{"params": members} for members in shapes.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._orthogonalise: Callable[[Tensor], Tensor] = (
            torch.compile(orthogonalise, dynamic=False) if compiled else orthogonalise
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every group."""
        for group in self.param_groups:
            members: list[nn.Parameter] = group["params"]
            gradient = torch.stack([p.grad for p in members if p.grad is not None])
            state = self.state[members[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradient)
            buffer: Tensor = state["momentum"]
            buffer.lerp_(gradient, 1 - group["momentum"])
            update = self._orthogonalise(gradient.lerp(buffer, group["momentum"]))
            rows, columns = members[0].shape
            scale = 0.2 * math.sqrt(max(rows, columns))
            weights = [p.data for p in members]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, list(update.float().unbind(0)), alpha=-group["lr"] * scale)


def make_optimisers(
    named: list[tuple[str, nn.Parameter]], lr_muon: float, lr_adam: float, weight_decay: float, fused: bool
) -> list[torch.optim.Optimizer]:
    """Muon for the large matrices of the layers, AdamW for embedding, norms, gates and convolutions."""
    matrices = [p for n, p in named if p.ndim == 2 and min(p.shape) > 16 and "embed" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for _, p in named if id(p) not in chosen]
    return [
        StackedMuon(matrices, lr_muon, weight_decay=weight_decay, compiled=fused),
        torch.optim.AdamW(others, lr=lr_adam, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.0, fused=fused),
    ]


def schedule(step: int, total: int, warmup: int, hold: float) -> float:
    """Learning-rate factor: linear rise, level until ``hold`` of the run, then linear fall to zero."""
    if step < warmup:
        return (step + 1) / warmup
    start = max(warmup, int(hold * total))
    return 1.0 if step < start else max(0.0, (total - step) / max(1, total - start))
