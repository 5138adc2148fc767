"""The end of a step on the device: which draft tokens stay, which token follows, and both written down.

Greedy and coupled sequences keep the draft while it equals the target's choices; sequences under the p/q rule are
judged as `surefoot.verify.accept` does, in float64 with every sum in a fixed order. The host learns of it by a record
and may read it while the next step runs.

One long file: the rule's kernels hand one another their workspace, and are read against the one reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from surefoot.kernels.fused.launch import launch_options, let_next_start, wait_for_inputs
from surefoot.types import Draft
from surefoot.verify.acceptance import accept_exact, verify
from surefoot.verify.fused.elements import find_block, find_token, largest_of, number_of, uniform_of, weights_of
from surefoot.verify.fused.requests import Requests
from surefoot.verify.fused.sampling import Workspace, block_of, measure, processed_reference
from surefoot.verify.philox import Purpose

RECORD = 4  # entries of a record behind the draft: accepted, the token that follows, flags, index of the first token
_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_LAST = tl.constexpr(int(Purpose.LAST))


@dataclass(frozen=True)
class Rejection:
    """What the p/q rule needs beside draft and choices, for B sequences with K draft tokens each."""

    logits: Tensor
    """float32 [B * (K + 1), V], the target's."""
    workspace: Workspace
    """As `choose` left it for these logits."""
    draft_logits: Tensor | None
    """float32 [B * K, V], those `draw_draft` drew from; None if every drafter is certain."""
    draft_workspace: Workspace | None
    """For B * K rows; overwritten."""
    certain: Tensor
    """int32 [B]: 1 where the draft is a point mass on each token (a copied one, say)."""
    verdict: Tensor
    """int32 [B, 2]: tokens kept, whether the next was refused."""
    residual: Tensor
    """float64 [B, blocks]: sums of max(0, p - q)."""

    @staticmethod
    def of(
        logits: Tensor,
        workspace: Workspace,
        certain: Tensor,
        draft_logits: Tensor | None = None,
        draft_workspace: Workspace | None = None,
    ) -> Rejection:
        """With memory for what the kernels hand to one another."""
        sequences = len(certain)
        device = logits.device
        return Rejection(
            logits=logits, workspace=workspace, draft_logits=draft_logits, draft_workspace=draft_workspace,
            certain=certain, verdict=torch.zeros(sequences, 2, dtype=torch.int32, device=device),
            residual=torch.zeros(sequences, workspace.largest.shape[1], dtype=torch.float64, device=device),
        )  # fmt: skip


def accept_reference(
    drafts: Tensor, choices: Tensor, bad: Tensor, requests: Requests, slots: Tensor, length: Tensor, tokens: Tensor,
    keep: Tensor, accepted: Tensor, following: Tensor, record: Tensor, rejection: Rejection | None = None,
) -> None:  # fmt: skip
    """`accept` by `surefoot.verify`, sequence after sequence."""
    window = drafts.shape[1] + 1
    for b, slot in enumerate(slots.tolist()):
        draft = drafts[b].tolist()
        position = int(length[slot]) + 1 if slot >= 0 else -1
        count, token, flags = -1, -1, 0
        if slot >= 0 and position < int(requests.limit[slot]):
            own = choices.view(-1, window)[b].tolist()
            flags = sum(int(row != 0) << i for i, row in enumerate(bad.view(-1, window)[b].tolist()))
            drafted = min(
                [int(requests.limit[slot]) - position - 1, *(i for i, x in enumerate(draft) if x < 0), len(draft)]
            )
            if rejection is not None and int(requests.rejection[slot]):
                probs = None
                if rejection.draft_logits is not None and not int(rejection.certain[b]):
                    rows = rejection.draft_logits[b * (window - 1) :][:drafted]
                    probs = processed_reference(rows, requests, slot).softmax(dim=-1)
                target = rejection.logits[b * window :][: drafted + 1]
                verdict = verify(Draft(tuple(draft[:drafted]), probs), target, requests.params[slot], position)
            else:
                verdict = accept_exact(draft[:drafted], own[: drafted + 1])
            count, token = verdict.accepted, verdict.token
            new = [*draft[:count], token]
            tokens[slot, position : position + len(new)] = torch.tensor(new, dtype=torch.int32, device=tokens.device)
            keep[slot] = count + 1
            length[slot] += count + 1
        accepted[b], following[b] = count, token
        row = [*draft, count, token, flags, position]
        record[b] = torch.tensor(row, dtype=torch.int32, device=record.device)


