"""The chunked gated delta rule for prefill (`kernels.gated_delta.chunk`), as two kernels.

The first works out what needs no state, chunk by chunk and head by head in parallel: within a chunk the deltas solve a
unit lower triangular system (I + A) X = B. Its inverse is put together from those of blocks of 1, 2, 4 ... tokens:

    [[P, 0], [C, Q]]^-1 = [[P^-1, 0], [-Q^-1 C P^-1, Q^-1]]

which holds for any keys. (The power series (I - A)(I + A^2)(I + A^4)... takes as many products, but where keys repeat
its terms outgrow the sum by far.) The second kernel walks along the chunks with a part of one head's state in
registers: state columns do not meet, so each program owns some.

Products take operands of the inputs' type and sum in float32; state, decays and the inverse are float32. With 16-bit
inputs the inverse is worked out in TF32, whose rounding is a quarter of what it then meets as an operand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from surefoot.kernels import gated_delta
from surefoot.kernels.fused.launch import INTERPRET, product, sigmoid

SIZE = 64  # tokens of a chunk
MAX_COLUMNS = 32  # of a state, per program: 32 heads of 128 columns then fill 128 of an H200's 132 processors


@dataclass(frozen=True)
class DeltaGates:
    """`logits` [T, 2 * lanes]: those of beta, one per value head and padding, then those of the decay. Decay is
    exp(rate * softplus(logit + dt_bias)); `rate`, `dt_bias` [Hv] float32."""

    logits: Tensor
    rate: Tensor
    dt_bias: Tensor


@dataclass(frozen=True)
class ChunkWorkspace:
    """What the first kernel leaves to the second, T rounded up to whole chunks: `fresh` [Hv, T, Dv] and `pulled`
    [Hv, T, Dk], the solved system's two right sides; `scores` [Hv, T, SIZE], queries times keys with decay; `total`
    [Hv, T] float32, the log decay from each chunk's start."""

    fresh: Tensor
    pulled: Tensor
    scores: Tensor
    total: Tensor

    @classmethod
    def allocate(cls, tokens: int, heads: int, dims: tuple[int, int], like: Tensor) -> ChunkWorkspace:
        """For `dims` of a key and of a value, of the type and on the device of `like`."""
        rows = triton.cdiv(tokens, SIZE) * SIZE
        fresh, pulled, scores = (like.new_empty(heads, rows, width) for width in (dims[1], dims[0], SIZE))
        return cls(fresh, pulled, scores, like.new_empty(heads, rows, dtype=torch.float32))


def delta_chunk_reference(
    mixed: Tensor, gates: DeltaGates, state: Tensor, work: ChunkWorkspace, out: Tensor, new_state: Tensor
) -> None:
    """mixed [T, C]: unit key and query of each key head, [Hk, 2, Dk], then all values [Hv, Dv]; state, new_state
    [Hk, Dk, r * Dv] float32 -> out [T, Hv, Dv]. `work` is not used here."""
    (tokens, value_heads, value_dim), (key_heads, key_dim, _) = out.shape, state.shape
    pairs, value = mixed.float().split([2 * key_heads * key_dim, value_heads * value_dim], dim=-1)
    key, query = pairs.view(tokens, key_heads, 2, key_dim).unbind(2)
    beta, decay = (part[:, :value_heads] for part in gates.logits.float().chunk(2, dim=-1))
    log_decay = F.softplus(decay + gates.dt_bias) * gates.rate
    mixed_out, end = gated_delta.chunk(query, key, value.view(out.shape), log_decay, beta.sigmoid(), state)
    out.copy_(mixed_out)
    new_state.copy_(end)


