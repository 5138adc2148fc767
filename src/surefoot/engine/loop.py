"""One step of speculative decoding: draft, verify, commit.

`step` is Algorithm 1 of Leviathan et al. 2023 (arXiv 2211.17192) over a batch of sequences. Plain decoding is the same
step with a drafter that proposes nothing, so a comparison between the two compares one thing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.errors import InputError, NumericalError, shown
from surefoot.sampling import check_token_ids
from surefoot.sequence import Sequence, TokenLogprobs
from surefoot.types import Draft, Drafter, Kept, ReadsPrompts, ResumableTarget, Target, Verdict, Window
from surefoot.verify import ruled, token_logprobs, verify

FORCED = "grammar"  # the source of a draft of what a grammar prescribes


@dataclass(frozen=True)
class StepRecord:
    """What one step did to one sequence. `emitted` counts the tokens it put out; when the output ended inside the
    draft, that is fewer than `verdict.accepted + 1`. `logprobs` has one entry each, if that was asked for."""

    sequence: Sequence
    position: int
    draft: Draft
    verdict: Verdict
    emitted: int
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens it put out: accepted draft tokens, then the one that follows them."""
        return (*self.draft.tokens[: self.verdict.accepted], self.verdict.token)[: self.emitted]

    @property
    def accepted(self) -> int:
        """Draft tokens that were kept and emitted."""
        return min(self.verdict.accepted, self.emitted)


Failed = Callable[[Sequence, Exception], object]


def prefill(sequence: Sequence, drafter: Drafter, target: ReadsPrompts, kept: Seq[Kept] = ()) -> Iterator[int]:
    """Read the prompt, all but its last token (the first window begins with that one), and show it to the drafter; from
    a `ResumableTarget`, what is `kept` of it is not read again.
    Yields after every chunk how many tokens have been read for sure (a target that does not show its states does not
    say how long the chunk was)."""
    slot, tokens = sequence.slot, sequence.tokens[:-1]
    chunks: Iterator[tuple[int, Tensor | None]]
    if kept:
        assert isinstance(target, ResumableTarget)
        chunks = target.resume(slot, tokens, kept)
    else:
        chunks = target.prefill(slot, tokens)
    for position, hidden in chunks:
        drafter.observe(sequence, position, hidden)
        if sequence.prompt is not None and hidden is not None:
            sequence.prompt.read(position, hidden)
        yield position + (0 if hidden is None else len(hidden))


def give_up(sequence: Sequence, error: Exception) -> None:
    """Raise the error: what `step` does about a sequence that fails unless it is told otherwise."""
    raise error


def step(
    batch: Seq[Sequence], drafter: Drafter, target: Target, draft_length: int, failed: Failed = give_up
) -> list[StepRecord]:
    """Advance every sequence of the batch by one draft, one verify pass and one commit.

    A draft never reaches past the sequence's limit: with `room` tokens left, `room - 1` draft tokens and the one that
    follows them fill it exactly. What a grammar prescribes is the draft, if it is as long or the drafter has none.

    `failed` is told of a sequence whose rules fail or whose rows cannot be judged: it is as it was before, its window
    open, and has no record (or one without a draft, if only the draft failed).
    """
    depths = [min(draft_length if s.draft_length is None else s.draft_length, s.room - 1) for s in batch]
    forced = [_forced(*parts, failed) for parts in zip(batch, depths, strict=True)]
    asked = [0 if len(tokens) == depth else depth for tokens, depth in zip(forced, depths, strict=True)]
    drafts = check_drafts(drafter, drafter.propose(batch, asked), asked, target.vocab_size)
    drafts = [_by_grammar(*parts, failed) for parts in zip(batch, drafts, forced, strict=True)]
    windows = [Window(s.slot, (s.tokens[-1], *draft.tokens)) for s, draft in zip(batch, drafts, strict=True)]
    records = []
    for sequence, draft, scores in zip(batch, drafts, target.verify(windows), strict=True):
        position = len(sequence.tokens)
        try:
            verdict = _judged(sequence, draft, scores.logits, position)
        except Exception as error:
            failed(sequence, error)
            continue
        emitted = sequence.extend((*draft.tokens[: verdict.accepted], verdict.token))
        target.commit(sequence.slot, keep=emitted)  # all that was emitted but its last token, and the one before it
        drafter.observe(sequence, position - 1, None if scores.hidden is None else scores.hidden[:emitted])
        record = StepRecord(sequence, position, draft, verdict, emitted)
        if (count := sequence.params.logprobs) is not None:
            rows = zip(scores.logits, record.tokens, strict=False)
            record = replace(record, logprobs=tuple(token_logprobs(row, token, count) for row, token in rows))
        records.append(record)
    return records