def accept(
    drafts: Tensor, choices: Tensor, bad: Tensor, requests: Requests, slots: Tensor, length: Tensor, tokens: Tensor,
    keep: Tensor, accepted: Tensor, following: Tensor, record: Tensor, rejection: Rejection | None = None,
) -> None:  # fmt: skip
    """Judge B drafts of K <= 30 tokens, and commit what stays. Source: `surefoot.verify.verify`.

    `drafts` int32 [B, K], -1 behind a draft that is shorter; `choices` and `bad` int32 [B * (K + 1)] from `choose`;
    `slots` int32 [B], -1 for a sequence that takes no part. A draft is cut where the request's limit would be passed.

    Written: `tokens` int32 [S, >= limit], the kept tokens and the one that follows them, from index
    `length[slot] + 1` on; `keep` int32 [S], how many those are, and as many are added to `length` int32 [S];
    `accepted` and `following` int32 [B]; `record` int32 [B, K + 4]: the draft, accepted, following, flags (bit i: row i
    of the window is bad) and the index of the first token committed. A sequence that takes no part or has reached its
    limit leaves its slot alone: accepted and following are -1.

    Without `rejection` every request must be greedy or coupled; with it, sequences under the p/q rule are judged by
    probabilities. `length` must be the `position` that `choose` and `draw_draft` were given.
    """
    sequences, depth = drafts.shape
    assert depth <= 30
    assert drafts.is_contiguous()
    assert choices.is_contiguous()
    assert record.shape == (sequences, depth + RECORD)
    assert record.is_contiguous()
    assert tokens.stride(1) == 1
    options = launch_options(drafts.device)
    if rejection is None:
        _commit_kernel[(sequences,)](
            drafts,
            choices,
            bad,
            slots,
            requests.limit,
            length,
            tokens,
            tokens.stride(0),
            keep,
            accepted,
            following,
            record,
            requests.temperature,
            requests.floor,
            requests.seed,
            requests.rejection,
            *[record] * 11,  # of the p/q rule, never read
            0,
            0,
            0,
            0,
            DEPTH=depth,
            PLACES=triton.next_power_of_2(depth + 1),
            BLOCKS=1,
            BLOCK=1,
            REJECTION=False,
            SAMPLED=False,
            num_warps=1,
            **options,
        )
        return
    target, draft_logits, draft = rejection.workspace, rejection.draft_logits, rejection.draft_workspace
    vocab_size = rejection.logits.shape[1]
    blocks = triton.cdiv(vocab_size, block_of(vocab_size))
    sampled = draft_logits is not None and depth > 0
    if draft_logits is None or draft is None or not sampled:
        draft_logits, draft = rejection.logits, target  # never read
    else:
        measure(draft_logits, requests, slots, length, draft, window=depth, only_rejection=True)
    distributions = (
        rejection.logits, target.largest, target.border, target.mass, draft_logits, draft.largest, draft.border,
        draft.mass, rejection.certain, rejection.verdict, rejection.residual,
    )  # fmt: skip
    sizes = (rejection.logits.stride(0), draft_logits.stride(0), vocab_size, blocks)
    padded = triton.next_power_of_2(blocks)
    _judge_kernel[(sequences,)](
        drafts, slots, requests.limit, length, requests.temperature, requests.floor, requests.seed,
        requests.rejection, *distributions, *sizes, DEPTH=depth, PLACES=triton.next_power_of_2(depth + 1),
        BLOCKS=padded, SAMPLED=sampled, num_warps=1, **options,
    )  # fmt: skip
    _residual_kernel[(blocks, sequences)](
        drafts, slots, requests.limit, length, requests.temperature, requests.floor, requests.rejection,
        *distributions, *sizes, DEPTH=depth, BLOCKS=padded, BLOCK=block_of(vocab_size), SAMPLED=sampled, num_warps=8,
        **options,
    )  # fmt: skip
    _commit_kernel[(sequences,)](
        drafts, choices, bad, slots, requests.limit, length, tokens, tokens.stride(0), keep, accepted, following,
        record, requests.temperature, requests.floor, requests.seed, requests.rejection, *distributions, *sizes,
        DEPTH=depth, PLACES=triton.next_power_of_2(depth + 1), BLOCKS=padded, BLOCK=block_of(vocab_size),
        REJECTION=True, SAMPLED=sampled, num_warps=8, **options,
    )  # fmt: skip


