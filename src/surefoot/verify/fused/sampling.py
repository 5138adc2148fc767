"""The token of every row of logits, chosen on the device: greedy, coupled (Gumbel-max), or drawn by a drafter.

The rules are those of `surefoot.verify` (distribution, philox, acceptance), which the references call. Each request's
parameters lie in device tensors by slot, so one captured graph serves requests of every kind; a program that finds its
work switched off ends at once.

Filters need the row's border: the smallest processed logit that stays, and the last id that stays among its equals. It
is found by bisection over the logits' bit patterns, where each step moves on to the nearest pattern that occurs. Masses
are summed in integers, so no order of summation and no neighbour has a say in it. Only groups of tokens whose peak
reaches the border's lower bound are read: of top_k = 20 about 20 groups of 64 tokens, whatever the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from surefoot.kernels.fused.launch import INTERPRET, launch_options, let_next_start, wait_for_inputs
from surefoot.sampling import SamplingParams
from surefoot.verify.acceptance import choose as choose_on_host
from surefoot.verify.acceptance import draft_token
from surefoot.verify.distribution import process_unchecked
from surefoot.verify.philox import Purpose

_BLOCK = 4096  # tokens of a row handled by one program
_GROUP = 64  # tokens that share one peak
_GROUPS = 64  # groups that the search for a border reads at a time; of integers, so it matters to no result
_PEAKS = 4096  # peaks that it reads at a time
_OFF = 2**62  # a nucleus that holds everything
_WHOLE = tl.constexpr(2**40)  # probability 1 as an integer
_SLACK = tl.constexpr(2**21)  # more than rounding can take from a distribution's integer mass
_TINY = torch.finfo(torch.float32).tiny
_HUGE = torch.finfo(torch.float32).max
_LOWEST = tl.constexpr(-(2**31))  # below the key of every number
_NOTHING = tl.constexpr(-(2**63))  # below every key with its id
_HIGHEST = tl.constexpr(2**31 - 1)
_COUPLING = tl.constexpr(int(Purpose.COUPLING))
_DRAFT = tl.constexpr(int(Purpose.DRAFT))


def block_of(vocab_size: int) -> int:
    """Tokens of a row handled by one program."""
    return max(_GROUP, min(_BLOCK, int(triton.next_power_of_2(vocab_size))))


@dataclass(frozen=True)
class Requests:
    """What each slot's request asked for, in the form the kernels read it; `set` alone writes it."""

    temperature: Tensor
    """float32 [S]; 0 is greedy."""
    top_k: Tensor
    """int32 [S]; 0 is off."""
    nucleus: Tensor
    """int64 [S], top_p in units of 2^-40, rounded up; 2^62 is off."""
    floor: Tensor
    """float32 [S], log(min_p); -inf is off."""
    seed: Tensor
    """int64 [S], the seed's 64 bits."""
    rejection: Tensor
    """int32 [S]: 1 for the p/q rule at temperature > 0, else 0."""
    limit: Tensor
    """int32 [S]: tokens of prompt and output at which the sequence is finished."""
    params: list[SamplingParams]
    """The same on the host, by slot. Only the references read it."""

    @staticmethod
    def empty(slots: int, device: torch.device) -> Requests:
        """Greedy requests that are finished already."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((slots,), value, dtype=dtype, device=device)

        return Requests(
            temperature=full(0.0, torch.float32),
            top_k=full(0, torch.int32),
            nucleus=full(_OFF, torch.int64),
            floor=full(-math.inf, torch.float32),
            seed=full(0, torch.int64),
            rejection=full(0, torch.int32),
            limit=full(0, torch.int32),
            params=[SamplingParams()] * slots,
        )

    def set(self, slot: int, params: SamplingParams, limit: int) -> None:
        """Put a request into a slot, to end at `limit` tokens in all."""
        # What float32 cannot hold would turn into 0, the mark of greedy decoding, or into infinity.
        self.temperature[slot] = 0.0 if params.greedy else min(max(params.temperature, _TINY), _HUGE)
        self.top_k[slot] = min(params.top_k, 2**31 - 1)
        self.nucleus[slot] = max(1, math.ceil(params.top_p * 2**40)) if params.top_p < 1.0 else _OFF
        self.floor[slot] = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        self.seed[slot] = params.seed - 2**64 if params.seed >= 2**63 else params.seed
        self.rejection[slot] = int(params.acceptance == "rejection" and not params.greedy)
        self.limit[slot] = limit
        self.params[slot] = params


@dataclass(frozen=True)
class Workspace:
    """What the kernels of one choice hand to one another, for R rows of V logits. Valid until the next choice."""

    largest: Tensor
    """int64 [R, blocks]: key of a block's largest logit above, its first id (from the top) below."""
    best: Tensor
    """int64 [R, blocks]: the same of processed logit plus noise."""
    mass: Tensor
    """float64 [R, blocks]: sum of exp(processed logit)."""
    peaks: Tensor
    """int32 [R, groups]: key of a group's largest logit."""
    groups: Tensor
    """int32 [R, groups]: the groups in which a border is sought."""
    border: Tensor
    """int32 [R, 2]: key of the smallest processed logit that stays, and the last id that stays among its equals."""

    @staticmethod
    def empty(rows: int, vocab_size: int, device: torch.device) -> Workspace:
        """For up to `rows` rows of `vocab_size` logits."""

        def full(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=device)

        block = block_of(vocab_size)
        blocks = triton.cdiv(vocab_size, block)
        groups = blocks * (block // _GROUP)
        return Workspace(
            largest=full(blocks, torch.int64),
            best=full(blocks, torch.int64),
            mass=full(blocks, torch.float64),
            peaks=full(groups, torch.int32),
            groups=full(groups, torch.int32),
            border=full(2, torch.int32),
        )


def choose_reference(
    logits: Tensor,
    requests: Requests,
    slots: Tensor,
    position: Tensor,
    workspace: Workspace,
    out: Tensor,
    bad: Tensor,
    *,
    window: int,
    offset: int = 0,
) -> None:
    """`choose` by `surefoot.verify.choose`, row after row."""
    for row, slot, place in _rows(slots, position, window, offset, len(logits)):
        out[row], bad[row] = -1, 0
        if slot < 0:
            continue
        bad[row] = int(not bool(logits[row].amax().isfinite()))
        if not int(requests.rejection[slot]):
            out[row] = 0 if bad[row] else choose_on_host(logits[row][None], requests.params[slot], place)[0]


def choose(
    logits: Tensor,
    requests: Requests,
    slots: Tensor,
    position: Tensor,
    workspace: Workspace,
    out: Tensor,
    bad: Tensor,
    *,
    window: int,
    offset: int = 0,
) -> None:
    """The target's own token of every row. Source: `surefoot.verify.choose` (arXiv 2408.07978, section 4).

    `logits` float32 [R, V] contiguous rows, R = B * window; `slots` int32 [B], -1 for a sequence that takes no part;
    `position` int32 [S], index of the last token the window's first row has read: row i of the window decides the
    token at index `position[slot] + 1 + offset + i`. `out` int32 [R] (any stride): the token, or -1 for rows that take
    no part and rows under the p/q rule, which `accept` judges; `bad` int32 [R]: 1 if the row's largest logit is not a
    finite number, in which case its token means nothing. A drafter that couples uses it, too, on logits of its own.
    """
    measure(logits, requests, slots, position, workspace, window=window, offset=offset)
    _conclude(logits, requests, slots, position, workspace, out, bad, window, offset, draw=False)


def draw_draft_reference(
    logits: Tensor,
    requests: Requests,
    slots: Tensor,
    position: Tensor,
    workspace: Workspace,
    out: Tensor,
    bad: Tensor,
    *,
    window: int = 1,
    offset: int = 0,
) -> None:
    """`draw_draft` by `surefoot.verify.draft_token`, row after row."""
    for row, slot, place in _rows(slots, position, window, offset, len(logits)):
        out[row], bad[row] = -1, 0
        if slot >= 0:
            start = int(position[slot]) + 1
            bad[row] = int(not bool(logits[row].amax().isfinite()))
            out[row] = 0 if bad[row] else draft_token(logits[row], requests.params[slot], place, start)[0]


def draw_draft(
    logits: Tensor,
    requests: Requests,
    slots: Tensor,
    position: Tensor,
    workspace: Workspace,
    out: Tensor,
    bad: Tensor,
    *,
    window: int = 1,
    offset: int = 0,
) -> None:
    """A drafter's token of every row: `choose`, but under the p/q rule a draw from the row's own distribution.

    Arguments as in `choose`. Source: `surefoot.verify.draft_token`; the draw is keyed by (DRAFT, the token's index,
    the draft's first index `position[slot] + 1`). Hand the same logits to `accept`.
    """
    measure(logits, requests, slots, position, workspace, window=window, offset=offset)
    _conclude(logits, requests, slots, position, workspace, out, bad, window, offset, draw=True)


def measure(
    logits: Tensor,
    requests: Requests,
    slots: Tensor,
    position: Tensor,
    workspace: Workspace,
    *,
    window: int,
    offset: int = 0,
    only_rejection: bool = False,
) -> None:
    """Fill the workspace: largest logits, borders, and either best sums with noise or masses (p/q rule).

    `only_rejection` leaves out the rows that need no probabilities.
    """
    rows, vocab_size = logits.shape
    blocks = triton.cdiv(vocab_size, block_of(vocab_size))
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert rows == len(slots) * window
    assert rows <= len(workspace.largest)
    assert blocks == workspace.largest.shape[1]
    options = launch_options(logits.device)
    groups = workspace.peaks.shape[1]
    _largest_kernel[(blocks, rows)](
        logits,
        logits.stride(0),
        slots,
        requests.rejection,
        workspace.largest,
        workspace.peaks,
        vocab_size,
        blocks,
        groups,
        window,
        BLOCK=block_of(vocab_size),
        GROUP=_GROUP,
        ONLY_REJECTION=only_rejection,
        num_warps=8,
        **options,
    )
    _border_kernel[(rows,)](
        logits,
        logits.stride(0),
        slots,
        requests.temperature,
        requests.top_k,
        requests.nucleus,
        requests.rejection,
        workspace.largest,
        workspace.peaks,
        workspace.groups,
        workspace.border,
        vocab_size,
        blocks,
        groups,
        window,
        BLOCKS=triton.next_power_of_2(blocks),
        GROUP=_GROUP,
        GROUPS=min(_GROUPS, triton.next_power_of_2(triton.cdiv(vocab_size, _GROUP))),
        PEAKS=min(_PEAKS, triton.next_power_of_2(groups)),
        ONLY_REJECTION=only_rejection,
        num_warps=8,
        **options,
    )
    _best_kernel[(blocks, rows)](
        logits,
        logits.stride(0),
        slots,
        position,
        requests.temperature,
        requests.floor,
        requests.seed,
        requests.rejection,
        workspace.largest,
        workspace.border,
        workspace.best,
        workspace.mass,
        vocab_size,
        blocks,
        window,
        offset,
        BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=block_of(vocab_size),
        ONLY_REJECTION=only_rejection,
        INTERPRETED=INTERPRET,
        num_warps=8,
        **options,
    )


def processed_reference(logits: Tensor, requests: Requests, slot: int) -> Tensor:
    """Processed logits of rows [n, V] that belong to one slot, as `surefoot.verify.process` gives them."""
    return process_unchecked(logits, requests.params[slot])[0]


def _conclude(
    logits: Tensor,
    requests: Requests,
    slots: Tensor,
    position: Tensor,
    workspace: Workspace,
    out: Tensor,
    bad: Tensor,
    window: int,
    offset: int,
    draw: bool,
) -> None:
    rows, vocab_size = logits.shape
    blocks = workspace.largest.shape[1]
    assert out.dtype == bad.dtype == torch.int32
    _conclude_kernel[(rows,)](
        logits,
        logits.stride(0),
        slots,
        position,
        requests.temperature,
        requests.floor,
        requests.seed,
        requests.rejection,
        workspace.largest,
        workspace.border,
        workspace.best,
        workspace.mass,
        out,
        out.stride(0),
        bad,
        vocab_size,
        blocks,
        window,
        offset,
        BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=block_of(vocab_size),
        DRAW=draw,
        num_warps=8,
        **launch_options(logits.device),
    )


def _rows(slots: Tensor, position: Tensor, window: int, offset: int, rows: int) -> Seq[tuple[int, int, int]]:
    """(row, slot, index of the token it decides) of every row."""
    owners = slots.tolist()
    places = position.tolist()
    return [
        (row, owners[row // window], places[owners[row // window]] + 1 + offset + row % window) for row in range(rows)
    ]


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
    packed = tl.load(largest_ptr + row * blocks + block, mask=block < blocks, other=_NOTHING)
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
def _packed(key, token):
    """Largest key and its first token in one number: the maximum of such numbers is the first largest of all."""
    peak = tl.max(key, axis=0)
    first = tl.min(tl.where(key == peak, token, 0x7FFFFFFF), axis=0)
    return (peak.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64)


@triton.jit
def _gumbel(seed, position, first, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """`surefoot.verify.gumbel` of the tokens from `first`, a multiple of 4, on."""
    counter = first // 4 + tl.arange(0, BLOCK // 4)
    zero = tl.zeros_like(counter)
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position, zero + _COUPLING, zero)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    x = word.to(tl.float32) * (-1.0 / 4294967296.0) - 1.0 / 8589934592.0
    x = tl.maximum(x, 1.0 / 16777216.0 - 1.0)
    if INTERPRETED:  # it has no log1p; the quotient undoes what rounding 1 + x has changed
        rounded = 1.0 + x
        moved = rounded - 1.0
        log1p = tl.where(moved == 0.0, x, tl.log(rounded) * (x / tl.where(moved == 0.0, 1.0, moved)))
    else:
        log1p = libdevice.log1p(x)
    return -tl.log(-log1p)


@triton.jit
def _largest_kernel(
    logits_ptr,
    logits_stride,
    slots_ptr,
    rejection_ptr,
    largest_ptr,
    peaks_ptr,
    vocab_size,
    blocks,
    groups,
    window,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ONLY_REJECTION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    block, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row // window)
    if slot < 0:
        return
    if ONLY_REJECTION:  # noqa: SIM102 (a compile-time condition stands alone)
        if tl.load(rejection_ptr + slot) == 0:
            return
    PER: tl.constexpr = BLOCK // GROUP
    group = tl.arange(0, PER)
    token = block * BLOCK + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
    key = key_of(x)
    peaks = tl.max(key, axis=1)
    tl.store(peaks_ptr + row * groups + block * PER + group, peaks)
    peak = tl.max(peaks, axis=0)
    first = tl.min(tl.min(tl.where(key == peak, token, 0x7FFFFFFF), axis=1), axis=0)
    packed = (peak.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64)
    tl.store(largest_ptr + row * blocks + block, packed)


@triton.jit
def _best_kernel(
    logits_ptr,
    logits_stride,
    slots_ptr,
    position_ptr,
    temperature_ptr,
    floor_ptr,
    seed_ptr,
    rejection_ptr,
    largest_ptr,
    border_ptr,
    best_ptr,
    mass_ptr,
    vocab_size,
    blocks,
    window,
    offset,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONLY_REJECTION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    block, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row // window)
    if slot < 0:
        return
    temperature = tl.load(temperature_ptr + slot)
    if temperature == 0.0:
        return
    rejection = tl.load(rejection_ptr + slot)
    if ONLY_REJECTION:  # noqa: SIM102 (a compile-time condition stands alone)
        if rejection == 0:
            return
    key, _ = largest_of(largest_ptr, row, blocks, BLOCKS)
    largest = number_of(key)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    floor = tl.load(floor_ptr + slot)
    token = block * BLOCK + tl.arange(0, BLOCK)
    if rejection != 0:
        weights = weights_of(row_ptr, border_ptr + row * 2, token, largest, temperature, floor, vocab_size)
        tl.store(mass_ptr + row * blocks + block, tl.sum(weights, axis=0))
    else:
        x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
        border, last = tl.load(border_ptr + row * 2), tl.load(border_ptr + row * 2 + 1)
        processed = processed_of(x, token, largest, temperature, border, last, floor)
        place = tl.load(position_ptr + slot) + 1 + offset + row % window
        noise = _gumbel(tl.load(seed_ptr + slot), place, block * BLOCK, BLOCK, INTERPRETED)
        tl.store(best_ptr + row * blocks + block, _packed(key_of(processed + noise), token))


@triton.jit
def _conclude_kernel(
    logits_ptr,
    logits_stride,
    slots_ptr,
    position_ptr,
    temperature_ptr,
    floor_ptr,
    seed_ptr,
    rejection_ptr,
    largest_ptr,
    border_ptr,
    best_ptr,
    mass_ptr,
    out_ptr,
    out_stride,
    bad_ptr,
    vocab_size,
    blocks,
    window,
    offset,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row // window)
    if slot < 0:
        tl.store(out_ptr + row * out_stride, -1)
        tl.store(bad_ptr + row, 0)
        return
    key, token = largest_of(largest_ptr, row, blocks, BLOCKS)
    infinite = (key >= 0x7F800000) | (key == -2139095041)  # +inf, NaN; -inf
    tl.store(bad_ptr + row, infinite.to(tl.int32))
    temperature = tl.load(temperature_ptr + slot)
    rejection = tl.load(rejection_ptr + slot)
    if temperature > 0.0:
        if rejection == 0:
            _, token = largest_of(best_ptr, row, blocks, BLOCKS)
        else:
            if DRAW:
                index = tl.arange(0, BLOCKS)
                sums = tl.load(mass_ptr + row * blocks + index, mask=index < blocks, other=0.0)
                start = tl.load(position_ptr + slot) + 1
                uniform = uniform_of(tl.load(seed_ptr + slot), start + offset + row % window, _DRAFT, start)
                block, before, aim = find_block(sums, uniform, BLOCKS)
                tokens = block * BLOCK + tl.arange(0, BLOCK)
                row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
                floor = tl.load(floor_ptr + slot)
                weights = weights_of(
                    row_ptr, border_ptr + row * 2, tokens, number_of(key), temperature, floor, vocab_size
                )
                token = find_token(weights, tokens, before, aim)
            else:
                token = tl.full((), -1, tl.int32)
    if infinite:
        token = tl.full((), 0, tl.int32)
    tl.store(out_ptr + row * out_stride, token)


@triton.jit
def _read_groups(
    row_ptr, groups_ptr, start, count, largest, temperature, vocab_size, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """Keys, processed logits before filters, and ids of the listed groups from `start` on: [groups, GROUP] each.

    Places without a token have the lowest key, which no token has.
    """
    place = start + tl.arange(0, GROUPS)
    group = tl.load(groups_ptr + place, mask=place < count, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = (place < count)[:, None] & (token < vocab_size)
    x = tl.load(row_ptr + token, mask=there, other=float("-inf"))
    scaled = scaled_of(x, largest, temperature)
    return tl.where(there, key_of(scaled), _LOWEST), scaled, token


@triton.jit
def _exp_units(scaled):
    """exp in units of 2^-40."""
    return (tl.exp(scaled) * 1099511627776.0).to(tl.int64)


@triton.jit
def _mass_units(scaled, total):
    """The softmax in units of 2^-40, rounded down, for a sum of exponentials `total`."""
    return (tl.div_rn(tl.exp(scaled), total + tl.zeros_like(scaled)) * 1099511627776.0).to(tl.int64)


@triton.jit
def _last_kept(
    row_ptr,
    groups_ptr,
    count,
    largest,
    temperature,
    vocab_size,
    border,
    room,
    steps,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The id at which the `room`-th token whose key is `border` stands."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), 0, tl.int32) + vocab_size - 1
    for _ in range(steps):
        middle = low + (high - low) // 2
        found = tl.full((), 0, tl.int32)
        for start in range(0, count, GROUPS):
            key, _scaled, token = _read_groups(
                row_ptr, groups_ptr, start, count, largest, temperature, vocab_size, GROUP, GROUPS
            )
            found += tl.sum(((key == border) & (token <= middle)).to(tl.int32))
        enough = (found >= room) & (middle > low)
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.maximum(middle, low))
    return high


@triton.jit
def _border_kernel(
    logits_ptr,
    logits_stride,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    nucleus_ptr,
    rejection_ptr,
    largest_ptr,
    peaks_ptr,
    groups_ptr,
    border_ptr,
    vocab_size,
    blocks,
    groups,
    window,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PEAKS: tl.constexpr,
    ONLY_REJECTION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row // window)
    if slot < 0:
        return
    temperature = tl.load(temperature_ptr + slot)
    if temperature == 0.0:
        return
    if ONLY_REJECTION:  # noqa: SIM102 (a compile-time condition stands alone)
        if tl.load(rejection_ptr + slot) == 0:
            return
    tl.store(border_ptr + row * 2, _LOWEST)
    tl.store(border_ptr + row * 2 + 1, vocab_size)
    top_k = tl.load(top_k_ptr + slot)
    nucleus = tl.load(nucleus_ptr + slot)
    by_count = (top_k > 0) & (top_k < vocab_size)
    by_mass = nucleus <= _WHOLE
    if (by_count | by_mass) == 0:
        return
    best_key, _ = largest_of(largest_ptr, row, blocks, BLOCKS)
    if (best_key >= 0x7F800000) | (best_key == -2139095041):
        return  # nothing to filter, and the row is refused
    largest = number_of(best_key)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    peaks_ptr += row * groups
    groups_ptr += row * groups
    steps = tl.full((), 0, tl.int32)  # halvings of a range of ids
    while (1 << steps) <= vocab_size:
        steps += 1

    # A lower bound of the border: with top_k the k-th largest peak, since k tokens reach it; without, the mass below
    # which all tokens together weigh less than what the nucleus leaves out.
    bound = tl.full((), -2139095042, tl.int32)  # just below the key of -inf
    total = tl.full((), 1.0, tl.float32)
    least = tl.full((), 0, tl.int64)
    if by_count:
        if top_k <= tl.cdiv(vocab_size, GROUP):
            high = tl.full((), 1, tl.int32)
            while high - bound > 1:
                middle = bound + (high - bound) // 2
                found = tl.full((), 0, tl.int32)
                up = tl.full((), _HIGHEST, tl.int32)
                down = tl.full((), _LOWEST, tl.int32)
                for start in range(0, groups, PEAKS):
                    place = start + tl.arange(0, PEAKS)
                    peak = tl.load(peaks_ptr + place, mask=place < groups, other=-2139095041)
                    key = key_of(scaled_of(number_of(peak), largest, temperature))
                    key = tl.where(place * GROUP < vocab_size, key, _LOWEST)
                    found += tl.sum((key >= middle).to(tl.int32), axis=0)
                    up = tl.minimum(up, tl.min(tl.where(key >= middle, key, _HIGHEST), axis=0))
                    down = tl.maximum(down, tl.max(tl.where(key >= middle, _LOWEST, key), axis=0))
                bound = tl.where(found >= top_k, up, bound)
                high = tl.where(found >= top_k, high, tl.maximum(down, bound) + 1)
    else:
        units = tl.full((), 0, tl.int64)
        for start in range(0, vocab_size, PEAKS):
            token = start + tl.arange(0, PEAKS)
            x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
            units += tl.sum(_exp_units(scaled_of(x, largest, temperature)), axis=0)
        total = units.to(tl.float32) * (1.0 / 1099511627776.0)
        least = tl.maximum((_WHOLE - _SLACK) - nucleus - vocab_size, 0) // vocab_size
    count = tl.full((), 0, tl.int32)
    for start in range(0, groups, PEAKS):
        place = start + tl.arange(0, PEAKS)
        peak = tl.load(peaks_ptr + place, mask=place < groups, other=-2139095041)
        scaled = scaled_of(number_of(peak), largest, temperature)
        reaches = (key_of(scaled) >= bound) & (_mass_units(scaled, total) >= least)
        reaches = (reaches & (place * GROUP < vocab_size)).to(tl.int32)
        tl.store(groups_ptr + count + tl.cumsum(reaches, axis=0) - 1, place, mask=reaches != 0)
        count += tl.sum(reaches, axis=0)
    tl.debug_barrier()  # the list is read by other threads than wrote it

    # top_k: the largest key that at least k tokens reach, and how many of those on it fit in.
    border = tl.full((), _LOWEST, tl.int32)
    last = tl.full((), 0, tl.int32) + vocab_size
    room = tl.full((), 0, tl.int32)
    if by_count:
        border = tl.full((), -2139095042, tl.int32)
        high = tl.full((), 1, tl.int32)
        while high - border > 1:
            middle = border + (high - border) // 2
            found = tl.full((), 0, tl.int32)
            up = tl.full((), _HIGHEST, tl.int32)
            down = tl.full((), _LOWEST, tl.int32)
            for start in range(0, count, GROUPS):
                key, _scaled, _token = _read_groups(
                    row_ptr, groups_ptr, start, count, largest, temperature, vocab_size, GROUP, GROUPS
                )
                found += tl.sum((key >= middle).to(tl.int32))
                up = tl.minimum(up, tl.min(tl.where(key >= middle, key, _HIGHEST)))
                down = tl.maximum(down, tl.max(tl.where(key >= middle, _LOWEST, key)))
            border = tl.where(found >= top_k, up, border)
            high = tl.where(found >= top_k, high, tl.maximum(down, border) + 1)
        above = tl.full((), 0, tl.int32)
        ties = tl.full((), 0, tl.int32)
        for start in range(0, count, GROUPS):
            key, _scaled, _token = _read_groups(
                row_ptr, groups_ptr, start, count, largest, temperature, vocab_size, GROUP, GROUPS
            )
            above += tl.sum((key > border).to(tl.int32))
            ties += tl.sum((key == border).to(tl.int32))
        room = top_k - above
        if room < ties:
            last = _last_kept(
                row_ptr, groups_ptr, count, largest, temperature, vocab_size, border, room, steps, GROUP, GROUPS
            )

    # top_p over what top_k has left: the smallest key of which the tokens above it weigh less than the nucleus.
    if by_mass:
        if by_count:
            units = tl.full((), 0, tl.int64)
            for start in range(0, count, GROUPS):
                key, scaled, token = _read_groups(
                    row_ptr, groups_ptr, start, count, largest, temperature, vocab_size, GROUP, GROUPS
                )
                inside = (key > border) | ((key == border) & (token <= last))
                units += tl.sum(tl.where(inside, _exp_units(scaled), 0))
            total = units.to(tl.float32) * (1.0 / 1099511627776.0)
        low = tl.full((), -2139095042, tl.int32)
        high = tl.full((), 0, tl.int32)  # nothing lies above the largest
        while high - low > 1:
            middle = low + (high - low) // 2
            weight = tl.full((), 0, tl.int64)
            up = tl.full((), _HIGHEST, tl.int32)
            down = tl.full((), _LOWEST, tl.int32)
            for start in range(0, count, GROUPS):
                key, scaled, token = _read_groups(
                    row_ptr, groups_ptr, start, count, largest, temperature, vocab_size, GROUP, GROUPS
                )
                inside = (key > border) | ((key == border) & (token <= last))
                heavier = inside & (key > middle)
                weight += tl.sum(tl.where(heavier, _mass_units(scaled, total), 0))
                up = tl.minimum(up, tl.min(tl.where(heavier, key, _HIGHEST)))
                down = tl.maximum(down, tl.max(tl.where(inside & (key <= middle), key, _LOWEST)))
            high = tl.where(weight < nucleus, tl.maximum(down, low + 1), high)
            low = tl.where(weight < nucleus, low, up - 1)
        if high >= border:
            weight = tl.full((), 0, tl.int64)
            each = tl.full((), 1, tl.int64)
            ties = tl.full((), 0, tl.int32)
            for start in range(0, count, GROUPS):
                key, scaled, token = _read_groups(
                    row_ptr, groups_ptr, start, count, largest, temperature, vocab_size, GROUP, GROUPS
                )
                inside = (key > border) | ((key == border) & (token <= last))
                mass = _mass_units(scaled, total)
                weight += tl.sum(tl.where(inside & (key > high), mass, 0))
                ties += tl.sum((inside & (key == high)).to(tl.int32))
                each = tl.maximum(each, tl.max(tl.where(inside & (key == high), mass, 0)))
            if high > border:
                last = tl.full((), 0, tl.int32) + vocab_size
            border = high
            room = tl.minimum((nucleus - weight + each - 1) // each, ties.to(tl.int64)).to(tl.int32)
            if room < ties:
                last = _last_kept(
                    row_ptr, groups_ptr, count, largest, temperature, vocab_size, border, room, steps, GROUP, GROUPS
                )
    tl.store(border_ptr + row * 2, border)
    tl.store(border_ptr + row * 2 + 1, last)
