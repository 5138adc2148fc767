"""Gated attention of a decode window against the cache: norms, rotation, cache writes, softmax and gate in two kernels.

The keys are split at fixed absolute positions, `SPLIT` a split, so that one sequence can occupy many multiprocessors
(the idea of Flash-Decoding, Dao et al. 2023), and the splits' results are added up in ascending order. Which split
holds a key depends on its position alone, and so do a row's bits: not on the window, the grid, or other sequences.

A row further down its window is a masked key to those above it and counts for exactly nothing, provided that its value
is finite: 0 * inf is NaN. What the cache holds beyond the window may be anything.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from surefoot.errors import InputError
from surefoot.kernels.fused.launch import (
    INTERPRET,
    TILE_ROWS,
    launch_options,
    let_next_start,
    product,
    wait_for_inputs,
)  # fmt: skip

# These decide the order of summation: to change them is to change bits.
SPLIT = 128  # positions that one partial result covers
BLOCK = 64  # keys of one product
JOINED = 32  # splits that the second kernel adds up at a time

PROGRAMS = 64  # of one sequence and key head; program i takes splits i, i + PROGRAMS and so on
WARPS = {2: 4, 4: 8}  # by the bytes of a cached number; float32 products keep their operands in registers
STAGES = {2: 3, 4: 1}  # 16 bits: both blocks of a split in flight, 128 KiB with heads of 256
JOIN_WARPS = 4
CHANNELS = 64  # channels of a head that one program of the second kernel joins


def workspaces(rows: int, heads: int, head_dim: int, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(partial [rows, heads, splits, D], summary [rows, heads, splits, 2]), float32, for passes of up to `rows` rows.

    A split's part is its weighted values without the division, and its largest score (base-2 logarithm) and the sum of
    its weights. Layers may share them.
    """
    splits = triton.cdiv(max_len, SPLIT)
    partial = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=device)
    return partial, torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=device)


