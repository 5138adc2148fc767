"""Elementwise functions and padding that keep a row's bits independent of its neighbours.

On the CPU, PyTorch evaluates a transcendental function with vector instructions, and the last few elements of a
thread's share with scalar ones that round differently. Which elements those are depends on the total size. Whole
vectors in one thread's share avoid the scalar path: rows of whole vectors go in groups that one thread takes; others go
row by row, so that a row's share is the row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LANES = 32  # two AVX-512 registers of float32: the step of PyTorch's vector loop
GRAIN = 32768  # elements below which PyTorch keeps an elementwise function on one thread
MIN_ROWS = 2  # reductions over a single row and one-row matrix products take other code paths
CUDA_ROWS = 16  # rows of every pass on a GPU, where a reduction is laid out by the number of its results


def padded_rows(rows: int, device: torch.device, least: int = MIN_ROWS) -> int:
    """How many rows a decode or verify pass carries for `rows` real ones, on a CPU at least `least`."""
    return -(-rows // CUDA_ROWS) * CUDA_ROWS if device.type == "cuda" else max(rows, least)


def rows_of_a_pass(device: torch.device) -> int | None:
    """How many real rows a pass may hold and keep the promise; None if any number."""
    return CUDA_ROWS if device.type == "cuda" else None


def lane_multiple(width: int) -> int:
    """`width` rounded up to whole vectors."""
    return -(-width // LANES) * LANES


def by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise `function` of x [n, width] whose rows do not depend on n."""
    rows, width = x.shape
    group = max(1, GRAIN // width) if width % LANES == 0 else 1
    if x.is_cuda or rows <= group:
        return function(x)
    return torch.cat([function(part) for part in x.split(group)])


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [n, width]: the SwiGLU activation."""
    return by_row(torch.nn.functional.silu, gate).mul_(up)
