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
from surefoot.verify.acceptance import choose as choose_on_host
from surefoot.verify.acceptance import draft_token
from surefoot.verify.distribution import process_unchecked
from surefoot.verify.fused.border import border_kernel
from surefoot.verify.fused.elements import (
    find_block,
    find_token,
    key_of,
    largest_of,
    number_of,
    packed,
    processed_of,
    uniform_of,
    weights_of,
)
from surefoot.verify.fused.requests import Requests
from surefoot.verify.philox import Purpose

_BLOCK = 4096  # tokens of a row handled by one program
_GROUP = 64  # tokens that share one peak
_GROUPS = 64  # groups that the search for a border reads at a time; of integers, so it matters to no result
_PEAKS = 4096  # peaks that it reads at a time
_COUPLING = tl.constexpr(int(Purpose.COUPLING))
_DRAFT = tl.constexpr(int(Purpose.DRAFT))


def block_of(vocab_size: int) -> int:
    """Tokens of a row handled by one program."""
    return max(_GROUP, min(_BLOCK, int(triton.next_power_of_2(vocab_size))))


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
            largest=full(blocks, torch.int64), best=full(blocks, torch.int64), mass=full(blocks, torch.float64),
            peaks=full(groups, torch.int32), groups=full(groups, torch.int32), border=full(2, torch.int32),
        )  # fmt: skip


def choose_reference(
    logits: Tensor, requests: Requests, slots: Tensor, position: Tensor, workspace: Workspace, out: Tensor,
    bad: Tensor, *, window: int, offset: int = 0,
) -> None:  # fmt: skip
    """`choose` by `surefoot.verify.choose`, row after row."""
    for row, slot, place in _rows(slots, position, window, offset, len(logits)):
        out[row], bad[row] = -1, 0
        if slot < 0:
            continue
        bad[row] = int(not bool(logits[row].amax().isfinite()))
        if not int(requests.rejection[slot]):
            out[row] = 0 if bad[row] else choose_on_host(logits[row][None], requests.params[slot], place)[0]


def choose(
    logits: Tensor, requests: Requests, slots: Tensor, position: Tensor, workspace: Workspace, out: Tensor,
    bad: Tensor, *, window: int, offset: int = 0,
) -> None:  # fmt: skip
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
    logits: Tensor, requests: Requests, slots: Tensor, position: Tensor, workspace: Workspace, out: Tensor,
    bad: Tensor, *, window: int = 1, offset: int = 0, ids: Tensor | None = None,
) -> None:  # fmt: skip
    """`draw_draft` by `surefoot.verify.draft_token`, row after row."""
    if ids is not None:
        whole = logits.new_full((len(logits), int(ids[-1]) + 1), -math.inf)
        logits = whole.index_copy_(1, ids, logits)
    for row, slot, place in _rows(slots, position, window, offset, len(logits)):
        out[row], bad[row] = -1, 0
        if slot >= 0:
            start = int(position[slot]) + 1
            bad[row] = int(not bool(logits[row].amax().isfinite()))
            first = 0 if ids is None else int(ids[0])
            out[row] = first if bad[row] else draft_token(logits[row], requests.params[slot], place, start)[0]


def draw_draft(
    logits: Tensor, requests: Requests, slots: Tensor, position: Tensor, workspace: Workspace, out: Tensor,
    bad: Tensor, *, window: int = 1, offset: int = 0, ids: Tensor | None = None,
) -> None:  # fmt: skip
    """A drafter's token of every row: `choose`, but under the p/q rule a draw from the row's own distribution.

    Arguments as in `choose`. Source: `surefoot.verify.draft_token`; the draw is keyed by (DRAFT, the token's index,
    the draft's first index `position[slot] + 1`). Hand the same logits to `accept`.

    With `ids` int64 [N], ascending, the logits [R, N] are those of these tokens and all others are impossible; noise
    and `out` are the tokens', and `accept` wants the logits in their places among V, the others at -inf.
    """
    measure(logits, requests, slots, position, workspace, window=window, offset=offset, ids=ids)
    _conclude(logits, requests, slots, position, workspace, out, bad, window, offset, draw=True, ids=ids)


