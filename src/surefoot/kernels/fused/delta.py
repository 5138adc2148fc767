"""The DeltaNet mixer between its two projections, for a verify window, with the commit deferred.

One program per sequence and value head: it takes the head's state as it was before the last window, applies the tokens
of that window that were kept (from the tape: key, delta, decay), stores the state, and runs the new window on it. The
window's states are never stored; its tape is. So a window costs one reading and one writing of the state, whatever its
length and whatever was kept. What needs no state (convolution, norms, gates) is computed for all tokens at once, in a
tile of 16 rows whatever the window, and taken up again row by row from memory.

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

from surefoot.kernels.fused.launch import TILE_ROWS, launch_options, sigmoid, silu, wait_for_inputs

UNIT_EPS = 1e-6  # of the keys' and queries' norm: inside the root, beside the sum


@dataclass(frozen=True)
class DeltaState:
    """What one layer keeps for S slots. `state` [S, Hk, Dk, r * Dv] float32 is that before the last window.

    The tape holds the last window of at most W tokens: `keys` [S, Hv, W, Dk], `deltas` [S, Hv, W, Dv], and `gates`
    [S, Hv, W, 4], of which the first is the decay, float32; `queries` and `values` are scratch beside it. `ring`
    [S, 2^n, C] holds the convolution's raw inputs, that of position p in row p mod 2^n: what a rejected draft wrote is
    overwritten when its position is read again.
    """

    state: Tensor
    keys: Tensor
    queries: Tensor
    values: Tensor
    deltas: Tensor
    gates: Tensor
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
            torch.zeros(slots, value_heads, window, key_dim, device=device),
            torch.zeros(slots, value_heads, window, value_dim, device=device),
            torch.zeros(slots, value_heads, window, value_dim, device=device),
            torch.zeros(slots, value_heads, window, 4, device=device),
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
            s = s * cache.gates[slot, :, t, 0, None, None] + outer
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
            cache.keys[slot, :, i], cache.deltas[slot, :, i], cache.gates[slot, :, i, 0] = k, delta, a
            o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
            out[b * window + i] = (o * F.silu(z.view(value_heads, value_dim))).flatten()


def delta_window(
    merged: Tensor, weights: DeltaWeights, cache: DeltaState, slots: Tensor, length: Tensor, replay: Tensor,
    out: Tensor, *, window: int,
) -> None:  # fmt: skip
    """See `delta_window_reference`. Dk and Dv are powers of two, a window has at most 16 tokens."""
    assert window <= TILE_ROWS.value
    _, key_heads, key_dim, wide = cache.state.shape
    value_heads, tape, value_dim = cache.deltas.shape[1:]
    _delta_kernel[(value_heads, slots.shape[0])](
        merged, weights.taps, weights.rate, weights.dt_bias, weights.norm, weights.eps,
        cache.state, cache.keys, cache.queries, cache.values, cache.deltas, cache.gates, cache.ring,
        slots, length, replay, out,
        WINDOW=window, TAPE=tape, RING=cache.ring.shape[1], WIDTH=weights.taps.shape[0], LANES=weights.lanes,
        KEY_HEADS=key_heads, VALUE_HEADS=value_heads, RATIO=wide // value_dim, DK=key_dim, DV=value_dim,
        num_warps=16 if key_dim * value_dim >= 8192 else 4, **launch_options(merged.device),
    )  # fmt: skip


@triton.jit
def _advance(state, key, delta, decay):
    return state * decay + key[:, None] * delta[None, :]


@triton.jit
def _mixed(merged, ring, taps, position, channel, i, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
           WINDOW: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """The convolution's output [16, channels] for window tokens i [16]: silu of four taps, the newest last. Inputs
    before the window come from the ring, zeros from before the start."""
    total = tl.zeros((i.shape[0], channel.shape[0]), tl.float32)
    for j in tl.static_range(4):
        at = i - 3 + j
        recent = tl.load(merged + at[:, None] * COLUMNS + channel[None, :], ((at >= 0) & (i < WINDOW))[:, None], 0.0)
        past = position + at
        older = ((past + RING) % RING)[:, None] * CHANNELS + channel[None, :]
        old = tl.load(ring + older, ((at < 0) & (past >= 0) & (i < WINDOW))[:, None], 0.0)
        raw = tl.where((at >= 0)[:, None], recent, old).to(tl.float32)
        total = total + raw * tl.load(taps + j * CHANNELS + channel)[None, :]
    return silu(total)


@triton.jit
def _delta_kernel(
    merged, taps, rate, dt_bias, norm, eps, state, keys, queries, values, deltas, gates, ring, slots, length, replay,
    out,
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
    merged += b * (WINDOW * COLUMNS)
    out += b * (WINDOW * VALUE_HEADS * DV) + head * DV + at_v
    if slot >= 0:
        # All that older kernels wrote: the state and the tape are read and settled before the wait.
        position = tl.load(length + slot)
        kept = tl.load(replay + slot)
        tile = state + ((slot * KEY_HEADS + key_head) * DK + at_k[:, None]) * (RATIO * DV)
        tile += (head % RATIO) * DV + at_v[None, :]
        tape = (slot * VALUE_HEADS + head) * TAPE
        keys += tape * DK
        queries += tape * DK
        values += tape * DV
        deltas += tape * DV
        gates += tape * 4
        ring += slot * (RING * CHANNELS)
        s = tl.load(tile)
        for t in range(kept):
            s = _advance(s, tl.load(keys + t * DK + at_k), tl.load(deltas + t * DV + at_v), tl.load(gates + t * 4))
        tl.store(tile, s)
        rate_h = tl.load(rate + head)
        bias_h = tl.load(dt_bias + head)
        scale = tl.load(norm + at_v)
        wait_for_inputs(DEPENDENT)

        key_channel = key_head * 2 * DK + at_k
        query_channel = key_channel + DK
        value_channel = 2 * KEY_HEADS * DK + head * DV + at_v
        i = tl.arange(0, 16)
        there = i < WINDOW
        k_all = _mixed(merged, ring, taps, position, key_channel, i, COLUMNS, CHANNELS, WINDOW, RING)
        q_all = _mixed(merged, ring, taps, position, query_channel, i, COLUMNS, CHANNELS, WINDOW, RING)
        v_all = _mixed(merged, ring, taps, position, value_channel, i, COLUMNS, CHANNELS, WINDOW, RING)
        k_all *= tl.rsqrt(tl.sum(k_all * k_all, 1) + 1e-6)[:, None]
        q_all *= tl.rsqrt(tl.sum(q_all * q_all, 1) + 1e-6)[:, None]
        logit = merged + i * COLUMNS + CHANNELS + VALUE_HEADS * DV + head
        beta = tl.load(logit, there, 0.0).to(tl.float32)
        step = tl.load(logit + LANES, there, 0.0).to(tl.float32) + bias_h
        softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
        tl.store(gates + i * 4, tl.exp(rate_h * softplus), there)
        tl.store(gates + i * 4 + 1, sigmoid(beta), there)
        tl.store(gates + i * 4 + 2, tl.sum(q_all * k_all, 1), there)
        tl.store(keys + i[:, None] * DK + at_k[None, :], k_all, there[:, None])
        tl.store(queries + i[:, None] * DK + at_k[None, :], q_all, there[:, None])
        tl.store(values + i[:, None] * DV + at_v[None, :], v_all, there[:, None])
        # The window's raw inputs enter the ring, each channel by one program; other rows of it are only read.
        rows = merged + i[:, None] * COLUMNS
        into = ring + ((position + i) % RING)[:, None] * CHANNELS
        tl.store(into + value_channel[None, :], tl.load(rows + value_channel[None, :], there[:, None], 0.0),
                 there[:, None])  # fmt: skip
        if head % RATIO == 0:
            tl.store(into + key_channel[None, :], tl.load(rows + key_channel[None, :], there[:, None], 0.0),
                     there[:, None])  # fmt: skip
            tl.store(into + query_channel[None, :], tl.load(rows + query_channel[None, :], there[:, None], 0.0),
                     there[:, None])  # fmt: skip
        tl.debug_barrier()

        k = tl.load(keys + at_k)
        q = tl.load(queries + at_k)
        v = tl.load(values + at_v)
        z = tl.load(merged + CHANNELS + head * DV + at_v).to(tl.float32)
        decay = tl.load(gates)
        beta = tl.load(gates + 1)
        overlap = tl.load(gates + 2)
        for t in range(WINDOW):
            after = tl.minimum(t + 1, WINDOW - 1)  # the next token's numbers, on their way while this one is computed
            next_k = tl.load(keys + after * DK + at_k)
            next_q = tl.load(queries + after * DK + at_k)
            next_v = tl.load(values + after * DV + at_v)
            next_z = tl.load(merged + after * COLUMNS + CHANNELS + head * DV + at_v).to(tl.float32)
            next_decay = tl.load(gates + after * 4)
            next_beta = tl.load(gates + after * 4 + 1)
            next_overlap = tl.load(gates + after * 4 + 2)
            # Both reads of the state in one pass, before the update: q^T S after it is decay q^T S + (q . k) delta.
            pulled = tl.sum(k[:, None] * s, 0)
            read = tl.sum(q[:, None] * s, 0)
            delta = beta * (v - decay * pulled)
            o = decay * read + overlap * delta
            s = _advance(s, k, delta, decay)
            tl.store(deltas + t * DV + at_v, delta)
            o *= tl.rsqrt(tl.sum(o * o, 0) / DV + eps) * scale
            o *= silu(z)
            tl.store(out + t * (VALUE_HEADS * DV), o.to(out.dtype.element_ty))
            k, q, v, z = next_k, next_q, next_v, next_z
            decay, beta, overlap = next_decay, next_beta, next_overlap
    else:
        wait_for_inputs(DEPENDENT)
        for t in range(WINDOW):
            tl.store(out + t * (VALUE_HEADS * DV), tl.zeros((DV,), tl.float32).to(out.dtype.element_ty))
