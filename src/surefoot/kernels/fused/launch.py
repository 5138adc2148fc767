"""What every Triton kernel of this folder shares.

Kernels of one step follow one another at microseconds' distance, so each is launched before its predecessor has ended
(programmatic dependent launch: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"). A
kernel calls `wait_for_inputs`, and then, not before, `let_next_start`. So while a kernel runs ahead of its wait, every
kernel but its immediate predecessor has ended: it may read weights, and whatever older kernels wrote, but must wait
before it reads what the predecessor wrote or writes what the predecessor reads.

Small kernels let the next one start at once. One that fills the card does so at its end: programs of the next kernel
that find room beside it would crowd together where it happens to be, and finish late (9B, one token: 5.05 ms a pass
against 4.39 without dependent launch, on an H200).

Without a GPU the same kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the import), one program after
another; it knows neither dependent launch nor 16-bit products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRET: bool = triton.knobs.runtime.interpret
TILE_ROWS = tl.constexpr(16)  # rows of every tile product: one instruction shape, so one order of summation


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of every launch on the device: `DEPENDENT` for the kernel, `launch_pdl` for the driver.

    Products and sums stay apart: which of two products a compiler fuses with their sum may differ from one loop to the
    next, and with it the last bit.
    """
    dependent = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    options: dict[str, Any] = {"DEPENDENT": dependent, "enable_fp_fusion": False}
    return options | {"launch_pdl": True} if dependent else options


def recorded(action: Callable[[], object]) -> Callable[[], None]:
    """The action as a CUDA graph, to be replayed. It is run once before, for what has to be compiled or allocated."""
    action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Return once every earlier kernel has ended and its writes can be seen."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """Allow the next kernel of the stream to start once all programs of this one have come here, or ended."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, BYTES: tl.constexpr, DEPENDENT: tl.constexpr):
    """Ask for BYTES bytes (a multiple of 16) from each pointer on to be brought into the L2 cache."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [pointers.to(tl.int64, bitcast=True), tl.full(pointers.shape, BYTES, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), without overflow on the way."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)


@triton.jit
def product(a, b, INTERPRETED: tl.constexpr):
    """a [M, K] times b [K, N] of one type, summed in float32."""
    if INTERPRETED:  # the interpreter multiplies 16-bit patterns as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
