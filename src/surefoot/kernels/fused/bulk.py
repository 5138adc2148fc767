"""What stands between the large products of a prefill chunk: each kernel reads its inputs and writes its outputs once.

The residual stream is float32; everything else has the weights' type in memory and is computed in float32. Rows promise
nothing here, but no sum depends on where a sequence is kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from surefoot.kernels.fused.launch import silu

UNIT_EPS = 1e-6  # of the keys' and queries' norm: inside the root, beside the sum
ROWS = 32  # of a tile


def _rms(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


def add_norm_reference(x: Tensor, added: Tensor | None, scale: Tensor, out: Tensor, *, eps: float) -> None:
    """x [T, H] float32 += added [T, H] (if any); out [T, H] = x / sqrt(mean(x^2) + eps) * scale [H]."""
    if added is not None:
        x += added
    out.copy_(_rms(x, scale, eps))


def add_norm(x: Tensor, added: Tensor | None, scale: Tensor, out: Tensor, *, eps: float) -> None:
    """See `add_norm_reference`."""
    tokens, width = x.shape
    _add_norm_kernel[(tokens,)](
        x, x if added is None else added, scale, out, eps,
        ADD=added is not None, H=width, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip


def swiglu_reference(gate_up: Tensor, out: Tensor) -> None:
    """gate_up [T, 2 F] -> out [T, F] = silu(gate) * up."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """See `swiglu_reference`."""
    tokens, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    _swiglu_kernel[(tokens, triton.cdiv(width, block))](gate_up, out, F=width, BLOCK=block, num_warps=4)


def place_heads_reference(
    merged: Tensor, q_scale: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    query: Tensor, *, position: int, eps: float,
) -> None:  # fmt: skip
    """merged [T, (Hq + 2 Hkv) D and more]: each token's queries, keys, values. Queries and keys are normed (scales [D])
    and turned by cos, sin [L, R] at positions `position` onwards; query [T, Hq, D] takes the queries, rows `position`
    onwards of keys, values [Hkv, L, D] the others."""
    (tokens, heads, dim), kv_heads = query.shape, keys.shape[0]
    stop, half = position + tokens, cos.shape[1] // 2
    parts = (
        merged[:, : (heads + 2 * kv_heads) * dim].float().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
    )

    def turned(x: Tensor, scale: Tensor) -> Tensor:
        x = _rms(x, scale, eps)
        rotary = x[..., : 2 * half]
        swapped = torch.cat([rotary[..., half:], rotary[..., :half]], dim=-1)
        rotary = rotary * cos[position:stop, None] + swapped * sin[position:stop, None]
        return torch.cat([rotary, x[..., 2 * half :]], dim=-1)

    query.copy_(turned(parts[0], q_scale))
    keys[:, position:stop] = turned(parts[1], k_scale).transpose(0, 1)
    values[:, position:stop] = parts[2].transpose(0, 1)


def place_heads(
    merged: Tensor, q_scale: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    query: Tensor, *, position: int, eps: float,
) -> None:  # fmt: skip
    """See `place_heads_reference`."""
    (tokens, heads, dim), kv_heads = query.shape, keys.shape[0]
    _place_heads_kernel[(triton.cdiv(tokens, ROWS), heads + 2 * kv_heads)](
        merged, q_scale, k_scale, cos, sin, keys, values, query, tokens, position,
        merged.stride(0), keys.stride(0), eps,
        HEADS=heads, KV_HEADS=kv_heads, D=dim, BLOCK=triton.next_power_of_2(dim), ROTARY=cos.shape[1], TILE=ROWS,
        num_warps=8,
    )  # fmt: skip


def conv_heads_reference(merged: Tensor, past: Tensor, taps: Tensor, out: Tensor, *, key_heads: int, dim: int) -> None:
    """merged [T, C and more], behind the inputs past [width - 1, C], convolved with taps [width, C] (the last tap meets
    the newest row) -> out [T, C] = silu of that, its first 2 * key_heads heads of `dim` brought to unit length."""
    tokens, channels = out.shape
    strip = torch.cat([past.float(), merged[:, :channels].float()])
    mixed = F.silu(sum(strip[j : j + tokens] * tap for j, tap in enumerate(taps)))
    pairs, value = mixed.split([2 * key_heads * dim, channels - 2 * key_heads * dim], dim=-1)
    pairs = pairs.view(tokens, -1, dim)
    pairs = pairs * torch.rsqrt(pairs.square().sum(-1, keepdim=True) + UNIT_EPS)
    out.copy_(torch.cat([pairs.flatten(1), value], dim=-1))


def conv_heads(merged: Tensor, past: Tensor, taps: Tensor, out: Tensor, *, key_heads: int, dim: int) -> None:
    """See `conv_heads_reference`."""
    tokens, channels = out.shape
    _conv_heads_kernel[(triton.cdiv(tokens, ROWS), triton.cdiv(channels, dim))](
        merged, past, taps, out, tokens, merged.stride(0), past.stride(0),
        C=channels, UNITS=2 * key_heads, D=dim, BLOCK=triton.next_power_of_2(dim), WIDTH=taps.shape[0],
        EPS=UNIT_EPS, TILE=ROWS, num_warps=8,
    )  # fmt: skip


def gated_norm_reference(x: Tensor, gate: Tensor, scale: Tensor, out: Tensor, *, eps: float) -> None:
    """x, out [T, heads, N], gate [T, heads * N] -> out = x / sqrt(mean(x^2) + eps) * scale [N] * silu(gate)."""
    out.copy_(_rms(x.float(), scale, eps) * F.silu(gate.float()).view(x.shape))


def gated_norm(x: Tensor, gate: Tensor, scale: Tensor, out: Tensor, *, eps: float) -> None:
    """See `gated_norm_reference`."""
    tokens, heads, width = x.shape
    _gated_norm_kernel[(triton.cdiv(tokens, ROWS), heads)](
        x, gate, scale, out, tokens, gate.stride(0), eps,
        HEADS=heads, N=width, BLOCK=triton.next_power_of_2(width), TILE=ROWS, num_warps=8,
    )  # fmt: skip


@triton.jit
def _add_norm_kernel(x, added, scale, out, eps, ADD: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * H
    column = tl.arange(0, BLOCK)
    inside = column < H
    value = tl.load(x + row + column, mask=inside, other=0.0)
    if ADD:
        value += tl.load(added + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row + column, value, mask=inside)
    root = 1.0 / tl.sqrt(tl.sum(value * value, 0) / H + eps)
    value *= root * tl.load(scale + column, mask=inside, other=0.0)
    tl.store(out + row + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_kernel(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    source = gate_up + row * 2 * F + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * F + column, (silu(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "position"])
def _place_heads_kernel(
    merged, q_scale, k_scale, cos, sin, keys, values, query, tokens, position, merged_stride, cache_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < tokens) & (column < D)
    source = merged + row * merged_stride + head * D
    read = tl.load(source + column, mask=inside, other=0.0)
    place = (row + position) * D + column
    cache_head = ((head - HEADS) % KV_HEADS).to(tl.int64) * cache_stride
    if head >= HEADS + KV_HEADS:
        tl.store(values + cache_head + place, read.to(values.dtype.element_ty), mask=inside)
    else:
        scale = q_scale
        if head >= HEADS:
            scale = k_scale
        value = read.to(tl.float32)
        root = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        partner = tl.where(column < ROTARY // 2, column + ROTARY // 2, column - ROTARY // 2)
        turns = inside & (column < ROTARY)
        swapped = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
        swapped *= tl.load(scale + partner, mask=column < ROTARY, other=0.0)
        value *= tl.load(scale + column, mask=column < D, other=0.0)
        angle = (row + position) * ROTARY + column
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
        value = (value * c + swapped * s) * root
        if head < HEADS:
            target = query + row * (HEADS * D) + head * D + column
            tl.store(target, value.to(query.dtype.element_ty), mask=inside)
        else:
            tl.store(keys + cache_head + place, value.to(keys.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _conv_heads_kernel(
    merged, past, taps, out, tokens, merged_stride, past_stride,
    C: tl.constexpr, UNITS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    EPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    channel = head * D + column
    inside = (column < D) & (channel < C) & (row < tokens)
    total = tl.zeros((TILE, BLOCK), tl.float32)
    for j in tl.static_range(WIDTH):
        at = row + (j - WIDTH + 1)
        here = tl.load(merged + at * merged_stride + channel, mask=inside & (at >= 0), other=0.0).to(tl.float32)
        before = tl.load(past + (at + WIDTH - 1) * past_stride + channel, mask=inside & (at < 0), other=0.0)
        tap = tl.load(taps + j * C + channel, mask=(column < D) & (channel < C), other=0.0)
        total += (here + before.to(tl.float32)) * tap
    total = silu(total)
    if head < UNITS:
        total *= (1.0 / tl.sqrt(tl.sum(total * total, 1) + EPS))[:, None]
    tl.store(out + row * C + channel, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _gated_norm_kernel(
    x, gate, scale, out, tokens, gate_stride, eps,
    HEADS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < tokens) & (column < N)
    place = row * (HEADS * N) + head * N + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + head * N + column, mask=inside, other=0.0).to(tl.float32)
    root = 1.0 / tl.sqrt(tl.sum(value * value, 1) / N + eps)[:, None]
    value *= root * tl.load(scale + column, mask=column < N, other=0.0) * silu(z)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