@triton.jit
def _total(mass_ptr, row, blocks, BLOCKS: tl.constexpr):
    """Sum of a row's masses, at least a tiny one lest a refused row divide by zero."""
    block = tl.arange(0, BLOCKS)
    total = tl.sum(tl.load(mass_ptr + row * blocks + block, mask=block < blocks, other=0.0), axis=0)
    return tl.where(total > 0, total, 1.0)


@triton.jit
def _probabilities(
    logits_ptr, stride, largest_ptr, border_ptr, mass_ptr, row, token, temperature, floor, vocab_size, blocks,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The processed distribution of one row at some tokens, float64."""
    key, _ = largest_of(largest_ptr, row, blocks, BLOCKS)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    weights = weights_of(row_ptr, border_ptr + row * 2, token, number_of(key), temperature, floor, vocab_size)
    return weights / (_total(mass_ptr, row, blocks, BLOCKS) + tl.zeros_like(weights))


@triton.jit
def _rest(
    target_ptr, target_stride, target_largest_ptr, target_border_ptr, target_mass_ptr, draft_ptr, draft_stride,
    draft_largest_ptr, draft_border_ptr, draft_mass_ptr, certain_ptr, drafts_ptr, sequence, accepted, token,
    temperature, floor, vocab_size, blocks, DEPTH: tl.constexpr, BLOCKS: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """max(0, p - q) at some tokens, behind a draft token that was refused."""
    rest = _probabilities(
        target_ptr, target_stride, target_largest_ptr, target_border_ptr, target_mass_ptr,
        sequence * (DEPTH + 1) + accepted, token, temperature, floor, vocab_size, blocks, BLOCKS,
    )  # fmt: skip
    certain = tl.full((), 1, tl.int32)
    if SAMPLED:
        certain = tl.load(certain_ptr + sequence)
        if certain == 0:
            q = _probabilities(
                draft_ptr, draft_stride, draft_largest_ptr, draft_border_ptr, draft_mass_ptr,
                sequence * DEPTH + accepted, token, temperature, floor, vocab_size, blocks, BLOCKS,
            )  # fmt: skip
            rest = tl.maximum(rest - q, 0.0)
    if certain != 0:
        rest = tl.where(token == tl.load(drafts_ptr + sequence * DEPTH + accepted), 0.0, rest)
    return rest


@triton.jit
def _judge_kernel(
    drafts_ptr, slots_ptr, limit_ptr, length_ptr, temperature_ptr, floor_ptr, seed_ptr, rejection_ptr, target_ptr,
    target_largest_ptr, target_border_ptr, target_mass_ptr, draft_ptr, draft_largest_ptr, draft_border_ptr,
    draft_mass_ptr, certain_ptr, verdict_ptr, residual_ptr, target_stride, draft_stride, vocab_size, blocks,
    DEPTH: tl.constexpr, PLACES: tl.constexpr, BLOCKS: tl.constexpr, SAMPLED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    sequence = tl.program_id(0)
    slot = tl.load(slots_ptr + sequence)
    if slot < 0:
        return
    start = tl.load(length_ptr + slot) + 1
    limit = tl.load(limit_ptr + slot)
    if (start >= limit) | (tl.load(rejection_ptr + slot) == 0):
        return
    temperature, floor = tl.load(temperature_ptr + slot), tl.load(floor_ptr + slot)
    seed = tl.load(seed_ptr + slot)
    place = tl.arange(0, PLACES)
    draft = tl.load(drafts_ptr + sequence * DEPTH + place, mask=place < DEPTH, other=-1)
    drafted = tl.minimum(tl.min(tl.where(draft < 0, place, DEPTH), axis=0), limit - start - 1)
    certain = tl.full((), 1, tl.int32)
    if SAMPLED:
        certain = tl.load(certain_ptr + sequence)
    accepted = tl.full((), 0, tl.int32)
    for i in range(DEPTH):
        if (i < drafted) & (accepted == i):
            token = tl.load(drafts_ptr + sequence * DEPTH + i) + tl.zeros((1,), tl.int32)
            row = sequence * (DEPTH + 1) + i
            p = _probabilities(
                target_ptr, target_stride, target_largest_ptr, target_border_ptr, target_mass_ptr, row, token,
                temperature, floor, vocab_size, blocks, BLOCKS,
            )  # fmt: skip
            q = tl.full((1,), 1.0, tl.float64)
            if SAMPLED:  # noqa: SIM102 (a compile-time condition stands alone)
                if certain == 0:
                    q = _probabilities(
                        draft_ptr,
                        draft_stride,
                        draft_largest_ptr,
                        draft_border_ptr,
                        draft_mass_ptr,
                        sequence * DEPTH + i,
                        token,
                        temperature,
                        floor,
                        vocab_size,
                        blocks,
                        BLOCKS,
                    )
            uniform = uniform_of(seed, start + i, _ACCEPT, 0)
            kept = (uniform < p / tl.where(q > 0, q, 1.0)) & (q > 0)
            accepted += tl.sum(kept.to(tl.int32), axis=0)
    tl.store(verdict_ptr + sequence * 2, accepted)
    tl.store(verdict_ptr + sequence * 2 + 1, (accepted < drafted).to(tl.int32))


@triton.jit
def _residual_kernel(
    drafts_ptr, slots_ptr, limit_ptr, length_ptr, temperature_ptr, floor_ptr, rejection_ptr, target_ptr,
    target_largest_ptr, target_border_ptr, target_mass_ptr, draft_ptr, draft_largest_ptr, draft_border_ptr,
    draft_mass_ptr, certain_ptr, verdict_ptr, residual_ptr, target_stride, draft_stride, vocab_size, blocks,
    DEPTH: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SAMPLED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    block, sequence = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + sequence)
    if slot < 0:
        return
    finished = tl.load(length_ptr + slot) + 1 >= tl.load(limit_ptr + slot)
    if finished | (tl.load(rejection_ptr + slot) == 0):
        return
    if tl.load(verdict_ptr + sequence * 2 + 1) == 0:
        return
    rest = _rest(
        target_ptr, target_stride, target_largest_ptr, target_border_ptr, target_mass_ptr, draft_ptr, draft_stride,
        draft_largest_ptr, draft_border_ptr, draft_mass_ptr, certain_ptr, drafts_ptr, sequence,
        tl.load(verdict_ptr + sequence * 2), block * BLOCK + tl.arange(0, BLOCK), tl.load(temperature_ptr + slot),
        tl.load(floor_ptr + slot), vocab_size, blocks, DEPTH, BLOCKS, SAMPLED,
    )  # fmt: skip
    tl.store(residual_ptr + sequence * blocks + block, tl.sum(rest, axis=0))


@triton.jit
def _commit_kernel(
    drafts_ptr, choices_ptr, bad_ptr, slots_ptr, limit_ptr, length_ptr, tokens_ptr, tokens_stride, keep_ptr,
    accepted_ptr, following_ptr, record_ptr, temperature_ptr, floor_ptr, seed_ptr, rejection_ptr, target_ptr,
    target_largest_ptr, target_border_ptr, target_mass_ptr, draft_ptr, draft_largest_ptr, draft_border_ptr,
    draft_mass_ptr, certain_ptr, verdict_ptr, residual_ptr, target_stride, draft_stride, vocab_size, blocks,
    DEPTH: tl.constexpr, PLACES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, REJECTION: tl.constexpr,
    SAMPLED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    sequence = tl.program_id(0)
    slot = tl.load(slots_ptr + sequence)
    place = tl.arange(0, PLACES)
    draft = tl.load(drafts_ptr + sequence * DEPTH + place, mask=place < DEPTH, other=-1)
    accepted = tl.full((), -1, tl.int32)
    token = tl.full((), -1, tl.int32)
    flags = tl.full((), 0, tl.int32)
    start = tl.full((), -1, tl.int32)
    if slot >= 0:
        start = tl.load(length_ptr + slot) + 1
        limit = tl.load(limit_ptr + slot)
        if start < limit:
            row = sequence * (DEPTH + 1)
            choice = tl.load(choices_ptr + row + place, mask=place < DEPTH, other=0)
            same = (draft == choice) & (place < DEPTH)
            accepted = tl.minimum(tl.min(tl.where(same, DEPTH, tl.minimum(place, DEPTH)), axis=0), limit - start - 1)
            token = tl.load(choices_ptr + row + accepted)
            refused_rows = tl.load(bad_ptr + row + place, mask=place <= DEPTH, other=0) != 0
            flags = tl.sum(tl.where(refused_rows, 1 << place, 0), axis=0)
            if REJECTION:  # noqa: SIM102 (likewise)
                if tl.load(rejection_ptr + slot) != 0:
                    accepted = tl.load(verdict_ptr + sequence * 2)
                    row += accepted
                    temperature, floor = tl.load(temperature_ptr + slot), tl.load(floor_ptr + slot)
                    uniform = uniform_of(tl.load(seed_ptr + slot), start, _LAST, 0)
                    index = tl.arange(0, BLOCKS)
                    rests = tl.load(residual_ptr + sequence * blocks + index, mask=index < blocks, other=0.0)
                    # Distributions that differ by rounding only may leave nothing: then the target's own row counts.
                    if (tl.load(verdict_ptr + sequence * 2 + 1) != 0) & (tl.max(rests, axis=0) > 0):
                        block, before, aim = find_block(rests, uniform, BLOCKS)
                        candidates = block * BLOCK + tl.arange(0, BLOCK)
                        weights = _rest(
                            target_ptr,
                            target_stride,
                            target_largest_ptr,
                            target_border_ptr,
                            target_mass_ptr,
                            draft_ptr,
                            draft_stride,
                            draft_largest_ptr,
                            draft_border_ptr,
                            draft_mass_ptr,
                            certain_ptr,
                            drafts_ptr,
                            sequence,
                            accepted,
                            candidates,
                            temperature,
                            floor,
                            vocab_size,
                            blocks,
                            DEPTH,
                            BLOCKS,
                            SAMPLED,
                        )
                        token = find_token(weights, candidates, before, aim)
                    else:
                        masses = tl.load(target_mass_ptr + row * blocks + index, mask=index < blocks, other=0.0)
                        block, before, aim = find_block(masses, uniform, BLOCKS)
                        candidates = block * BLOCK + tl.arange(0, BLOCK)
                        key, _first = largest_of(target_largest_ptr, row, blocks, BLOCKS)
                        row_ptr = target_ptr + row.to(tl.int64) * target_stride
                        weights = weights_of(
                            row_ptr,
                            target_border_ptr + row * 2,
                            candidates,
                            number_of(key),
                            temperature,
                            floor,
                            vocab_size,
                        )
                        token = find_token(weights, candidates, before, aim)
            owner = tokens_ptr + slot.to(tl.int64) * tokens_stride + start
            tl.store(owner + place, tl.where(place < accepted, draft, token), mask=place <= accepted)
            tl.store(keep_ptr + slot, accepted + 1)
            tl.store(length_ptr + slot, start + accepted)
    tl.store(accepted_ptr + sequence, accepted)
    tl.store(following_ptr + sequence, token)
    record_ptr += sequence * (DEPTH + 4)
    tl.store(record_ptr + place, draft, mask=place < DEPTH)
    tl.store(record_ptr + DEPTH, accepted)
    tl.store(record_ptr + DEPTH + 1, token)
    tl.store(record_ptr + DEPTH + 2, flags)
    tl.store(record_ptr + DEPTH + 3, start)
