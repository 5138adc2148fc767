"""The border that top_k and top_p draw through a row: the smallest processed logit that stays, and the last id among
its equals. Found by bisection over the logits' bit patterns, masses summed in integers; see `sampling`."""

from __future__ import annotations

import triton
import triton.language as tl

from surefoot.kernels.fused.launch import let_next_start, wait_for_inputs
from surefoot.verify.fused.elements import HIGHEST, LOWEST, key_of, largest_of, number_of, scaled_of

_WHOLE = tl.constexpr(2**40)  # probability 1 as an integer
_SLACK = tl.constexpr(2**21)  # more than rounding can take from a distribution's integer mass


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
    return tl.where(there, key_of(scaled), LOWEST), scaled, token


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
    row_ptr, groups_ptr, count, largest, temperature, vocab_size, border, room, steps, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
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
def border_kernel(
    logits_ptr, logits_stride, slots_ptr, temperature_ptr, top_k_ptr, nucleus_ptr, rejection_ptr, largest_ptr,
    peaks_ptr, groups_ptr, border_ptr, vocab_size, blocks, groups, window, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, PEAKS: tl.constexpr, ONLY_REJECTION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a row; one without filters ends at once."""
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
    tl.store(border_ptr + row * 2, LOWEST)
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
                up = tl.full((), HIGHEST, tl.int32)
                down = tl.full((), LOWEST, tl.int32)
                for start in range(0, groups, PEAKS):
                    place = start + tl.arange(0, PEAKS)
                    peak = tl.load(peaks_ptr + place, mask=place < groups, other=-2139095041)
                    key = key_of(scaled_of(number_of(peak), largest, temperature))
                    key = tl.where(place * GROUP < vocab_size, key, LOWEST)
                    found += tl.sum((key >= middle).to(tl.int32), axis=0)
                    up = tl.minimum(up, tl.min(tl.where(key >= middle, key, HIGHEST), axis=0))
                    down = tl.maximum(down, tl.max(tl.where(key >= middle, LOWEST, key), axis=0))
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
    border = tl.full((), LOWEST, tl.int32)
    last = tl.full((), 0, tl.int32) + vocab_size
    room = tl.full((), 0, tl.int32)
    if by_count:
        border = tl.full((), -2139095042, tl.int32)
        high = tl.full((), 1, tl.int32)
        while high - border > 1:
            middle = border + (high - border) // 2
            found = tl.full((), 0, tl.int32)
            up = tl.full((), HIGHEST, tl.int32)
            down = tl.full((), LOWEST, tl.int32)
            for start in range(0, count, GROUPS):
                key, _scaled, _token = _read_groups(
                    row_ptr, groups_ptr, start, count, largest, temperature, vocab_size, GROUP, GROUPS
                )
                found += tl.sum((key >= middle).to(tl.int32))
                up = tl.minimum(up, tl.min(tl.where(key >= middle, key, HIGHEST)))
                down = tl.maximum(down, tl.max(tl.where(key >= middle, LOWEST, key)))
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
            up = tl.full((), HIGHEST, tl.int32)
            down = tl.full((), LOWEST, tl.int32)
            for start in range(0, count, GROUPS):
                key, scaled, token = _read_groups(
                    row_ptr, groups_ptr, start, count, largest, temperature, vocab_size, GROUP, GROUPS
                )
                inside = (key > border) | ((key == border) & (token <= last))
                heavier = inside & (key > middle)
                weight += tl.sum(tl.where(heavier, _mass_units(scaled, total), 0))
                up = tl.minimum(up, tl.min(tl.where(heavier, key, HIGHEST)))
                down = tl.maximum(down, tl.max(tl.where(inside & (key <= middle), key, LOWEST)))
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