def _judged(sequence: Sequence, draft: Draft, logits: Tensor, position: int) -> Verdict:
    """The verdict on the draft by the model's logits [K + 1, V] and the sequence's rules.

    Raises InputError where the rules leave no token of what the model gave, unless plain decoding would not come there:
    such a row has a say only if the draft in front of it is kept. Raises what `verify` raises."""
    rows = ruled(sequence, logits, draft.tokens)
    try:
        return verify(draft, rows, sequence.params, position)
    except NumericalError:
        empty = _excluded(rows) & ~_excluded(logits)
        if not bool(empty.any()):
            raise
    verdict = verify(draft, rows.masked_fill(empty[:, None], 0.0), sequence.params, position)
    reached = torch.nonzero(empty[: verdict.accepted + 1]).flatten().tolist()
    if reached:
        raise InputError(f"parameters: expected them to leave a token at position {position + reached[0]}, found none "
                         "that all of them allow (allowed_token_ids, bad_words, logit_bias, min_tokens, "
                         "structured output, processors)")  # fmt: skip
    return verdict


def _excluded(rows: Tensor) -> Tensor:
    """Which rows of logits [n, V] hold -inf only, bool [n]."""
    return (rows == -math.inf).all(dim=-1)


def _forced(sequence: Sequence, depth: int, failed: Failed) -> tuple[int, ...]:
    """At most `depth` tokens that the sequence's grammar prescribes."""
    try:
        return () if sequence.rules is None else tuple(sequence.rules.forced(sequence.tokens)[:depth])
    except Exception as error:
        failed(sequence, error)
        return ()


def _by_grammar(sequence: Sequence, draft: Draft, forced: tuple[int, ...], failed: Failed) -> Draft:
    """The draft as far as the grammar takes it; what the grammar prescribes, where there is no draft.

    A draft that was drawn stays whole: to cut it by what was drawn would make the rest follow another distribution than
    the one handed over. The target's row refuses the token all the same."""
    if sequence.rules is None:
        return draft
    if draft.probs is None:
        try:
            taken = sequence.rules.cut(sequence.tokens, draft.tokens)
        except Exception as error:
            failed(sequence, error)
            taken = 0
        draft = replace(draft, tokens=draft.tokens[:taken])
    return draft if draft.tokens else Draft(forced, source=FORCED if forced else draft.source)


def check_drafts(drafter: Drafter, drafts: object, depths: Seq[int], vocab_size: int) -> list[Draft]:
    """The drafts with plain token ids. Raises InputError if a drafter did not answer with one for each sequence, or
    proposed more than it was asked for, or a token that the target does not have."""
    name = f"drafter {drafter.name!r}"
    listed = drafts if isinstance(drafts, (list, tuple)) else ()
    if len(listed) != len(depths) or not all(isinstance(draft, Draft) for draft in listed):
        raise InputError(f"{name}: expected a list of {len(depths)} Draft, found {shown(drafts)}")
    checked = []
    for draft, depth in zip(listed, depths, strict=True):
        tokens = check_token_ids(f"{name}: tokens", draft.tokens, vocab_size)
        if len(tokens) > depth:
            raise InputError(f"{name}: expected at most {depth} tokens, found {len(tokens)}")
        checked.append(replace(draft, tokens=tuple(tokens)))
    return checked
