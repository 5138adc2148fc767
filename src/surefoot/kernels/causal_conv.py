"""The short depthwise causal convolution in front of the delta rule, as explicit taps.

A library convolution changes its algorithm with the number of tokens; products and sums written out do not. Products
and sums are separate operations here because a fused multiply-add rounds once where two operations round twice, and
whether the compiler fuses them differs between PyTorch's vector and scalar loops.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(strip: Tensor, taps: Tensor, out: Tensor | None = None) -> Tensor:
    """Convolve strip [n + width - 1, C] with taps [width, C] (the last tap meets the newest row) -> [n, C]."""
    width = taps.shape[0]
    rows = strip.shape[0] - width + 1
    out = torch.mul(strip[:rows], taps[0], out=out)
    for tap in range(1, width):
        out += strip[tap : tap + rows] * taps[tap]
    return out
