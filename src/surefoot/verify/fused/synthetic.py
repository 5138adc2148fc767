"""Drafts whose acceptance is set, on the device: see `surefoot.verify.synthetic`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from surefoot.kernels.fused.launch import launch_options, let_next_start, wait_for_inputs
from surefoot.verify.fused.elements import uniform_of
from surefoot.verify.philox import Purpose
from surefoot.verify.synthetic import SEED, synthetic_draft

_DRAFT = tl.constexpr(int(Purpose.DRAFT))
_SEED = tl.constexpr(SEED)


def overwrite_drafts_reference(
    drafts: Tensor, slots: Tensor, length: Tensor, known: Tensor, shares: Tensor, *, vocab_size: int
) -> None:
    """`overwrite_drafts` by `surefoot.verify.synthetic`, sequence after sequence."""
    depth = drafts.shape[1]
    for b, slot in enumerate(slots.tolist()):
        if slot >= 0:
            position = int(length[slot]) + 1
            text = known[slot, position : position + depth].tolist()
            draft = synthetic_draft(text, shares[:depth].tolist(), slot, position, vocab_size)
            drafts[b] = drafts.new_tensor(draft)


def overwrite_drafts(
    drafts: Tensor, slots: Tensor, length: Tensor, known: Tensor, shares: Tensor, *, vocab_size: int
) -> None:
    """Put drafts of a set acceptance in the place of a drafter's own.

    `drafts` int32 [B, K], overwritten; `slots` int32 [B], -1 for a sequence that takes no part, whose draft stays;
    `length` int32 [S], index of the last emitted token; `known` int32 [S, N], plain decoding's text by index,
    with K columns behind the last one that matters; `shares` float64 [at least K], not rising.
    """
    sequences, depth = drafts.shape
    assert drafts.is_contiguous()
    assert known.stride(1) == 1
    assert len(shares) >= depth >= 1
    _overwrite_kernel[(sequences,)](
        drafts, slots, length, known, known.stride(0), shares, vocab_size, DEPTH=depth,
        PLACES=triton.next_power_of_2(depth), num_warps=1, **launch_options(drafts.device),
    )  # fmt: skip


@triton.jit
def _overwrite_kernel(drafts_ptr, slots_ptr, length_ptr, known_ptr, known_stride, shares_ptr, vocab_size,
                      DEPTH: tl.constexpr, PLACES: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    sequence = tl.program_id(0)
    slot = tl.load(slots_ptr + sequence)
    if slot < 0:
        return
    position = tl.load(length_ptr + slot) + 1
    number = uniform_of(tl.full((), _SEED, tl.int64), position, _DRAFT, slot)
    place = tl.arange(0, PLACES)
    inside = place < DEPTH
    share = tl.load(shares_ptr + place, inside, 0.0)
    known = tl.load(known_ptr + slot.to(tl.int64) * known_stride + position + place, inside, 0)
    token = tl.where(number < share, known, (known + 1) % vocab_size)
    tl.store(drafts_ptr + sequence * DEPTH + place, token, inside)
