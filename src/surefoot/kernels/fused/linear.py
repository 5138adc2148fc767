"""Linear layers for few rows, at the speed of memory, whose rows do not depend on one another.

Every program multiplies tiles of 16 rows, padding the missing ones, with one block of the weight's rows, and walks the
input axis in fixed blocks. A row's sums are then the same operations in the same order, however many rows there are.
With few output features the input axis is cut into a fixed number of parts besides; whichever program of a block comes
last adds the parts up in their order.

What stands around the product rides along: the norm in front of it (its factor per row is applied behind, as it
factors out), the residual addition or the SwiGLU activation behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from surefoot.kernels.fused.launch import INTERPRET, TILE_ROWS, launch_options, prefetch, product, wait_for_inputs

Epilogue = Literal["store", "add", "swiglu"]


@dataclass(frozen=True)
class Tiling:
    """How one weight shape is cut: output features and inputs of a tile, parts of the input axis, warps, stages."""

    block_n: int
    block_k: int
    parts: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 8


def choose_tiling(out_features: int, in_features: int, weight_bytes: int, paired: bool) -> Tiling:
    """A tiling for a weight [out_features, in_features] (rows of gate and up counted once if `paired`), as measured
    on an H200 (docs/gpu.md)."""
    if weight_bytes == 4:
        return Tiling(16, 64, stages=3)
    wide = 2 if weight_bytes == 1 else 1  # as many bytes a tile
    if paired:
        return Tiling(32, 128 * wide, warps=4, stages=4) if out_features >= 8192 else Tiling(16, 128 * wide, stages=5)
    if out_features >= 100_000:
        return Tiling(32, 256 * wide)
    if out_features >= 16_384:
        return Tiling(64, 128 * wide, warps=8)
    if out_features >= 6144:
        return Tiling(32, 128 * wide, stages=5)
    return Tiling(16, 256 * wide, stages=4)


@dataclass(frozen=True)
class Workspace:
    """Scratch that the layers of one stream take turns to use: partial sums, and counters that rest at zero."""

    sums: Tensor
    squares: Tensor
    counters: Tensor

    @classmethod
    def allocate(cls, rows: int, out_features: int, parts: int, device: torch.device) -> Workspace:
        """For layers of at most so many rows, output features (gate and up both counted) and parts."""
        rows = -(-rows // 16) * 16
        blocks = -(-out_features // 16) * (rows // 16)
        return cls(
            torch.empty(parts * rows * out_features if parts > 1 else 1, device=device),
            torch.empty(parts * 16 * blocks if parts > 1 else 1, device=device),
            torch.zeros(blocks, dtype=torch.int32, device=device),
        )


def linear_reference(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    workspace: Workspace | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    epilogue: Epilogue = "store",
    row_scale: Tensor | None = None,
    tiling: Tiling | None = None,
) -> None:
    """out = epilogue(norm(x) weight^T). x [R, K], or [B, W, K] of which sequences may lie
    apart; weight [N, K] (for "swiglu" [2 N, K]: gates, then ups); out [R, N].

    With `norm` float32 [K] (1 + w of a zero-centred weight) x is normalised first: x / sqrt(mean(x^2) + eps) * norm.
    "add" adds to out; "swiglu" stores silu(gate) * up. `row_scale` float32 [rows of weight] multiplies the product: the
    scales of 8-bit weights.
    """
    inputs = x.flatten(0, -2).float()
    factor = torch.ones(inputs.shape[0], 1, device=x.device)
    if norm is not None:
        factor = torch.rsqrt(inputs.square().mean(-1, keepdim=True) + eps)
        inputs = inputs * norm
    kind = weight.dtype if weight.dtype.itemsize > 1 else torch.bfloat16
    result = F.linear(inputs.to(kind).float(), weight.float()) * factor
    if row_scale is not None:
        result = result * row_scale
    if epilogue == "swiglu":
        gate, up = result.chunk(2, dim=-1)
        result = F.silu(gate) * up
    if epilogue == "add":
        out += result
    else:
        out.copy_(result)


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    workspace: Workspace | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    epilogue: Epilogue = "store",
    row_scale: Tensor | None = None,
    tiling: Tiling | None = None,
) -> None:
    """See `linear_reference`; `workspace` is needed where the tiling has several parts."""
    rows, inner = x.shape[:-1].numel(), x.shape[-1]
    window, room = (x.shape[1], x.stride(0) // inner) if x.dim() == 3 else (1, 1)
    features = out.shape[1]
    paired = epilogue == "swiglu"
    if tiling is None:
        tiling = choose_tiling(features, inner, weight.dtype.itemsize, paired)
    assert weight.shape == (features * (1 + paired), inner), f"{weight.shape} {features} {inner}"
    assert tiling.parts == 1 or workspace is not None
    filler = x  # stands in for an argument that the kernel does not touch
    _linear_kernel[(-(-features // tiling.block_n), -(-rows // 16), tiling.parts)](
        x, weight, filler if norm is None else norm, filler if row_scale is None else row_scale, out,
        filler if workspace is None else workspace.sums, filler if workspace is None else workspace.squares,
        filler if workspace is None else workspace.counters,
        rows, eps, WINDOW=window, ROOM=room, N=features, K=inner,
        BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, PARTS=tiling.parts,
        NORM=norm is not None, SCALED=row_scale is not None, PAIRED=paired, ADD=epilogue == "add",
        NARROW=weight.dtype.itemsize == 1, AHEAD=tiling.ahead,
        INTERPRETED=INTERPRET, num_warps=tiling.warps, num_stages=tiling.stages, **launch_options(x.device),
    )  # fmt: skip


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _finish(gate, up, square, scale, out, offsets, mask, n, N, K, eps,
            NORM: tl.constexpr, SCALED: tl.constexpr, PAIRED: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """The epilogue of a tile [16, BLOCK_N] of finished sums."""
    if NORM:
        factor = tl.rsqrt(square / K + eps)[:, None]
        gate *= factor
        if PAIRED:
            up *= factor
    if SCALED:
        gate *= tl.load(scale + n, n < N, 0.0)[None, :]
        if PAIRED:
            up *= tl.load(scale + N + n, n < N, 0.0)[None, :]
    if PAIRED:
        gate = _silu(gate) * up
    if ADD:
        gate += tl.load(out + offsets, mask, 0.0).to(tl.float32)
    tl.store(out + offsets, gate.to(out.dtype.element_ty), mask)


@triton.jit
def _linear_kernel(
    x, weight, norm, scale, out, sums, squares, counters, rows, eps,
    WINDOW: tl.constexpr, ROOM: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    NORM: tl.constexpr, SCALED: tl.constexpr, PAIRED: tl.constexpr, ADD: tl.constexpr, NARROW: tl.constexpr,
    AHEAD: tl.constexpr, INTERPRETED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    tile = tl.program_id(1)
    part = tl.program_id(2)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    x += (m // WINDOW * ROOM + m % WINDOW)[:, None] * K
    row = (n % N).to(tl.int64) * K  # rows past the end wrap around: no mask in the loop, nothing stored
    blocks_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    per_part: tl.constexpr = (blocks_k + PARTS - 1) // PARTS
    first = part * per_part * BLOCK_K
    # The beginning of each weight row, asked for while the kernel before this one still runs.
    if AHEAD > 0:
        per_line: tl.constexpr = 128 * 8 // weight.dtype.element_ty.primitive_bitwidth
        ahead = first + tl.arange(0, AHEAD) * per_line
        prefetch(weight + row[:, None] + tl.minimum(ahead, K - 1)[None, :], DEPENDENT)
        if PAIRED:
            prefetch(weight + (N * K + row)[:, None] + tl.minimum(ahead, K - 1)[None, :], DEPENDENT)
    wait_for_inputs(DEPENDENT)

    gate = tl.zeros((TILE_ROWS, BLOCK_N), tl.float32)
    up = tl.zeros((TILE_ROWS, BLOCK_N), tl.float32)
    square = tl.zeros((TILE_ROWS,), tl.float32)
    for step in range(per_part):
        k = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
        if K % (BLOCK_K * PARTS) == 0:
            a = tl.load(x + k[None, :], (m < rows)[:, None], 0.0)
            w = tl.load(weight + row[:, None] + k[None, :])
        else:
            inside = k < K
            a = tl.load(x + k[None, :], (m < rows)[:, None] & inside[None, :], 0.0)
            w = tl.load(weight + row[:, None] + k[None, :], inside[None, :], 0.0)
        if NORM:
            a = a.to(tl.float32)
            square += tl.sum(a * a, axis=1)
            a *= tl.load(norm + k, k < K, 0.0)[None, :]
        if NARROW:
            w = w.to(tl.bfloat16)
        a = a.to(w.dtype)
        gate += product(a, tl.trans(w), INTERPRETED)
        if PAIRED:
            if K % (BLOCK_K * PARTS) == 0:
                w = tl.load(weight + (N * K + row)[:, None] + k[None, :])
            else:
                w = tl.load(weight + (N * K + row)[:, None] + k[None, :], (k < K)[None, :], 0.0)
            if NARROW:
                w = w.to(tl.bfloat16)
            up += product(a, tl.trans(w), INTERPRETED)

    offsets = m[:, None] * N + n[None, :]
    mask = (m < rows)[:, None] & (n < N)[None, :]
    if PARTS == 1:
        _finish(gate, up, square, scale, out, offsets, mask, n, N, K, eps, NORM, SCALED, PAIRED, ADD)
    else:
        # The parts' sums go to memory; the last program to arrive adds them up in their order.
        width: tl.constexpr = N * (2 if PAIRED else 1)
        padded = tl.num_programs(1) * TILE_ROWS
        spot = m[:, None] * width + n[None, :]
        tl.store(sums + part * padded * width + spot, gate, mask)
        if PAIRED:
            tl.store(sums + part * padded * width + spot + N, up, mask)
        place = (tile * tl.num_programs(0) + block) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        if NORM:
            tl.store(squares + part * tl.num_programs(0) * padded + place, square)
        tl.debug_barrier()
        counter = counters + tile * tl.num_programs(0) + block
        if tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1:
            gate = tl.zeros((TILE_ROWS, BLOCK_N), tl.float32)
            up = tl.zeros((TILE_ROWS, BLOCK_N), tl.float32)
            square = tl.zeros((TILE_ROWS,), tl.float32)
            for other in range(PARTS):
                gate += tl.load(sums + other * padded * width + spot, mask, 0.0)
                if PAIRED:
                    up += tl.load(sums + other * padded * width + spot + N, mask, 0.0)
                if NORM:
                    square += tl.load(squares + other * tl.num_programs(0) * padded + place)
            _finish(gate, up, square, scale, out, offsets, mask, n, N, K, eps, NORM, SCALED, PAIRED, ADD)
            tl.store(counter, 0)
