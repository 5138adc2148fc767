"""The DeltaNet mixer between its two projections, for a verify window, with the commit deferred.

A program takes a few columns of a head's state as they were before the last window, applies the tokens of that window
that were kept (from the tape: key, delta, decay), stores the state, and runs the new window on it. The window's states
are never stored; its tape is. So a window costs one reading and one writing of the state, whatever its length and
whatever was kept.

The state's columns need one another only for the gated norm behind them, which the last program of a head to arrive
does for the whole head. One warp is a program: every reduction then stays within the warp, and a token costs no
barrier among warps. Convolution and gates of a token are cheap, so each program of a head computes them itself, and
stays free of the others.

The programs of a head replay from one tape of keys while another of them may already write the new one: there are two,
used in turn. Whose turn it is, the count of arrived programs says. It is never set back; until a program has itself
arrived, the others cannot complete the round and change the turn.

A head's update is written once (`_advance`) and serves both passes, so replayed tokens leave the very bits that they
left the first time. Neither the length of the window nor a token's place in it is known to the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from surefoot.kernels.fused.launch import TILE_ROWS, launch_options, let_next_start, sigmoid, silu, wait_for_inputs

UNIT_EPS = 1e-6  # of the keys' and queries' norm: inside the root, beside the sum
BLOCK_V = 8  # columns of the state of a program: 32 bytes of each row, the least that memory delivers


@dataclass(frozen=True)
class DeltaState:
    """What one layer keeps for S slots. `state` [S, Hk, Dk, r * Dv] float32 is that before the last window.

    The tape holds the last window of at most W tokens, float32: `deltas` [S, Hv, W, Dv], and twice, for use in turn,
    `keys` [S, 2, Hv, W, Dk] and `decays` [S, 2, Hv, W]. A key and a delta may share a factor either way; only their
    product counts. `ring` [S, 2^n, C] holds the convolution's raw inputs, that of position p in row p mod 2^n: what a
    rejected draft wrote is overwritten when its position is read again.

    `mixed` [S, Hv, W, Dv] float32 hands outputs to the norm. `arrived` [S, Hv] int32 counts the programs that did so,
    Dv / block a window, block being `block_of(Dv)`.
    """

    state: Tensor
    keys: Tensor
    decays: Tensor
    deltas: Tensor
    ring: Tensor
    mixed: Tensor
    arrived: Tensor

    @classmethod
    def allocate(
        cls, slots: int, heads: tuple[int, int], dims: tuple[int, int], channels: int, width: int, window: int,
        dtype: torch.dtype, device: torch.device,
    ) -> DeltaState:  # fmt: skip
        """Empty slots. `heads`: key and value heads; `dims`: of a key and of a value; `width`: convolution taps."""
        (key_heads, value_heads), (key_dim, value_dim) = heads, dims
        return cls(
            torch.zeros(slots, key_heads, key_dim, value_heads // key_heads * value_dim, device=device),
            torch.zeros(slots, 2, value_heads, window, key_dim, device=device),
            torch.zeros(slots, 2, value_heads, window, device=device),
            torch.zeros(slots, value_heads, window, value_dim, device=device),
            torch.zeros(slots, triton.next_power_of_2(window + width), channels, dtype=dtype, device=device),
            torch.zeros(slots, value_heads, window, value_dim, device=device),
            torch.zeros(slots, value_heads, dtype=torch.int32, device=device),
        )


def block_of(value_dim: int) -> int:
    """Columns of the state of a program."""
    return min(BLOCK_V, value_dim)


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
    ratio, ring_rows, blocks = wide // value_dim, cache.ring.shape[1], value_dim // block_of(value_dim)
    channels, width = cache.ring.shape[2], weights.taps.shape[0]
    rows = merged.view(-1, window, merged.shape[1])
    for b, slot in enumerate(slots.tolist()):
        if slot < 0:
            out.view(-1, window, out.shape[1])[b] = 0
            continue
        position = int(length[slot])
        s = cache.state[slot].view(key_heads, key_dim, ratio, value_dim).permute(0, 2, 1, 3).flatten(0, 1)
        turn = int(cache.arrived[slot, 0]) // blocks % 2
        for t in range(int(replay[slot])):
            outer = cache.keys[slot, turn, :, t, :, None] * cache.deltas[slot, :, t, None]
            s = s * cache.decays[slot, turn, :, t, None, None] + outer
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
            cache.keys[slot, 1 - turn, :, i], cache.deltas[slot, :, i], cache.decays[slot, 1 - turn, :, i] = k, delta, a
            o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
            out[b * window + i] = (o * F.silu(z.view(value_heads, value_dim))).flatten()
        cache.arrived[slot] += blocks


def delta_window(
    merged: Tensor, weights: DeltaWeights, cache: DeltaState, slots: Tensor, length: Tensor, replay: Tensor,
    out: Tensor, *, window: int,
) -> None:  # fmt: skip
    """See `delta_window_reference`. Dk and Dv are powers of two, a window has at most 16 tokens and fits the tape."""
    _, key_heads, key_dim, wide = cache.state.shape
    value_heads, tape, value_dim = cache.deltas.shape[1:]
    assert window <= min(tape, TILE_ROWS.value)
    block = block_of(value_dim)
    _delta_kernel[(value_dim // block, value_heads, slots.shape[0])](
        merged, weights.taps, weights.rate, weights.dt_bias, weights.norm, weights.eps,
        cache.state, cache.keys, cache.decays, cache.deltas, cache.ring, cache.mixed, cache.arrived,
        slots, length, replay, out, window,
        TAPE=tape, RING=cache.ring.shape[1], WIDTH=weights.taps.shape[0], LANES=weights.lanes,
        KEY_HEADS=key_heads, VALUE_HEADS=value_heads, RATIO=wide // value_dim, DK=key_dim, DV=value_dim, BLOCK=block,
        num_warps=1, **launch_options(merged.device),
    )  # fmt: skip


@triton.jit
def _advance(state, key, delta, decay):
    return tl.fma(tl.broadcast_to(key[:, None], state.shape), tl.broadcast_to(delta[None, :], state.shape),
                  state * decay)  # fmt: skip


@triton.jit
def _taped(keys, deltas, decays, t, kept, at_k, at_v, DK: tl.constexpr, DV: tl.constexpr):
    """Token t of the tape, nothing if it was not kept."""
    key = tl.load(keys + t * DK + at_k, at_k < tl.where(t < kept, DK, 0), 0.0)
    delta = tl.load(deltas + t * DV + at_v, at_v < tl.where(t < kept, DV, 0), 0.0)
    return key, delta, tl.load(decays + t, t < kept, 1.0)


@triton.jit
def _past(ring, past, channel, RING: tl.constexpr, CHANNELS: tl.constexpr):
    """The convolution's inputs at position `past`, zeros before the start."""
    return tl.load(ring + (past + RING) % RING * CHANNELS + channel, channel < tl.where(past >= 0, CHANNELS, 0), 0.0)


