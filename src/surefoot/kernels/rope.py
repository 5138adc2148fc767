"""Rotary position embedding on the first `rotary_dim` dimensions (split halves: dimension j turns with j + R/2)."""

from __future__ import annotations

import torch
from torch import Tensor


class RopeTable:
    """Cosines and sines of positions 0 .. max_len - 1, float32. For text the axes of multi-axis RoPE are all equal,
    so this is ordinary RoPE."""

    def __init__(self, rotary_dim: int, theta: float, max_len: int, device: torch.device) -> None:
        # Angles in float64: at long contexts a float32 product loses the fraction of a turn.
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
        angles = torch.outer(torch.arange(max_len, dtype=torch.float64, device=device), theta**-exponent)
        self.cos = angles.cos().float().repeat(1, 2).unsqueeze(1)  # [max_len, 1, R]
        # The sign of the half-turn rides on the sine: out = x * cos + swap_halves(x) * sin.
        self.sin = torch.cat([-angles.sin(), angles.sin()], dim=1).float().unsqueeze(1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [n, 1, R], for positions [n]."""
        return self.cos[positions], self.sin[positions]


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [n, heads, D] in place; cos, sin [n, 1, R] with R <= D even."""
    rotary = x[..., : cos.shape[-1]]
    half = cos.shape[-1] // 2
    swapped = torch.cat([rotary[..., half:], rotary[..., :half]], dim=-1)
    rotary.mul_(cos).add_(swapped.mul_(sin))
    return x
