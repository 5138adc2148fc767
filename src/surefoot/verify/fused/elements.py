"""Functions that the sampling and acceptance kernels share: ordered keys of logits, processed logits, drawing."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))  # below the key of every number
NOTHING = tl.constexpr(-(2**63))  # below every key with its id
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def key_of(x):
    """Order-preserving int32 of float32 numbers: NaN on top, -0 equal to 0."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def number_of(key):
    """The float32 number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def largest_of(largest_ptr, row, blocks, BLOCKS: tl.constexpr):
    """Key and first id of a row's largest logit, from the blocks' own."""
    block = tl.arange(0, BLOCKS)
    packed = tl.load(largest_ptr + row * blocks + block, mask=block < blocks, other=NOTHING)
    packed = tl.max(packed, axis=0)
    return (packed >> 32).to(tl.int32), 0x7FFFFFFF - (packed & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def scaled_of(x, largest, temperature):
    """The largest logit moved to 0, over the temperature."""
    return tl.div_rn(x - largest, temperature + tl.zeros_like(x))


@triton.jit
def processed_of(x, token, largest, temperature, border, last, floor):
    """Processed logits of tokens of one row; -inf where a filter excludes them."""
    scaled = scaled_of(x, largest, temperature)
    key = key_of(scaled)
    keep = ((key > border) | ((key == border) & (token <= last))) & (scaled >= floor)
    return tl.where(keep, scaled, float("-inf"))


@triton.jit
def weights_of(row_ptr, border_ptr, token, largest, temperature, floor, vocab_size):
    """exp(processed logit) of tokens of one row, float64; 0 behind the vocabulary."""
    x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
    processed = processed_of(x, token, largest, temperature, tl.load(border_ptr), tl.load(border_ptr + 1), floor)
    return tl.exp(processed).to(tl.float64)


@triton.jit
def uniform_of(seed, position, PURPOSE: tl.constexpr, start):
    """`surefoot.verify.uniforms` of one position, float64."""
    counter = tl.zeros((1,), tl.int32)
    first, second, _, _ = tl.philox(seed, counter, counter + position, counter + PURPOSE, counter + start)
    number = (first.to(tl.int64) << 20) | (second.to(tl.int64) >> 12)
    return tl.sum((number.to(tl.float64) + 0.5) * (1.0 / 4503599627370496.0), axis=0)


@triton.jit
def find_block(sums, uniform, BLOCKS: tl.constexpr):
    """Where the cumulative sum of blocks [BLOCKS] float64 passes uniform * total: (block, sum before it, aim)."""
    block = tl.arange(0, BLOCKS)
    cumulative = tl.cumsum(sums, axis=0)
    aim = uniform * tl.sum(tl.where(block == BLOCKS - 1, cumulative, 0.0), axis=0)
    last = tl.max(tl.where(sums > 0, block, 0), axis=0)
    found = tl.min(tl.where((cumulative > aim) & (sums > 0), block, last), axis=0)
    return found, tl.sum(tl.where(block == found - 1, cumulative, 0.0), axis=0), aim


@triton.jit
def find_token(weights, token, before, aim):
    """The first token of positive weight at which the cumulative sum passes `aim`, else the last such token."""
    cumulative = before + tl.cumsum(weights, axis=0)
    last = tl.max(tl.where(weights > 0, token, 0), axis=0)
    return tl.min(tl.where((cumulative > aim) & (weights > 0), token, last), axis=0)


@triton.jit
def packed(key, token):
    """Largest key and its first token in one number: the maximum of such numbers is the first largest of all."""
    peak = tl.max(key, axis=0)
    first = tl.min(tl.where(key == peak, token, 0x7FFFFFFF), axis=0)
    return (peak.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64)