@triton.jit
def _silu(x, DEPENDENT: tl.constexpr):
    """x sigmoid(x), of a quarter of the instructions: without the usual care for tiny and huge numbers between, which
    come to x or to 0 here anyhow."""
    if DEPENDENT:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
            "rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return silu(x)


@triton.jit
def _take(x, due, next, last, t0, t1, t2, t3):
    """Four taps, the newest input last: x completes the sum that was due and enters the three behind it."""
    x = x.to(tl.float32)
    return tl.fma(x, t3, due), tl.fma(x, t2, next), tl.fma(x, t1, last), x * t0


@triton.jit
def _filter(ring, taps, position, channel, RING: tl.constexpr, CHANNELS: tl.constexpr):
    """The convolution's taps, and its sums for the next three tokens so far."""
    t0 = tl.load(taps + channel)
    t1 = tl.load(taps + CHANNELS + channel)
    t2 = tl.load(taps + 2 * CHANNELS + channel)
    t3 = tl.load(taps + 3 * CHANNELS + channel)
    x0 = _past(ring, position - 3, channel, RING, CHANNELS)
    x1 = _past(ring, position - 2, channel, RING, CHANNELS)
    x2 = _past(ring, position - 1, channel, RING, CHANNELS)
    zero = tl.zeros(channel.shape, tl.float32)
    _, due, next, last = _take(x0, zero, zero, zero, t0, t1, t2, t3)
    _, due, next, last = _take(x1, due, next, last, t0, t1, t2, t3)
    _, due, next, last = _take(x2, due, next, last, t0, t1, t2, t3)
    return due, next, last, t0, t1, t2, t3


