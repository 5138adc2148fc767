"""Linear layers for few rows, at the speed of memory, whose rows do not depend on one another.

Every program multiplies tiles of 16 rows, padding the missing ones, with one block of the weight's rows, and walks the
input axis in fixed blocks. A row's sums are then the same operations in the same order, however many rows there are.
With few output features the input axis is cut into a fixed number of parts besides; whichever program of a block comes
last adds the parts up in their order.

What stands around the product rides along, for a kernel of its own would cost more than its work. A layer that ends in
the residual stream also prepares the next norm (`Feed`): the stream times the norm's scale, in the weights' type, and
sums of squares; the next layer multiplies its sums by the row's 1 / rms, which factors out. A SwiGLU's gate and up are
computed by the same program.

One long file: the kernel, its launches and its reference share the order in which sums are taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from surefoot.kernels.fused.launch import (
    INTERPRET,
    TILE_ROWS,
    launch_options,
    let_next_start,
    prefetch,
    product,
    silu,
    wait_for_inputs,
    widened,
)
from surefoot.kernels.quantise import GROUP, Quantised, Weight, dense_of, scales_of

Epilogue = Literal["store", "add", "swiglu"]


@dataclass(frozen=True)
class Tiling:
    """How one weight shape is cut: output features and inputs of a tile, parts of the input axis, warps, stages; and
    how many inputs of every row are asked for ahead (a multiple of 64, or 0)."""

    block_n: int
    block_k: int
    parts: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 0


MAX_PARTS = 4
HALF = tl.constexpr(GROUP // 2)
SPLIT_FEATURES = 5120  # output features above which one part is enough to fill the card


def choose_tiling(out_features: int, in_features: int, weight_bytes: int, paired: bool) -> Tiling:
    """A tiling for a weight [out_features, in_features] (rows of gate and up counted once if `paired`). It depends on
    nothing else, as it decides the order of summation.

    Each is the best of a dozen or two in whole passes on an H200, of the shape whose inputs are at its border: 0.8B
    1,024, 35B-A3B 2,048, 4B 2,560, 9B 4,096, 27B 5,120; in 8 bits those of 9B and 27B.
    """
    inner = in_features
    if weight_bytes == 4:
        return Tiling(16, 64, stages=3)
    if weight_bytes == 1:
        if out_features > 100_000:
            return Tiling(64, 256, stages=3)
        if paired:
            return Tiling(32, 256) if inner <= 4096 else Tiling(32, 512, stages=3)
        if out_features > SPLIT_FEATURES:
            return Tiling(32, 512, stages=3) if inner <= 4096 else Tiling(64, 256, warps=8)
        if 4096 < inner <= 8192:
            return _in_parts(Tiling(64, 128, MAX_PARTS, stages=6), inner)
        return _in_parts(Tiling(32, 256, MAX_PARTS, stages=4 if inner <= 4096 else 3), inner)
    if out_features > 100_000:
        return Tiling(64, 128, stages=6 if 1024 < inner <= 2048 else 4)
    if paired:
        stages = 6 if 1024 < inner <= 2048 else 4 if inner in (1024, 4096) else 3
        return Tiling(32, 128, stages=stages, ahead=512 if inner <= 2048 else 0)
    if out_features > SPLIT_FEATURES:
        if inner > 4096:
            return Tiling(64, 256, warps=8, stages=3)
        if 1024 < inner <= 2048:
            return Tiling(32, 256, stages=3)
        return Tiling(32, 128, stages=6, ahead=512) if inner < 4096 else Tiling(32, 128)
    parts = MAX_PARTS if out_features < 4096 else 2
    return _in_parts(
        Tiling(32, 128, parts, ahead=1024 if out_features <= 2048 and inner <= 2 * out_features else 0), inner
    )


def _in_parts(tiling: Tiling, in_features: int) -> Tiling:
    """In so many parts, or so few that all are whole tiles."""
    parts = tiling.parts
    while parts > 1 and in_features % (tiling.block_k * parts):
        parts //= 2
    return replace(tiling, parts=parts)


def tiling_of(weight: Weight, paired: bool) -> Tiling:
    """The tiling of a weight [N, K] ([2 N, K] if `paired`)."""
    features, inner = weight.shape
    narrow = isinstance(weight, Quantised) and weight.dtype.itemsize < 4  # float32 products need float32's tiles
    tiling = choose_tiling(features // (1 + paired), inner, 1 if narrow else weight.dtype.itemsize, paired)
    if isinstance(weight, Quantised) and weight.groups > 1 and tiling.block_k > GROUP:
        tiling = replace(tiling, block_k=GROUP, stages=6)  # as many bytes on their way
    if isinstance(weight, Quantised) and weight.halved:
        tiling = replace(tiling, block_k=max(tiling.block_k, GROUP))
    return tiling


@dataclass(frozen=True)
class Workspace:
    """Scratch that the layers of one stream take turns to use: partial sums, and counters that rest at zero."""

    sums: Tensor
    counters: Tensor

    @classmethod
    def allocate(cls, rows: int, out_features: int, parts: int, device: torch.device) -> Workspace:
        """For layers of at most so many rows, output features (gate and up both counted) and parts."""
        rows = -(-rows // 16) * 16
        blocks = -(-out_features // 16) * (rows // 16)
        return cls(
            torch.empty(parts * rows * out_features if parts > 1 else 1, device=device),
            torch.zeros(blocks, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Feed:
    """The residual stream, prepared for the norm and the linear layers that read it.

    `scaled` [R, H], of the weights' type: the stream times the norm's scale (1 + w), and times `SHRINK` in float16,
    whose range the stream may exceed. `squares` float32 [R, n]: sums of the stream's squares over n parts of a row.
    """

    scaled: Tensor
    squares: Tensor


SHRINK = 2.0**-8


def shrink_of(dtype: torch.dtype) -> float:
    """The power of two that `Feed.scaled` is multiplied by."""
    return SHRINK if dtype == torch.float16 else 1.0


def feed_reference(x: Tensor, scale: Tensor, feed: Feed) -> None:
    """Fill `feed` from x [R, H] float32; the squares may be split among the parts in any way."""
    feed.scaled.copy_(x * scale * shrink_of(feed.scaled.dtype))
    feed.squares.zero_()
    feed.squares[:, 0] = x.square().sum(-1)


def linear_reference(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    workspace: Workspace | None = None,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    epilogue: Epilogue = "store",
    feed: tuple[Tensor, Feed] | None = None,
    early: bool = False,
    tiling: Tiling | None = None,
) -> None:
    """out = epilogue(x weight^T). x [R, K]; weight [N, K] (for "swiglu" [2 N, K]: gates, then ups); out
    [R, N], which may be columns of a wider tensor.

    With `squares` [R, n] x is a `Feed`'s and the product is multiplied by 1 / sqrt(sum of a row / K + eps). "add" adds
    to out, "swiglu" stores silu(gate) * up. With `feed` (the next norm's scale [N], the Feed to fill) out is prepared
    for that norm. `early` lets the next kernel, a small one, start beside this one. The scales of 8-bit weights
    multiply sums over their inputs; a tile then has at most `GROUP` inputs if there are several to a row.
    """
    inputs = x.float()
    factor = torch.ones(inputs.shape[0], 1, device=x.device)
    if squares is not None:
        mean = squares.sum(-1, keepdim=True) / x.shape[-1]
        factor = torch.rsqrt(mean + eps) / shrink_of(x.dtype)
    result = F.linear(inputs.to(weight.dtype).float(), dense_of(weight, torch.float32)) * factor
    if epilogue == "swiglu":
        gate, up = result.chunk(2, dim=-1)
        result = F.silu(gate) * up
    if epilogue == "add":
        out += result
    else:
        out.copy_(result)
    if feed is not None:
        feed_reference(out, *feed)


def linear(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    workspace: Workspace | None = None,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    epilogue: Epilogue = "store",
    feed: tuple[Tensor, Feed] | None = None,
    early: bool = False,
    tiling: Tiling | None = None,
) -> None:
    """See `linear_reference`; `workspace` is needed where the tiling has several parts."""
    rows, inner = x.shape
    features = out.shape[1]
    paired = epilogue == "swiglu"
    if tiling is None:
        tiling = tiling_of(weight, paired)
    assert weight.shape == (features * (1 + paired), inner), f"{weight.shape} {features} {inner}"
    assert tiling.parts == 1 or workspace is not None
    numbers, row_scale, groups = scales_of(weight)
    halved = isinstance(weight, Quantised) and weight.halved
    if halved:
        assert tiling.block_k % GROUP == 0, "both halves of a group are in one tile"
        numbers = numbers.view(torch.int16)
    assert groups <= 1 or GROUP % tiling.block_k == 0, "a tile's inputs have one scale"
    if tiling.ahead > inner or inner % 64:  # nothing to gain, and the requests must be aligned
        tiling = replace(tiling, ahead=0)
    blocks = -(-features // tiling.block_n)
    scale, into = feed if feed is not None else (x, Feed(x, x))
    assert feed is None or into.squares.shape[1] == blocks, "a Feed with as many parts as the layer has blocks"
    filler = x  # stands in for an argument that the kernel does not touch
    # Tiles of rows first: programs that read the same weights then run together, and the L2 cache serves all but one.
    _linear_kernel[(-(-rows // 16), blocks, tiling.parts)](
        x, numbers, filler if squares is None else squares, row_scale, out,
        scale, into.scaled, into.squares,
        filler if workspace is None else workspace.sums, filler if workspace is None else workspace.counters,
        rows, eps, N=features, STRIDE=out.stride(0), K=inner,
        BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, PARTS=tiling.parts,
        SQUARES=0 if squares is None else squares.shape[1],
        SQUARES_BLOCK=1 if squares is None else triton.next_power_of_2(squares.shape[1]),
        SHRINK_IN=shrink_of(x.dtype), SHRINK_OUT=shrink_of(into.scaled.dtype),
        GROUPS=groups, GROUP=GROUP, HALVED=halved, PAIRED=paired, ADD=epilogue == "add", FEED=feed is not None,
        AHEAD=tiling.ahead, EARLY=early, INTERPRETED=INTERPRET, num_warps=tiling.warps, num_stages=tiling.stages,
        **launch_options(x.device),
    )  # fmt: skip


@triton.jit
def scaled_by_group(sums, scale, row, group, GROUPS: tl.constexpr):
    """A tile's product; times its columns' scales (the weight's rows') where these differ from group to group. A tile
    past the last group holds zeros."""
    if GROUPS > 1:
        sums *= tl.load(scale + row * GROUPS + tl.minimum(group, GROUPS - 1))[None, :]
    return sums


@triton.jit
def _inputs(x, present, start, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, HALVED: tl.constexpr):
    """BLOCK_K inputs of each row from `start` on; if `HALVED`, those of the groups' first halves and those of their
    second halves."""
    k = start + tl.arange(0, BLOCK_K)
    if HALVED:
        lane = tl.arange(0, BLOCK_K // 2)
        k = start + lane // HALF * (2 * HALF) + lane % HALF
    if K % (BLOCK_K * PARTS) != 0:
        present &= (k < K)[None, :]
    low = tl.load(x + k[None, :], present, 0.0)
    high = low
    if HALVED:
        high = tl.load(x + k[None, :] + HALF, present, 0.0)
    return low, high


@triton.jit
def _tile_sums(
    low, high, weight, start, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr,
    HALVED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The inputs times BLOCK_K columns of the weight's rows [BLOCK_N, 1] from `start` on."""
    lanes: tl.constexpr = 2 if HALVED else 1
    column = start // lanes + tl.arange(0, BLOCK_K // lanes)[None, :]
    whole: tl.constexpr = K % (BLOCK_K * PARTS) == 0
    w = tl.load(weight + column) if whole else tl.load(weight + column, column < K // lanes, 0.0)
    if HALVED:
        first, second = widened(w, low, INTERPRETED)
        sums = product(low, tl.trans(first), INTERPRETED) + product(high, tl.trans(second), INTERPRETED)
    else:
        if GROUPS > 0:
            w = w.to(low.dtype)
        sums = product(low.to(w.dtype), tl.trans(w), INTERPRETED)
    return sums


@triton.jit
def _finish(gate, up, before, gain, factor, row_scale, out, scaled, squares, block, blocks, m, n, rows,
            N: tl.constexpr, STRIDE: tl.constexpr, SQUARES: tl.constexpr, GROUPS: tl.constexpr, PAIRED: tl.constexpr,
            ADD: tl.constexpr, FEED: tl.constexpr):  # fmt: skip
    """The epilogue of a tile [16, BLOCK_N] of finished sums."""
    offsets = m[:, None] * N + n[None, :]
    mask = (m < rows)[:, None] & (n < N)[None, :]
    if SQUARES > 0:
        gate *= factor[:, None]
        if PAIRED:
            up *= factor[:, None]
    if GROUPS == 1:
        gate *= tl.load(row_scale + n, n < N, 0.0)[None, :]
        if PAIRED:
            up *= tl.load(row_scale + N + n, n < N, 0.0)[None, :]
    if PAIRED:
        gate = silu(gate) * up
    if ADD:
        gate += before
    tl.store(out + m[:, None] * STRIDE + n[None, :], gate.to(out.dtype.element_ty), mask)
    if FEED:
        gate = tl.where(mask, gate, 0.0)
        tl.store(squares + m * blocks + block, tl.sum(gate * gate, axis=1), m < rows)
        tl.store(scaled + offsets, (gate * gain[None, :]).to(scaled.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])  # one binary for any number of rows
def _linear_kernel(
    x, weight, squares_in, row_scale, out, norm, scaled, squares, sums, counters, rows, eps,
    N: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, SQUARES: tl.constexpr, SQUARES_BLOCK: tl.constexpr, SHRINK_IN: tl.constexpr,
    SHRINK_OUT: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, HALVED: tl.constexpr, PAIRED: tl.constexpr,
    ADD: tl.constexpr, FEED: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    part = tl.program_id(2)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    x += m[:, None] * K
    lanes: tl.constexpr = 2 if HALVED else 1  # inputs to an element in memory
    row = (n % N).to(tl.int64) * (K // lanes)  # rows past the end wrap around: no mask in the loop, nothing stored
    up_row = row + N * (K // lanes)
    present = (m < rows)[:, None]
    blocks_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    per_part: tl.constexpr = (blocks_k + PARTS - 1) // PARTS
    first = part * per_part * BLOCK_K
    # The beginning of each weight row, asked for while the kernel before this one still runs.
    if AHEAD > 0:
        quarter: tl.constexpr = AHEAD // (4 * lanes)
        spot = tl.minimum(first, K - AHEAD) // lanes + (tl.arange(0, 4) * quarter)[None, :]
        size: tl.constexpr = quarter * weight.dtype.element_ty.primitive_bitwidth // 8
        prefetch(weight + row[:, None] + spot, size, DEPENDENT)
        if PAIRED:
            prefetch(weight + up_row[:, None] + spot, size, DEPENDENT)
    # Two sums, of the halves of every tile, so that products need not wait for one another.
    gain = tl.zeros((BLOCK_N,), tl.float32)
    if FEED:
        gain = tl.load(norm + n, n < N, 0.0) * SHRINK_OUT
    wait_for_inputs(DEPENDENT)
    if EARLY:
        let_next_start(DEPENDENT)

    # What the epilogue needs is asked for now, so that it does not wait for it then.
    mask = (m < rows)[:, None] & (n < N)[None, :]
    at = tl.arange(0, SQUARES_BLOCK)
    square = tl.zeros((TILE_ROWS, SQUARES_BLOCK), tl.float32)
    if SQUARES > 0:
        square = tl.load(squares_in + m[:, None] * SQUARES + at[None, :], (m < rows)[:, None] & (at < SQUARES), 0.0)
    before = tl.zeros((TILE_ROWS, BLOCK_N), tl.float32)
    if ADD:
        before = tl.load(out + m[:, None] * STRIDE + n[None, :], mask, 0.0).to(tl.float32)
    gate = tl.zeros((TILE_ROWS, BLOCK_N), tl.float32)
    up = tl.zeros((TILE_ROWS, BLOCK_N), tl.float32)
    for step in range(per_part):
        start = first + step * BLOCK_K
        low, high = _inputs(x, present, start, K, BLOCK_K, PARTS, HALVED)
        one = _tile_sums(low, high, weight + row[:, None], start, K, BLOCK_K, PARTS, GROUPS, HALVED, INTERPRETED)
        gate += scaled_by_group(one, row_scale, n % N, start // GROUP, GROUPS)
        if PAIRED:
            one = _tile_sums(low, high, weight + up_row[:, None], start, K, BLOCK_K, PARTS, GROUPS, HALVED, INTERPRETED)
            up += scaled_by_group(one, row_scale, N + n % N, start // GROUP, GROUPS)

    if not EARLY:
        let_next_start(DEPENDENT)
    factor = tl.zeros((TILE_ROWS,), tl.float32)
    if SQUARES > 0:
        factor = tl.rsqrt(tl.sum(square, axis=1) / K + eps) / SHRINK_IN
    if PARTS == 1:
        _finish(gate, up, before, gain, factor, row_scale, out, scaled, squares, block, blocks, m, n, rows, N,
                STRIDE, SQUARES, GROUPS, PAIRED, ADD, FEED)  # fmt: skip
    else:
        # The parts' sums go to memory; the last program to arrive adds them up in their order.
        width: tl.constexpr = N * (2 if PAIRED else 1)
        spot = sums + m[:, None] * width + n[None, :]
        stride = tl.num_programs(0) * TILE_ROWS * width
        tl.store(spot + part * stride, gate, mask)
        if PAIRED:
            tl.store(spot + part * stride + N, up, mask)
        tl.debug_barrier()
        counter = counters + tile * blocks + block
        if tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1:
            gate = tl.zeros((TILE_ROWS, BLOCK_N), tl.float32)
            up = tl.zeros((TILE_ROWS, BLOCK_N), tl.float32)
            for other in range(PARTS):
                gate += tl.load(spot + other * stride, mask, 0.0)
                if PAIRED:
                    up += tl.load(spot + other * stride + N, mask, 0.0)
            _finish(gate, up, before, gain, factor, row_scale, out, scaled, squares, block, blocks, m, n, rows, N,
                    STRIDE, SQUARES, GROUPS, PAIRED, ADD, FEED)  # fmt: skip
            tl.store(counter, 0)
