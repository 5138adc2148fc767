"""Root-mean-square norms, float32. Each row is reduced by itself; callers keep at least two rows (see `rows`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.kernels.rows import by_row


def inverse_norm(x: Tensor, floor: Tensor) -> Tensor:
    """1 / sqrt(sum(x^2) + floor) over the last axis, which is kept with size 1."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.mul_(norm).add_(floor).rsqrt_()


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis; a zero-centred weight w is handed over as scale = 1 + w.

    `scale` [..., N] broadcasts against x. The mean's division is carried out in advance, on scale and eps.
    """

    def __init__(self, scale: Tensor, eps: float) -> None:
        width = scale.shape[-1]
        self.scale, self.eps = scale.float(), eps
        self._scale = self.scale * width**0.5
        self._floor = torch.tensor(eps * width, device=scale.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., N] float32 -> the same shape."""
        return (x * inverse_norm(x, self._floor)).mul_(self._scale)


class L2Norm:
    """x / sqrt(sum(x^2) + eps) over the last axis: eps stands inside the root and beside the sum, not the mean."""

    def __init__(self, device: torch.device, eps: float = 1e-6) -> None:
        self._floor = torch.tensor(eps, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., N] float32 -> the same shape."""
        return x * inverse_norm(x, self._floor)


class GatedRMSNorm:
    """The DeltaNet output norm: per head of width N, RMSNorm(x) * silu(gate). The norm comes before the gate, and its
    weight is plain (not zero-centred)."""

    def __init__(self, scale: Tensor, eps: float) -> None:
        self._norm = RMSNorm(scale, eps)
        self.scale, self.eps = self._norm.scale, eps
        self._width = scale.shape[-1]

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [n, heads * N] -> [n, heads * N]."""
        rows, width = x.shape
        normed = self._norm(x.view(rows, -1, self._width))
        return by_row(F.silu, gate).mul_(normed.view(rows, width))
