"""The DeltaNet mixer between its two projections, for a verify window, with the commit deferred.

One program per sequence and value head: it takes the head's state as it was before the last window, applies the tokens
of that window that were kept (from the tape: key, delta, decay), stores the state, and runs the new window on it:
convolution, norms, gated delta rule, gated norm. The window's states are never stored; its tape is. So a window costs
one reading and one writing of the state, whatever its length and whatever was kept.

A head's update is written once (`_advance`) and serves both passes, so replayed tokens leave the very bits that they
left the first time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from surefoot.kernels.fused.launch import launch_options, wait_for_inputs

UNIT_EPS = 1e-6  # of the keys' and queries' norm: inside the root, beside the sum


@dataclass(frozen=True)
class DeltaState:
    """What one layer keeps for S slots. `state` [S, Hk, Dk, r * Dv] float32 is that before the last window.

    The tape holds the last window of at most W tokens: `keys` [S, Hv, W, Dk], `deltas` [S, Hv, W, Dv], `decays`
    [S, Hv, W], float32. `ring` [S, 2^n, C] holds the convolution's raw inputs, that of position p in row p mod 2^n:
    what a rejected draft wrote is overwritten when its position is read again.
    """

    state: Tensor
    keys: Tensor
    deltas: Tensor
    decays: Tensor
    ring: Tensor

    @classmethod
    def allocate(
        cls, slots: int, heads: tuple[int, int], dims: tuple[int, int], channels: int, width: int, window: int,
        dtype: torch.dtype, device: torch.device,
    ) -> DeltaState:  # fmt: skip
        """Empty slots. `heads`: key and value heads; `dims`: of a key and of a value; `width`: convolution taps."""
        (key_heads, value_heads), (key_dim, value_dim) = heads, dims
        return cls(
            torch.zeros(slots, key_heads, key_dim, value_heads // key_heads * value_dim, device=device),
            torch.zeros(slots, value_heads, window, key_dim, device=device),
            torch.zeros(slots, value_heads, window, value_dim, device=device),
            torch.zeros(slots, value_heads, window, device=device),
            torch.zeros(slots, triton.next_power_of_2(window + width), channels, dtype=dtype, device=device),
        )


@dataclass(frozen=True)
class DeltaWeights:
    """`taps` [width, C]; `rate` = -exp(A_log) and `dt_bias` [Hv]; `norm` [Dv], plain; all float32. `lanes`: columns
    that the projection gives to the beta logits, and to the decay logits behind them."""

    taps: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    lanes: int


def delta_window_reference(
    merged: Tensor, weights: DeltaWeights, cache: DeltaState, slots: Tensor, length: Tensor, replay: Tensor,
    out: Tensor, *, window: int,
) -> None:  # fmt: skip
    """merged [B * window, C + Hv * Dv + 2 * lanes]: per row the raw convolution inputs (key and query of each key head,
    then all values), z, beta logits, decay logits -> out [B * window, Hv * Dv].

    Sequence b is slots[b] (-1: none), its window stands at length[slot]; `replay[slot]` tokens of the last window were
    kept and are applied first. `norm`'s eps is that for queries without their scale Dk^-0.5 (times Dk).
    """
    _, key_heads, key_dim, wide = cache.state.shape
    value_heads, value_dim = cache.deltas.shape[1], cache.deltas.shape[3]
    ratio, ring_rows = wide // value_dim, cache.ring.shape[1]
    channels, width = cache.ring.shape[2], weights.taps.shape[0]
    rows = merged.view(-1, window, merged.shape[1])
    for b, slot in enumerate(slots.tolist()):
        if slot < 0:
            out.view(-1, window, out.shape[1])[b] = 0
            continue
        position = int(length[slot])
        s = cache.state[slot].view(key_heads, key_dim, ratio, value_dim).permute(0, 2, 1, 3).flatten(0, 1)
        for t in range(int(replay[slot])):
            outer = cache.keys[slot, :, t, :, None] * cache.deltas[slot, :, t, None]
            s = s * cache.decays[slot, :, t, None, None] + outer
        cache.state[slot] = s.view(key_heads, ratio, key_dim, value_dim).permute(0, 2, 1, 3).flatten(2)
        for i in range(window):
            u, z, beta, decay = (
                rows[b, i].float().split([channels, value_heads * value_dim, weights.lanes, weights.lanes])
            )
            cache.ring[slot, (position + i) % ring_rows] = rows[b, i, :channels]
            past = [position + i - width + 1 + j for j in range(width)]
            strip = [cache.ring[slot, p % ring_rows].float() if p >= 0 else torch.zeros_like(u) for p in past]
            mixed = F.silu((torch.stack(strip) * weights.taps).sum(0))
            pairs = mixed[: 2 * key_heads * key_dim].view(key_heads, 2, key_dim)
            unit = pairs * torch.rsqrt(pairs.square().sum(-1, keepdim=True) + UNIT_EPS)
            k, q = unit.repeat_interleave(ratio, dim=0).unbind(1)
            v = mixed[2 * key_heads * key_dim :].view(value_heads, value_dim)
            log_decay = weights.rate * F.softplus(decay[:value_heads] + weights.dt_bias)
            a = log_decay.exp()
            delta = beta[:value_heads].sigmoid()[:, None] * (v - a[:, None] * torch.einsum("hk,hkv->hv", k, s))
            s = s * a[:, None, None] + k[:, :, None] * delta[:, None]
            o = torch.einsum("hk,hkv->hv", q, s)
            cache.keys[slot, :, i], cache.deltas[slot, :, i], cache.decays[slot, :, i] = k, delta, a
            o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
            out[b * window + i] = (o * F.silu(z.view(value_heads, value_dim))).flatten()


def delta_window(
    merged: Tensor, weights: DeltaWeights, cache: DeltaState, slots: Tensor, length: Tensor, replay: Tensor,
    out: Tensor, *, window: int,
) -> None:  # fmt: skip
    """See `delta_window_reference`. Dk and Dv are powers of two."""
    _, key_heads, key_dim, wide = cache.state.shape
    value_heads, tape, value_dim = cache.deltas.shape[1:]
    _delta_kernel[(value_heads, slots.shape[0])](
        merged, weights.taps, weights.rate, weights.dt_bias, weights.norm, weights.eps,
        cache.state, cache.keys, cache.deltas, cache.decays, cache.ring, slots, length, replay, out,
        WINDOW=window, TAPE=tape, RING=cache.ring.shape[1], WIDTH=weights.taps.shape[0], LANES=weights.lanes,
        KEY_HEADS=key_heads, VALUE_HEADS=value_heads, RATIO=wide // value_dim, DK=key_dim, DV=value_dim,
        num_warps=8 if key_dim * value_dim >= 8192 else 4, **launch_options(merged.device),
    )  # fmt: skip


@triton.jit
def _advance(state, key, delta, decay):
    return state * decay + key[:, None] * delta[None, :]


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _tap(taps, channel, j, CHANNELS: tl.constexpr):
    return tl.load(taps + j * CHANNELS + channel)


@triton.jit
def _past(ring, position, channel, RING: tl.constexpr, CHANNELS: tl.constexpr):
    """The raw input of a committed position; zeros before the start."""
    there = position + 0 * channel >= 0
    return tl.load(ring + ((position + RING) % RING) * CHANNELS + channel, there, 0.0).to(tl.float32)


@triton.jit
def _delta_kernel(
    merged, taps, rate, dt_bias, norm, eps, state, keys, deltas, decays, ring, slots, length, replay, out,
    WINDOW: tl.constexpr, TAPE: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    tl.static_assert(WIDTH == 4, "the convolution is written out for four taps")
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    COLUMNS: tl.constexpr = CHANNELS + VALUE_HEADS * DV + 2 * LANES
    head = tl.program_id(0)
    b = tl.program_id(1)
    slot = tl.load(slots + b).to(tl.int64)
    key_head = head // RATIO
    at_k = tl.arange(0, DK)
    at_v = tl.arange(0, DV)
    if slot >= 0:
        # All that older kernels wrote: the state and the tape are read and settled before the wait.
        position = tl.load(length + slot)
        kept = tl.load(replay + slot)
        tile = state + ((slot * KEY_HEADS + key_head) * DK + at_k[:, None]) * (RATIO * DV)
        tile += (head % RATIO) * DV + at_v[None, :]
        s = tl.load(tile)
        tape = (slot * VALUE_HEADS + head) * TAPE
        for t in range(kept):
            key = tl.load(keys + (tape + t) * DK + at_k)
            delta = tl.load(deltas + (tape + t) * DV + at_v)
            s = _advance(s, key, delta, tl.load(decays + tape + t))
        tl.store(tile, s)

        key_channel = key_head * 2 * DK + at_k
        query_channel = key_channel + DK
        value_channel = 2 * KEY_HEADS * DK + head * DV + at_v
        ring += slot * (RING * CHANNELS)
        k3 = _past(ring, position - 3, key_channel, RING, CHANNELS)
        k2 = _past(ring, position - 2, key_channel, RING, CHANNELS)
        k1 = _past(ring, position - 1, key_channel, RING, CHANNELS)
        q3 = _past(ring, position - 3, query_channel, RING, CHANNELS)
        q2 = _past(ring, position - 2, query_channel, RING, CHANNELS)
        q1 = _past(ring, position - 1, query_channel, RING, CHANNELS)
        v3 = _past(ring, position - 3, value_channel, RING, CHANNELS)
        v2 = _past(ring, position - 2, value_channel, RING, CHANNELS)
        v1 = _past(ring, position - 1, value_channel, RING, CHANNELS)
        rate_h = tl.load(rate + head)
        bias_h = tl.load(dt_bias + head)
        scale = tl.load(norm + at_v)
        wait_for_inputs(DEPENDENT)

        for i in range(WINDOW):
            row = merged + (b * WINDOW + i) * COLUMNS
            raw_k = tl.load(row + key_channel)
            raw_q = tl.load(row + query_channel)
            raw_v = tl.load(row + value_channel)
            z = tl.load(row + CHANNELS + head * DV + at_v).to(tl.float32)
            beta = tl.load(row + CHANNELS + VALUE_HEADS * DV + head).to(tl.float32)
            step = tl.load(row + CHANNELS + VALUE_HEADS * DV + LANES + head).to(tl.float32) + bias_h
            into = ring + ((position + i) % RING) * CHANNELS
            tl.store(into + value_channel, raw_v)
            if head % RATIO == 0:
                tl.store(into + key_channel, raw_k)
                tl.store(into + query_channel, raw_q)
            k0 = raw_k.to(tl.float32)
            q0 = raw_q.to(tl.float32)
            v0 = raw_v.to(tl.float32)
            k = k3 * _tap(taps, key_channel, 0, CHANNELS) + k2 * _tap(taps, key_channel, 1, CHANNELS)
            k = _silu(k + k1 * _tap(taps, key_channel, 2, CHANNELS) + k0 * _tap(taps, key_channel, 3, CHANNELS))
            q = q3 * _tap(taps, query_channel, 0, CHANNELS) + q2 * _tap(taps, query_channel, 1, CHANNELS)
            q = _silu(q + q1 * _tap(taps, query_channel, 2, CHANNELS) + q0 * _tap(taps, query_channel, 3, CHANNELS))
            v = v3 * _tap(taps, value_channel, 0, CHANNELS) + v2 * _tap(taps, value_channel, 1, CHANNELS)
            v = _silu(v + v1 * _tap(taps, value_channel, 2, CHANNELS) + v0 * _tap(taps, value_channel, 3, CHANNELS))
            k3, k2, k1 = k2, k1, k0
            q3, q2, q1 = q2, q1, q0
            v3, v2, v1 = v2, v1, v0
            k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
            softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
            decay = tl.exp(rate_h * softplus)
            beta = 1.0 / (1.0 + tl.exp(-beta))

            # Both reads of the state in one pass, before the update: q^T S after it is decay q^T S + (q . k) delta.
            pulled = tl.sum(k[:, None] * s, 0)
            read = tl.sum(q[:, None] * s, 0)
            delta = beta * (v - decay * pulled)
            o = decay * read + tl.sum(q * k, 0) * delta
            s = _advance(s, k, delta, decay)
            tl.store(keys + (tape + i) * DK + at_k, k)
            tl.store(deltas + (tape + i) * DV + at_v, delta)
            tl.store(decays + tape + i, decay)
            o *= tl.rsqrt(tl.sum(o * o, 0) / DV + eps) * scale
            o *= _silu(z)
            tl.store(out + (b * WINDOW + i) * (VALUE_HEADS * DV) + head * DV + at_v, o.to(out.dtype.element_ty))
    else:
        wait_for_inputs(DEPENDENT)
        for i in range(WINDOW):
            nothing = tl.zeros((DV,), tl.float32).to(out.dtype.element_ty)
            tl.store(out + (b * WINDOW + i) * (VALUE_HEADS * DV) + head * DV + at_v, nothing)
