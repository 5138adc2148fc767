"""Prompt lookup on the device: what followed the last tokens when they stood in the text before.

Gives what `surefoot.drafters.ngram.NgramDrafter` gives with match="latest" and reanchor=False, except that it knows no
stop ids: a draft may go on behind one, which the host cuts off a step later. The whole text is compared anew in every
step, every position by itself: `max_ngram` loads per position, most of them from cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surefoot.kernels.fused.launch import launch_options, let_next_start, wait_for_inputs

_BLOCK = 1024  # positions compared by one program
AFTER_ONE = 3  # tokens copied after a match of a single token, as the host's drafter does
LONGEST = 32  # a match is measured up to this length


def workspace(sequences: int, max_tokens: int, device: torch.device) -> Tensor:
    """int64 [sequences, blocks]: each block's best match, for `tokens` with `max_tokens` columns."""
    return torch.zeros(sequences, triton.cdiv(max_tokens, _BLOCK), dtype=torch.int64, device=device)


def propose_reference(
    tokens: Tensor, length: Tensor, slots: Tensor, out_drafts: Tensor, out_count: Tensor, out_match: Tensor,
    workspace: Tensor, *, depth: int, max_ngram: int = 5, min_ngram: int = 2,
) -> None:  # fmt: skip
    """`propose` as a search from the longest suffix down and from the end back."""
    for b, slot in enumerate(slots.tolist()):
        out_drafts[b], out_count[b], out_match[b] = -1, 0, 0
        text = tokens[slot, : int(length[slot]) + 1].tolist() if slot >= 0 else []
        found = _find(text, max_ngram, min_ngram)
        if found is None:
            continue
        size, start = found
        count = min(depth, AFTER_ONE) if size == 1 else depth
        draft = [text[start + i % (len(text) - start)] for i in range(count)]
        out_drafts[b, : len(draft)] = torch.tensor(draft, dtype=torch.int32, device=out_drafts.device)
        out_count[b], out_match[b] = len(draft), size


def _find(text: list[int], max_ngram: int, min_ngram: int) -> tuple[int, int] | None:
    """Length of the match and the index of the token after it."""
    for size in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        for start in range(len(text) - 1, size - 1, -1):
            if text[start - size : start] == text[len(text) - size :]:
                while size < min(LONGEST, start) and text[start - size - 1] == text[len(text) - size - 1]:
                    size += 1
                return size, start
    return None


def propose(
    tokens: Tensor, length: Tensor, slots: Tensor, out_drafts: Tensor, out_count: Tensor, out_match: Tensor,
    workspace: Tensor, *, depth: int, max_ngram: int = 5, min_ngram: int = 2,
) -> None:  # fmt: skip
    """Copy up to `depth` tokens from where the text's last tokens stood before.

    The longest suffix of `tokens[slot, : length[slot] + 1]` that occurs with a token after it wins, from `max_ngram`
    tokens (at most 32) down to `min_ngram`, and of its occurrences the latest. A copy that reaches the end of the text
    goes on with its own tokens. After a match of one token, at most 3 are copied.

    `tokens` int32 [S, N]; `length` int32 [S], index of the last token; `slots` int32 [B], -1 for a sequence that takes
    no part. Written: `out_drafts` int32 [B, >= depth] (rows of any stride), -1 behind the draft in all its columns;
    `out_count` int32 [B], tokens proposed; `out_match` int32 [B], length of the match, measured up to 32 tokens, 0 for
    none. `workspace` from the function of that name. Source: Saxena, github.com/apoorvumang/prompt-lookup-decoding.
    """
    assert 1 <= min_ngram <= max_ngram <= LONGEST
    assert 1 <= depth <= out_drafts.shape[1]
    assert tokens.stride(1) == out_drafts.stride(1) == 1
    sequences, blocks = len(slots), triton.cdiv(tokens.shape[1], _BLOCK)
    assert sequences <= workspace.shape[0]
    assert blocks <= workspace.shape[1]
    options = launch_options(tokens.device)
    _match_kernel[(blocks, sequences)](
        tokens, tokens.stride(0), length, slots, workspace, workspace.stride(0), MAX_NGRAM=max_ngram,
        MIN_NGRAM=min_ngram, BLOCK=_BLOCK, num_warps=4, **options,
    )  # fmt: skip
    _copy_kernel[(sequences,)](
        tokens, tokens.stride(0), length, slots, workspace, workspace.stride(0), blocks, out_drafts,
        out_drafts.stride(0), out_drafts.shape[1], out_count, out_match, DEPTH=depth,
        COLUMNS=triton.next_power_of_2(out_drafts.shape[1]), BLOCKS=triton.next_power_of_2(blocks), AFTER=AFTER_ONE,
        LONGEST=LONGEST, num_warps=4, **options,
    )  # fmt: skip


@triton.jit
def _match_kernel(
    tokens_ptr, tokens_stride, length_ptr, slots_ptr, best_ptr, best_stride, MAX_NGRAM: tl.constexpr,
    MIN_NGRAM: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    block, sequence = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + sequence)
    if slot < 0:
        return
    end = tl.load(length_ptr + slot)  # index of the last token
    best = tl.full((), 0, tl.int64)
    if block * BLOCK <= end:
        text = tokens_ptr + slot.to(tl.int64) * tokens_stride
        start = block * BLOCK + tl.arange(0, BLOCK)  # of what would be copied: a token that is there
        size = tl.zeros((BLOCK,), tl.int32)
        for i in range(MAX_NGRAM):
            there = (start <= end) & (start > i)
            earlier = tl.load(text + start - 1 - i, mask=there, other=-1)
            own = tl.load(text + end - i, mask=end >= i, other=-2)
            size += (there & (size == i) & (earlier == own)).to(tl.int32)
        packed = tl.where(size >= MIN_NGRAM, (size.to(tl.int64) << 32) | start.to(tl.int64), 0)
        best = tl.max(packed, axis=0)
    tl.store(best_ptr + sequence * best_stride + block, best)


@triton.jit
def _copy_kernel(
    tokens_ptr, tokens_stride, length_ptr, slots_ptr, best_ptr, best_stride, blocks, drafts_ptr, drafts_stride,
    columns, count_ptr, match_ptr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
    AFTER: tl.constexpr, LONGEST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    sequence = tl.program_id(0)
    slot = tl.load(slots_ptr + sequence)
    place = tl.arange(0, COLUMNS)
    draft = tl.full((COLUMNS,), -1, tl.int32)
    count = tl.full((), 0, tl.int32)
    size = tl.full((), 0, tl.int32)
    if slot >= 0:
        index = tl.arange(0, BLOCKS)
        best = tl.max(tl.load(best_ptr + sequence * best_stride + index, mask=index < blocks, other=0), axis=0)
        if best > 0:
            end = tl.load(length_ptr + slot)
            text = tokens_ptr + slot.to(tl.int64) * tokens_stride
            start = (best & 0xFFFFFFFF).to(tl.int32)
            back = tl.arange(0, LONGEST)
            there = back < start
            earlier = tl.load(text + start - 1 - back, mask=there, other=-1)
            own = tl.load(text + end - back, mask=there, other=-2)
            size = tl.min(tl.where(earlier == own, LONGEST, back), axis=0)
            count = tl.where(size == 1, tl.minimum(DEPTH, AFTER), DEPTH)
            copied = tl.load(text + start + place % (end + 1 - start), mask=place < count, other=-1)
            draft = tl.where(place < count, copied, -1)
    tl.store(drafts_ptr + sequence * drafts_stride + place, draft, mask=place < columns)
    tl.store(count_ptr + sequence, count)
    tl.store(match_ptr + sequence, size)
