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


def _widening(shift: int, mask: int, power: int, kind: str) -> tl.constexpr:
    """What `widened` does to two elements: the bytes moved down by `shift` from the upper end of 16 bits, exponent and
    fraction cut out by `mask`, the sign put in front, all times the number `power` of type `kind`."""
    return tl.constexpr(f"""{{
        .reg .b32 bits, sign, factor;
        mov.b32 factor, {power * 0x10001:#x};
        shl.b32 bits, $2, {8 - shift};
        shl.b32 sign, $2, 8;
        and.b32 bits, bits, {mask * 0x10001:#x};
        lop3.b32 bits, sign, 0x80008000, bits, 0xEA;
        mul.{kind} $0, bits, factor;
        shr.u32 bits, $2, {shift};
        and.b32 bits, bits, {mask * 0x10001:#x};
        lop3.b32 bits, $2, 0x80008000, bits, 0xEA;
        mul.{kind} $1, bits, factor;
    }}""")


LARGE = tl.constexpr(2.0**120)
TO_BFLOAT16 = _widening(4, 0x07F0, 0x7B80, "bf16x2")  # 2^120
TO_FLOAT16 = _widening(1, 0x3F80, 0x5C00, "f16x2")  # 2^8


@triton.jit
def widened(pair, like, INTERPRETED: tl.constexpr):
    """The low bytes, then the high bytes of int16 elements, which are float8 (e4m3), in the wider type of `like`.

    A 16-bit float begins with the same sign, exponent and fraction as an e4m3 one, but its exponent has more bits in
    front and another bias. So each byte is moved to its place, its sign put in front, and a product with a power of
    two, exact for the subnormals too, makes up for the bias: nine instructions for four numbers. The compiler's own
    conversions, one number at a time, take more time than reading the bytes does. (e4m3's NaN becomes 480.)
    """
    if INTERPRETED or like.dtype == tl.float32:
        low = pair.to(tl.int32)
        high = low >> 8
        low = ((low & 0x80) << 24 | (low & 0x7F) << 20).to(tl.float32, bitcast=True) * LARGE
        high = ((high & 0x80) << 24 | (high & 0x7F) << 20).to(tl.float32, bitcast=True) * LARGE
        return low.to(like.dtype), high.to(like.dtype)
    code: tl.constexpr = TO_BFLOAT16 if like.dtype == tl.bfloat16 else TO_FLOAT16
    types: tl.constexpr = (like.dtype, like.dtype)
    return tl.inline_asm_elementwise(code, "=r,=r,r", [pair], dtype=types, is_pure=True, pack=2)