@triton.jit(do_not_specialize=["window"])
def _delta_kernel(
    merged, taps, rate, dt_bias, norm, eps, state, keys, decays, deltas, ring, mixed, arrived, slots, length, replay,
    out, window,
    TAPE: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    tl.static_assert(WIDTH == 4, "the convolution is written out for four taps")
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    COLUMNS: tl.constexpr = CHANNELS + VALUE_HEADS * DV + 2 * LANES
    BLOCKS: tl.constexpr = DV // BLOCK
    block = tl.program_id(0)
    head = tl.program_id(1)
    b = tl.program_id(2)
    slot = tl.load(slots + b).to(tl.int64)
    key_head = head // RATIO
    at_k = tl.arange(0, DK)
    at_v = block * BLOCK + tl.arange(0, BLOCK)
    merged += b * (window * COLUMNS)
    out += b * (window * VALUE_HEADS * DV) + head * DV
    if slot >= 0:
        # All that older kernels wrote: the state and the tape are read and settled before the wait.
        position = tl.load(length + slot)
        kept = tl.load(replay + slot)
        arrived += slot * VALUE_HEADS + head
        # BLOCKS is a power of two, so the count may overflow.
        turn = tl.where((tl.load(arrived, cache_modifier=".cg") & BLOCKS) != 0, 1, 0)
        tile = state + ((slot * KEY_HEADS + key_head) * DK + at_k[:, None]) * (RATIO * DV)
        tile += (head % RATIO) * DV + at_v[None, :]
        old_tape = ((slot * 2 + turn) * VALUE_HEADS + head) * TAPE
        new_tape = ((slot * 2 + 1 - turn) * VALUE_HEADS + head) * TAPE
        own = (slot * VALUE_HEADS + head) * (TAPE * DV)
        deltas += own
        mixed += own
        ring += slot * (RING * CHANNELS)
        s = tl.load(tile)
        for t in range(0, kept, 4):  # four tokens' numbers on their way at once
            k0, d0, a0 = _taped(keys + old_tape * DK, deltas, decays + old_tape, t, kept, at_k, at_v, DK, DV)
            k1, d1, a1 = _taped(keys + old_tape * DK, deltas, decays + old_tape, t + 1, kept, at_k, at_v, DK, DV)
            k2, d2, a2 = _taped(keys + old_tape * DK, deltas, decays + old_tape, t + 2, kept, at_k, at_v, DK, DV)
            k3, d3, a3 = _taped(keys + old_tape * DK, deltas, decays + old_tape, t + 3, kept, at_k, at_v, DK, DV)
            s = _advance(s, k0, d0, a0)
            if t + 1 < kept:
                s = _advance(s, k1, d1, a1)
            if t + 2 < kept:
                s = _advance(s, k2, d2, a2)
            if t + 3 < kept:
                s = _advance(s, k3, d3, a3)
        tl.store(tile, s)
        keys += new_tape * DK
        decays += new_tape
        key_channel = key_head * 2 * DK + at_k
        query_channel = key_channel + DK
        value_channel = 2 * KEY_HEADS * DK + head * DV + at_v
        k_due, k_next, k_last, kt0, kt1, kt2, kt3 = _filter(ring, taps, position, key_channel, RING, CHANNELS)
        q_due, q_next, q_last, qt0, qt1, qt2, qt3 = _filter(ring, taps, position, query_channel, RING, CHANNELS)
        v_due, v_next, v_last, vt0, vt1, vt2, vt3 = _filter(ring, taps, position, value_channel, RING, CHANNELS)
        rate_h = tl.load(rate + head)
        bias_h = tl.load(dt_bias + head)
        # What all programs of a head compute, one of them stores; key heads have one such value head.
        keeps = block == 0
        fills = keeps & (head % RATIO == 0)
        wait_for_inputs(DEPENDENT)
        let_next_start(DEPENDENT)

        logit = merged + CHANNELS + VALUE_HEADS * DV + head
        raw_k = tl.load(merged + key_channel)
        raw_q = tl.load(merged + query_channel)
        raw_v = tl.load(merged + value_channel)
        beta = tl.load(logit).to(tl.float32)
        step = tl.load(logit + LANES).to(tl.float32)
        for t in range(window):
            after = tl.minimum(t + 1, window - 1) * COLUMNS  # the next token's inputs, on their way meanwhile
            then_k = tl.load(merged + after + key_channel)
            then_q = tl.load(merged + after + query_channel)
            then_v = tl.load(merged + after + value_channel)
            then_beta = tl.load(logit + after).to(tl.float32)
            then_step = tl.load(logit + after + LANES).to(tl.float32)
            # Rows of the ring that belong to the window are only written, the others were only read.
            into = ring + (position + t) % RING * CHANNELS
            tl.store(into + key_channel, raw_k, at_k < tl.where(fills, DK, 0))
            tl.store(into + query_channel, raw_q, at_k < tl.where(fills, DK, 0))
            tl.store(into + value_channel, raw_v)
            k, k_due, k_next, k_last = _take(raw_k, k_due, k_next, k_last, kt0, kt1, kt2, kt3)
            q, q_due, q_next, q_last = _take(raw_q, q_due, q_next, q_last, qt0, qt1, qt2, qt3)
            v, v_due, v_next, v_last = _take(raw_v, v_due, v_next, v_last, vt0, vt1, vt2, vt3)
            k = _silu(k, DEPENDENT)
            q = _silu(q, DEPENDENT)
            v = _silu(v, DEPENDENT)
            step += bias_h
            softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
            decay = tl.exp(rate_h * softplus)
            # Key and query stay as they are, and their norms join the columns' sums: no sum waits for another. Both
            # reads of the state precede its update: q^T S after it is decay q^T S + (q . k) delta.
            key_norm = tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            query_norm = tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
            overlap = tl.sum(q * k, 0)
            pulled = tl.sum(k[:, None] * s, 0)
            read = tl.sum(q[:, None] * s, 0)
            delta = sigmoid(beta) * key_norm * (v - decay * key_norm * pulled)
            s = _advance(s, k, delta, decay)
            tl.store(deltas + t * DV + at_v, delta)
            tl.store(mixed + t * DV + at_v, query_norm * (decay * read + overlap * delta))
            tl.store(keys + t * DK + at_k, k, at_k < tl.where(keeps, DK, 0))
            tl.store(decays + t, decay, keeps)
            raw_k, raw_q, raw_v = then_k, then_q, then_v
            beta, step = then_beta, then_step

        tl.debug_barrier()  # every thread's stores come before the arrival
        if (tl.atomic_add(arrived, 1) & (BLOCKS - 1)) == BLOCKS - 1:
            column = tl.arange(0, DV)
            scale = tl.load(norm + column)
            for first in range(0, window, 4):
                i = first + tl.arange(0, 4)
                there = (i < window)[:, None] & (column >= 0)[None, :]
                o = tl.load(mixed + i[:, None] * DV + column[None, :], there, 0.0, cache_modifier=".cg")
                z = tl.load(merged + i[:, None] * COLUMNS + CHANNELS + head * DV + column[None, :], there, 0.0)
                o *= tl.rsqrt(tl.sum(o * o, 1) / DV + eps)[:, None] * scale[None, :]
                o *= _silu(z.to(tl.float32), DEPENDENT)
                tl.store(out + i[:, None] * (VALUE_HEADS * DV) + column[None, :], o.to(out.dtype.element_ty), there)
    else:
        wait_for_inputs(DEPENDENT)
        let_next_start(DEPENDENT)
        nothing = tl.zeros((BLOCK,), tl.float32).to(out.dtype.element_ty)
        for t in range(window):
            tl.store(out + t * (VALUE_HEADS * DV) + at_v, nothing)
