"""Root-mean-square norms, float32. Each row is reduced by itself; callers keep at least two rows (see `rows`)."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.kernels.rows import by_row


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which is kept with size 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.mul_(norm).div_(x.shape[-1]).add_(eps).rsqrt_()


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / rms(x) * scale over the last axis; a zero-centred weight w is handed over as scale = 1 + w."""
    return (x * inverse_rms(x, eps)).mul_(scale)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis: eps stands inside the root and beside the sum."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.mul_(norm).add_(eps).rsqrt_()


def gated_rms_norm(x: Tensor, gate: Tensor, scale: Tensor, eps: float) -> Tensor:
    """The DeltaNet output norm: per head x / rms(x) * scale, then times silu(gate). x, gate [n, heads * dim], scale
    [dim]; the norm comes before the gate, and its weight is plain (not zero-centred)."""
    rows, width = x.shape
    heads = x.view(rows, -1, scale.shape[0])
    normed = rms_norm(heads, scale, eps).view(rows, width)
    return by_row(torch.nn.functional.silu, gate).mul_(normed)