def attend(
    merged: Tensor, q_scale: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    slots: Tensor, length: Tensor, out: Tensor, partial: Tensor, summary: Tensor, *, window: int, eps: float,
) -> None:  # fmt: skip
    """Attend the rows of `merged`; row r is token r % window of sequence r // window, at `length[slot] + r % window`.

    merged [B * window, (2 Hq + 2 Hkv) D]: queries, keys, values, gates, as `model.attention` lays them out;
    q_scale, k_scale [D] float32 (1 + w); cos, sin [>= L, rotary] float32, the half-turn's sign on the sine;
    keys, values [S, Hkv, L, D], written in place at the rows' positions; slots int32 [B], -1 for a sequence that is
    padding; length int32 [S]; out [B * window, Hq D], overwritten; partial, summary: see `workspaces`, overwritten.
    Padding and rows at positions >= L write zeros to `out` and nothing to the caches.

    Raises InputError on shapes or strides that do not fit together.
    """
    _check(merged, cos, keys, values, slots, out, partial, summary, window)
    rows, (_, kv_heads, max_len, head_dim) = merged.shape[0], keys.shape
    heads, splits, rotary = out.shape[1] // head_dim, partial.shape[2], cos.shape[1]
    group = heads // kv_heads
    options = launch_options(merged.device)
    size = keys.element_size()
    grid = (min(PROGRAMS, splits), triton.cdiv(window * group, TILE_ROWS.value), rows // window * kv_heads)
    _split_kernel[grid](
        merged, q_scale, k_scale, cos, sin, keys, values, slots, length, partial, summary,
        window, max_len, splits, eps, head_dim**-0.5 * math.log2(math.e),
        merged.stride(0), *keys.stride()[:3], *values.stride()[:3],
        KV_HEADS=kv_heads, GROUP=group, D=head_dim, ROTARY=rotary, SPLIT_KEYS=SPLIT, BLOCK_KEYS=BLOCK,
        TILE=TILE_ROWS.value, INTERPRETED=INTERPRET, num_warps=WARPS[size], num_stages=STAGES[size], **options,
    )  # fmt: skip
    channels = min(head_dim, CHANNELS)
    _join_kernel[(rows, heads, head_dim // channels)](
        merged, slots, length, partial, summary, out,
        window, max_len, splits, merged.stride(0), out.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, D=head_dim, CHANNELS=channels, SPLIT_KEYS=SPLIT, JOINED=JOINED,
        num_warps=JOIN_WARPS, **options,
    )  # fmt: skip


def attend_reference(
    merged: Tensor, q_scale: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    slots: Tensor, length: Tensor, out: Tensor, partial: Tensor, summary: Tensor, *, window: int, eps: float,
) -> None:  # fmt: skip
    """What `attend` computes, in plain PyTorch, one row at a time; the workspaces are left alone."""
    _check(merged, cos, keys, values, slots, out, partial, summary, window)
    _, kv_heads, max_len, head_dim = keys.shape
    heads, half = out.shape[1] // head_dim, cos.shape[1] // 2

    def turned(x: Tensor, scale: Tensor, position: int) -> Tensor:
        """x [n, D] normed and rotated, rounded to the cache's type."""
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale
        rotary = x[:, : 2 * half]
        swapped = torch.cat([rotary[:, half:], rotary[:, :half]], dim=-1)
        rotated = rotary * cos[position] + swapped * sin[position]
        return torch.cat([rotated, x[:, 2 * half :]], dim=-1).to(keys.dtype)

    out.zero_()
    for row in range(merged.shape[0]):
        slot = int(slots[row // window])
        position = int(length[slot]) + row % window
        if slot < 0 or position >= max_len:
            continue
        parts = merged[row].float().view(-1, head_dim).split([heads, kv_heads, kv_heads, heads])
        query = turned(parts[0], q_scale, position).float().view(kv_heads, -1, head_dim)
        keys[slot, :, position] = turned(parts[1], k_scale, position)
        values[slot, :, position] = parts[2].to(values.dtype)
        scores = query @ keys[slot, :, : position + 1].float().transpose(1, 2) * head_dim**-0.5
        mixed = scores.softmax(-1) @ values[slot, :, : position + 1].float()
        out[row] = (mixed.reshape(heads, head_dim) * torch.sigmoid(parts[3])).flatten().to(out.dtype)


def _check(
    merged: Tensor, cos: Tensor, keys: Tensor, values: Tensor, slots: Tensor, out: Tensor, partial: Tensor,
    summary: Tensor, window: int,
) -> None:  # fmt: skip
    rows = merged.shape[0]
    _, kv_heads, max_len, head_dim = keys.shape
    heads = out.shape[1] // head_dim
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise InputError(f"head_dim: expected a power of two of at least 16, found {head_dim}")
    if heads == 0 or heads % kv_heads:
        raise InputError(f"query heads: expected a multiple of {kv_heads} key heads, found {heads}")
    if window < 1 or rows != slots.shape[0] * window:
        raise InputError(f"merged: expected {slots.shape[0]} sequences of {window} rows, found {rows} rows")
    if merged.shape[1] != 2 * (heads + kv_heads) * head_dim or out.shape != (rows, heads * head_dim):
        raise InputError(
            f"merged, out: expected shapes for {heads} heads of {head_dim}, "
            f"found {list(merged.shape)}, {list(out.shape)}"
        )
    if keys.element_size() not in WARPS:
        raise InputError(f"keys: expected 16 or 32 bits, found {keys.dtype}")
    if values.shape != keys.shape or values.dtype != keys.dtype:
        raise InputError(f"values: expected {keys.dtype} {list(keys.shape)}, found {values.dtype} {list(values.shape)}")
    if {t.stride(-1) for t in (merged, cos, keys, values, out)} != {1}:
        raise InputError("merged, cos, keys, values, out: expected a contiguous last axis, found other strides")
    if cos.shape[0] < max_len or cos.shape[1] > head_dim or cos.shape[1] % 2:
        raise InputError(f"cos: expected at least {max_len} rows of at most {head_dim}, found {list(cos.shape)}")
    splits = partial.shape[2]
    if partial.shape[0] < rows or partial.shape[1:] != (heads, splits, head_dim) or splits * SPLIT < max_len:
        raise InputError(
            f"partial: expected room for {rows} rows of {heads} heads, {max_len} long, found {list(partial.shape)}"
        )
    if summary.shape != (*partial.shape[:3], 2) or not (partial.is_contiguous() and summary.is_contiguous()):
        raise InputError(f"summary: expected {[*partial.shape[:3], 2]}, contiguous, found {list(summary.shape)}")


@triton.jit
def _swapped(dims, ROTARY: tl.constexpr):
    """The dimension that each one turns with; itself beyond the rotary ones."""
    half: tl.constexpr = ROTARY // 2
    return tl.where(dims < half, dims + half, tl.where(dims < ROTARY, dims - half, dims))


@triton.jit
def _turned(source, valid, position, scale, swapped_scale, cos, sin, eps, D: tl.constexpr, ROTARY: tl.constexpr):
    """Rows [TILE, D] float32 read at `source` [TILE], normed and rotated to `position` [TILE]; others are 0.

    Each row's sum runs within the row and the tile has one height, so its order is every row's. The multiply-adds are
    spelt out: the compiler might otherwise fuse one pair here and another there.
    """
    dims = tl.arange(0, D)
    x = tl.load(source[:, None] + dims[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    partner = source[:, None] + _swapped(dims, ROTARY)[None, :]
    y = tl.load(partner, mask=valid[:, None], other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    turns = valid[:, None] & (dims < ROTARY)[None, :]
    table = position[:, None] * ROTARY + dims[None, :]
    c = tl.load(cos + table, mask=turns, other=1.0)
    s = tl.load(sin + table, mask=turns, other=0.0)
    return tl.fma(x * inverse * scale[None, :], c, y * inverse * swapped_scale[None, :] * s)


# The window is no constant of the compilation: one program text, and so one order of summation, serves them all.
@triton.jit(do_not_specialize=["slots", "length", "window"])
def _split_kernel(
    merged, q_scale, k_scale, cos, sin, keys, values, slots, length, partial, summary,
    window, max_len, splits, eps, score_scale,
    merged_row, keys_slot, keys_head, keys_position, values_slot, values_head, values_position,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, BLOCK_KEYS: tl.constexpr, TILE: tl.constexpr,
    INTERPRETED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (programs over splits, query tiles, sequences * key heads). A tile's rows are pairs of a token of the
    window and a query head of the group, the token changing slowest."""
    program = tl.program_id(0)
    tile = tl.program_id(1)
    sequence = tl.program_id(2) // KV_HEADS
    kv_head = (tl.program_id(2) % KV_HEADS).to(tl.int64)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    dims = tl.arange(0, D)
    swapped = _swapped(dims, ROTARY)
    q_weight, q_swapped = tl.load(q_scale + dims), tl.load(q_scale + swapped)
    k_weight, k_swapped = tl.load(k_scale + dims), tl.load(k_scale + swapped)
    pair = tile * TILE + tl.arange(0, TILE)
    offset = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    row = (sequence * window + offset).to(tl.int64)

    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    slot = tl.load(slots + sequence).to(tl.int64)
    start = tl.load(length + slot, mask=slot >= 0, other=max_len)
    position = start + offset
    valid = (offset < window) & (position < max_len)
    # The first position that no row of the tile reads; what must be written before that is written by this program,
    # and what other tiles' programs write there at the same time are the same bits.
    last_offset = (tile * TILE + TILE - 1) // GROUP
    stop = tl.minimum(start + tl.minimum(last_offset + 1, window), max_len)
    # Without a valid row there is nothing to read.
    used = tl.where(start < max_len, tl.cdiv(stop, SPLIT_KEYS), 0)
    if program < used:
        source = merged + row * merged_row
        query = _turned(source + head * D, valid, position, q_weight, q_swapped, cos, sin, eps, D, ROTARY)
        query = query.to(keys.dtype.element_ty)
        keys += slot * keys_slot + kv_head * keys_head
        values += slot * values_slot + kv_head * values_head
        for split in range(program, used, tl.num_programs(0)):
            first = split * SPLIT_KEYS
            until = tl.minimum(first + SPLIT_KEYS, stop)

            # The window's tokens whose positions lie in this split.
            for token in range(tl.maximum(first - start, 0), until - start, TILE):
                fresh = token + tl.arange(0, TILE)
                stored = fresh < until - start
                place = (start + fresh).to(tl.int64)
                source = merged + (sequence * window + fresh).to(tl.int64) * merged_row + (HEADS + kv_head) * D
                key = _turned(source, stored, place, k_weight, k_swapped, cos, sin, eps, D, ROTARY)
                value = tl.load(source[:, None] + KV_HEADS * D + dims[None, :], mask=stored[:, None], other=0.0)
                key_at = keys + (place * keys_position)[:, None] + dims[None, :]
                value_at = values + (place * values_position)[:, None] + dims[None, :]
                tl.store(key_at, key.to(keys.dtype.element_ty), mask=stored[:, None])
                tl.store(value_at, value.to(tl.float32).to(values.dtype.element_ty), mask=stored[:, None])
            tl.debug_barrier()  # other threads of this program read them back

            largest = tl.full([TILE], float("-inf"), dtype=tl.float32)
            weight = tl.zeros([TILE], dtype=tl.float32)
            mixed = tl.zeros([TILE, D], dtype=tl.float32)
            for block in range(first, until, BLOCK_KEYS):
                at = block + tl.arange(0, BLOCK_KEYS)
                there = (at < stop)[:, None]
                at_keys = keys + (at.to(tl.int64) * keys_position)[:, None] + dims[None, :]
                at_values = values + (at.to(tl.int64) * values_position)[:, None] + dims[None, :]
                k = tl.load(at_keys, mask=there, other=0.0)
                scores = product(query, tl.trans(k), INTERPRETED) * score_scale
                seen = valid[:, None] & (at[None, :] <= position[:, None])
                scores = tl.where(seen, scores, float("-inf"))
                larger = tl.maximum(largest, tl.max(scores, axis=1))
                # Of a row that has seen no key: -inf less -inf would be NaN.
                base = tl.where(larger == float("-inf"), 0.0, larger)
                kept = tl.exp2(largest - base)
                p = tl.exp2(scores - base[:, None])
                v = tl.load(at_values, mask=there, other=0.0)
                weight = tl.fma(weight, kept, tl.sum(p, axis=1))
                mixed = tl.fma(mixed, kept[:, None], product(p.to(v.dtype), v, INTERPRETED))
                largest = larger

            part = (row * HEADS + head) * splits + split
            tl.store(partial + (part * D)[:, None] + dims[None, :], mixed, mask=valid[:, None])
            tl.store(summary + part * 2, largest, mask=valid)
            tl.store(summary + part * 2 + 1, weight, mask=valid)


@triton.jit(do_not_specialize=["slots", "length", "window"])
def _join_kernel(
    merged, slots, length, partial, summary, out,
    window, max_len, splits, merged_row, out_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, JOINED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (rows, query heads, parts of a head): add up the splits that the row has seen, and apply the gate."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)

    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    slot = tl.load(slots + row // window).to(tl.int64)
    position = tl.load(length + slot, mask=slot >= 0, other=max_len) + row % window
    valid = position < max_len
    used = tl.where(valid, position // SPLIT_KEYS + 1, 0)
    wide_row = row.to(tl.int64)
    gate = tl.load(merged + wide_row * merged_row + (HEADS + 2 * KV_HEADS + head) * D + dims).to(tl.float32)
    largest = float("-inf")
    weight = 0.0
    mixed = tl.zeros([CHANNELS], dtype=tl.float32)
    for first in range(0, used, JOINED):
        split = first + tl.arange(0, JOINED)
        there = split < used
        part = (wide_row * HEADS + head) * splits + split
        top = tl.load(summary + part * 2, mask=there, other=float("-inf"))
        weights = tl.load(summary + part * 2 + 1, mask=there, other=0.0)
        parts = tl.load(partial + (part * D)[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        # Every split up to the row's own holds a key that it has seen: no maximum is -inf.
        larger = tl.maximum(largest, tl.max(top, axis=0))
        kept = tl.exp2(largest - larger)
        factor = tl.exp2(top - larger)
        weight = tl.fma(weight, kept, tl.sum(factor * weights, axis=0))
        mixed = tl.fma(mixed, tl.zeros_like(mixed) + kept, tl.sum(factor[:, None] * parts, axis=0))
        largest = larger
    mixed = mixed / tl.where(valid, weight, 1.0) * tl.sigmoid(gate)
    result = tl.where(valid, mixed, 0.0)  # padding's gate may be NaN
    tl.store(out + wide_row * out_row + dims + head * D, result.to(out.dtype.element_ty))