def measure(
    logits: Tensor, requests: Requests, slots: Tensor, position: Tensor, workspace: Workspace, *, window: int,
    offset: int = 0, only_rejection: bool = False, ids: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill the workspace: largest logits, borders, and either best sums with noise or masses (p/q rule).

    `only_rejection` leaves out the rows that need no probabilities; `ids` as in `draw_draft`.
    """
    rows, vocab_size = logits.shape
    blocks = triton.cdiv(vocab_size, block_of(vocab_size))
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert rows == len(slots) * window
    assert rows <= len(workspace.largest)
    assert blocks == workspace.largest.shape[1]
    assert ids is None or ids.shape == (vocab_size,)
    options = launch_options(logits.device)
    groups = workspace.peaks.shape[1]
    _largest_kernel[(blocks, rows)](
        logits, logits.stride(0), slots, requests.rejection, workspace.largest, workspace.peaks, vocab_size, blocks,
        groups, window, BLOCK=block_of(vocab_size), GROUP=_GROUP, ONLY_REJECTION=only_rejection, num_warps=8,
        **options,
    )  # fmt: skip
    border_kernel[(rows,)](
        logits, logits.stride(0), slots, requests.temperature, requests.top_k, requests.nucleus, requests.rejection,
        workspace.largest, workspace.peaks, workspace.groups, workspace.border, vocab_size, blocks, groups, window,
        BLOCKS=triton.next_power_of_2(blocks), GROUP=_GROUP,
        GROUPS=min(_GROUPS, triton.next_power_of_2(triton.cdiv(vocab_size, _GROUP))),
        PEAKS=min(_PEAKS, triton.next_power_of_2(groups)), ONLY_REJECTION=only_rejection, num_warps=8, **options,
    )  # fmt: skip
    _best_kernel[(blocks, rows)](
        logits, logits.stride(0), slots, position, requests.temperature, requests.floor, requests.seed,
        requests.rejection, workspace.largest, workspace.border, workspace.best, workspace.mass,
        slots if ids is None else ids, vocab_size, blocks, window, offset, BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=block_of(vocab_size), IDS=ids is not None, ONLY_REJECTION=only_rejection, INTERPRETED=INTERPRET,
        num_warps=8, **options,
    )  # fmt: skip


def processed_reference(logits: Tensor, requests: Requests, slot: int) -> Tensor:
    """Processed logits of rows [n, V] that belong to one slot, as `surefoot.verify.process` gives them."""
    return process_unchecked(logits, requests.params[slot])[0]


def _conclude(
    logits: Tensor, requests: Requests, slots: Tensor, position: Tensor, workspace: Workspace, out: Tensor,
    bad: Tensor, window: int, offset: int, draw: bool, ids: Tensor | None = None,
) -> None:  # fmt: skip
    rows, vocab_size = logits.shape
    blocks = workspace.largest.shape[1]
    assert out.dtype == bad.dtype == torch.int32
    _conclude_kernel[(rows,)](
        logits, logits.stride(0), slots, position, requests.temperature, requests.floor, requests.seed,
        requests.rejection, workspace.largest, workspace.border, workspace.best, workspace.mass, out, out.stride(0),
        bad, slots if ids is None else ids, vocab_size, blocks, window, offset,
        BLOCKS=triton.next_power_of_2(blocks), BLOCK=block_of(vocab_size), DRAW=draw, IDS=ids is not None,
        num_warps=8, **launch_options(logits.device),
    )  # fmt: skip


def _rows(slots: Tensor, position: Tensor, window: int, offset: int, rows: int) -> Seq[tuple[int, int, int]]:
    """(row, slot, index of the token it decides) of every row."""
    owners = slots.tolist()
    places = position.tolist()
    return [
        (row, owners[row // window], places[owners[row // window]] + 1 + offset + row % window) for row in range(rows)
    ]


@triton.jit
def _gumbel(seed, position, first, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """`surefoot.verify.gumbel` of the tokens from `first`, a multiple of 4, on."""
    counter = first // 4 + tl.arange(0, BLOCK // 4)
    zero = tl.zeros_like(counter)
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position, zero + _COUPLING, zero)
    return _noise_of(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)), INTERPRETED)


@triton.jit
def _gumbel_at(seed, position, token, INTERPRETED: tl.constexpr):
    """The same of any tokens."""
    zero = tl.zeros_like(token)
    w0, w1, w2, w3 = tl.philox(seed, token // 4, zero + position, zero + _COUPLING, zero)
    place = token % 4
    return _noise_of(tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3)), INTERPRETED)


@triton.jit
def _noise_of(word, INTERPRETED: tl.constexpr):
    """Gumbel noise from 32 random bits."""
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
    logits_ptr, logits_stride, slots_ptr, rejection_ptr, largest_ptr, peaks_ptr, vocab_size, blocks, groups, window,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ONLY_REJECTION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
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
    logits_ptr, logits_stride, slots_ptr, position_ptr, temperature_ptr, floor_ptr, seed_ptr, rejection_ptr,
    largest_ptr, border_ptr, best_ptr, mass_ptr, ids_ptr, vocab_size, blocks, window, offset, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, IDS: tl.constexpr, ONLY_REJECTION: tl.constexpr, INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
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
        if IDS:
            ids = tl.load(ids_ptr + token, mask=token < vocab_size, other=0).to(tl.int32)
            noise = _gumbel_at(tl.load(seed_ptr + slot), place, ids, INTERPRETED)
        else:
            noise = _gumbel(tl.load(seed_ptr + slot), place, block * BLOCK, BLOCK, INTERPRETED)
        tl.store(best_ptr + row * blocks + block, packed(key_of(processed + noise), token))


@triton.jit
def _conclude_kernel(
    logits_ptr, logits_stride, slots_ptr, position_ptr, temperature_ptr, floor_ptr, seed_ptr, rejection_ptr,
    largest_ptr, border_ptr, best_ptr, mass_ptr, out_ptr, out_stride, bad_ptr, ids_ptr, vocab_size, blocks, window,
    offset, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, DRAW: tl.constexpr, IDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
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
    if IDS:
        token = tl.load(ids_ptr + token).to(tl.int32)
    tl.store(out_ptr + row * out_stride, token)
