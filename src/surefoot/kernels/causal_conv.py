"""The short depthwise causal convolution in front of the delta rule, as explicit taps.

A library convolution changes its algorithm with the number of tokens; products and sums written out do not. Products
and sums are separate operations here because a fused multiply-add rounds once where two operations round twice, and
whether the compiler fuses them differs between PyTorch's vector and scalar loops.
"""

from __future__ import annotations

from torch import Tensor


def causal_conv(strip: Tensor, taps: Tensor) -> Tensor:
    """Convolve strip [n + width - 1, C] with taps [width, 1, C] (the last tap meets the newest row) -> [n, C]."""
    width, channels = taps.shape[0], strip.shape[1]
    step = strip.stride(0)
    shifted = strip.as_strided((width, strip.shape[0] - width + 1, channels), (step, step, 1))
    return (shifted * taps).sum(0)