def delta_chunk(
    mixed: Tensor, gates: DeltaGates, state: Tensor, work: ChunkWorkspace, out: Tensor, new_state: Tensor
) -> None:
    """See `delta_chunk_reference`."""
    (tokens, value_heads, value_dim), (key_heads, key_dim, _) = out.shape, state.shape
    chunks = triton.cdiv(tokens, SIZE)
    block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    shape = {"KEY_HEADS": key_heads, "RATIO": value_heads // key_heads, "DK": key_dim, "DV": value_dim,
             "BLOCK_K": block_k, "CHUNK": SIZE, "INTERPRETED": INTERPRET}  # fmt: skip
    narrow = mixed.element_size() == 2
    _within_kernel[(chunks, value_heads)](
        mixed, gates.logits, gates.rate, gates.dt_bias, work.fresh, work.pulled, work.scores, work.total, tokens,
        gates.logits.stride(0), LANES=gates.logits.shape[1] // 2, BLOCK_V=block_v,
        LEVELS=SIZE.bit_length() - 1, PRECISION="tf32" if narrow else "ieee", num_warps=4, num_stages=1, **shape,
    )  # fmt: skip
    block_v = min(block_v, MAX_COLUMNS)
    _across_kernel[(triton.cdiv(value_dim, block_v), value_heads)](
        mixed, state, work.fresh, work.pulled, work.scores, work.total, out, new_state, tokens, chunks,
        VALUE_HEADS=value_heads, BLOCK_V=block_v, num_warps=4, num_stages=3 if narrow else 1, **shape,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _within_kernel(
    mixed, logits, rate, dt_bias, fresh, pulled, scores, totals, tokens, logits_stride,
    LANES: tl.constexpr, KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    row = (tl.program_id(0) * CHUNK + i).to(tl.int64)
    valid = row < tokens
    gate = logits + row * logits_stride + head
    beta = tl.where(valid, sigmoid(tl.load(gate, mask=valid, other=0.0).to(tl.float32)), 0.0)
    decay = tl.load(gate + LANES, mask=valid, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.maximum(decay, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(decay)))
    total = tl.cumsum(tl.where(valid, tl.load(rate + head) * softplus, 0.0), 0)

    wide = KEY_HEADS * 2 * DK + KEY_HEADS * RATIO * DV
    source = mixed + row[:, None] * wide
    k_column, v_column = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)[None, :]
    in_k, in_v = valid[:, None] & (k_column < DK), valid[:, None] & (v_column < DV)
    key_at = source + (head // RATIO) * (2 * DK) + k_column
    key = tl.load(key_at, mask=in_k, other=0.0)
    query = tl.load(key_at + DK, mask=in_k, other=0.0)
    value = tl.load(source + KEY_HEADS * 2 * DK + head * DV + v_column, mask=in_v, other=0.0)

    rows, columns = i[:, None], i[None, :]
    between = tl.exp(tl.where(rows >= columns, total[:, None] - total[None, :], float("-inf")))
    system = beta[:, None] * product(key, tl.trans(key), INTERPRETED) * between
    score = product(query, tl.trans(key), INTERPRETED) * between
    inverse = tl.where(rows == columns, 1.0, 0.0)
    inverse -= tl.where((rows >> 1 == columns >> 1) & (rows > columns), system, 0.0)
    for level in range(1, LEVELS):  # blocks of 2^level become pairs
        joins = (rows >> (level + 1) == columns >> (level + 1)) & (rows >> level > columns >> level)
        corner = tl.dot(tl.where(joins, system, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, corner, input_precision=PRECISION)

    at = head.to(tl.int64) * (tl.num_programs(0) * CHUNK) + row
    inner = (inverse * beta[None, :]).to(key.dtype)
    tl.store(fresh + at[:, None] * DV + v_column, product(inner, value, INTERPRETED).to(fresh.dtype.element_ty),
             mask=v_column < DV)  # fmt: skip
    inner = (inverse * (beta * tl.exp(total))[None, :]).to(key.dtype)
    tl.store(pulled + at[:, None] * DK + k_column, product(inner, key, INTERPRETED).to(pulled.dtype.element_ty),
             mask=k_column < DK)  # fmt: skip
    tl.store(scores + at[:, None] * CHUNK + columns, score.to(scores.dtype.element_ty))
    tl.store(totals + at, total)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _across_kernel(
    mixed, state, fresh, pulled, scores, totals, out, new_state, tokens, chunks,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    k_row, k_column = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_K)[None, :]
    v_column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    place = ((head // RATIO) * DK + k_row) * (RATIO * DV) + (head % RATIO) * DV + v_column
    in_state = (k_row < DK) & (v_column < DV)
    current = tl.load(state + place, mask=in_state, other=0.0)

    wide = KEY_HEADS * 2 * DK + VALUE_HEADS * DV
    first = head.to(tl.int64) * chunks * CHUNK
    for c in range(chunks):
        row = (c * CHUNK + i).to(tl.int64)
        valid = (row < tokens)[:, None]
        key_at = mixed + row[:, None] * wide + (head // RATIO) * (2 * DK) + k_column
        key = tl.load(key_at, mask=valid & (k_column < DK), other=0.0)
        query = tl.load(key_at + DK, mask=valid & (k_column < DK), other=0.0)
        at = (first + row)[:, None]
        pull = tl.load(pulled + at * DK + k_column, mask=k_column < DK, other=0.0)
        new = tl.load(fresh + at * DV + v_column, mask=v_column < DV, other=0.0)
        score = tl.load(scores + at * CHUNK + tl.arange(0, CHUNK)[None, :])
        total = tl.load(totals + first + row)
        last = tl.load(totals + first + c * CHUNK + CHUNK - 1)

        narrow = current.to(key.dtype)
        delta = new.to(tl.float32) - product(pull, narrow, INTERPRETED)
        read = product(query, narrow, INTERPRETED) * tl.exp(total)[:, None]
        read += product(score, delta.to(key.dtype), INTERPRETED)
        kept = (delta * tl.exp(last - total)[:, None]).to(key.dtype)
        current = current * tl.exp(last) + product(tl.trans(key), kept, INTERPRETED)
        target = out + row[:, None] * (VALUE_HEADS * DV) + head * DV + v_column
        tl.store(target, read.to(out.dtype.element_ty), mask=valid & (v_column < DV))
    tl.store(new_state + place, current, mask=in_state)
