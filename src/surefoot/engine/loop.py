"""One step of speculative decoding: draft, verify, commit.

`step` is Algorithm 1 of Leviathan et al. 2023 (arXiv 2211.17192) over a batch of sequences. Plain decoding is the same
step with a drafter that proposes nothing, so a comparison between the two compares one thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from surefoot.errors import InputError, shown
from surefoot.sampling import check_token_ids
from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter, Target, Verdict, Window
from surefoot.verify import verify


@dataclass(frozen=True)
class StepRecord:
    """What one step did to one sequence. `emitted` counts the tokens it put out; when the output ended inside the
    draft, that is fewer than `verdict.accepted + 1`."""

    sequence: Sequence
    position: int
    draft: Draft
    verdict: Verdict
    emitted: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens it put out: accepted draft tokens, then the one that follows them."""
        return (*self.draft.tokens[: self.verdict.accepted], self.verdict.token)[: self.emitted]

    @property
    def accepted(self) -> int:
        """Draft tokens that were kept and emitted."""
        return min(self.verdict.accepted, self.emitted)


def prefill(sequence: Sequence, drafter: Drafter, target: Target) -> Iterator[int]:
    """Read the prompt, all but its last token (the first window begins with that one), and show it to the drafter.
    Yields after every chunk how many tokens have been read (all of them, if the target does not show its states)."""
    for position, hidden in target.prefill(sequence.slot, sequence.tokens[:-1]):
        drafter.observe(sequence, position, hidden)
        yield position + (len(sequence.tokens) - 1 - position if hidden is None else len(hidden))


def step(batch: Seq[Sequence], drafter: Drafter, target: Target, draft_length: int) -> list[StepRecord]:
    """Advance every sequence of the batch by one draft, one verify pass and one commit.

    A draft never reaches past the sequence's limit: with `room` tokens left, `room - 1` draft tokens and the one that
    follows them fill it exactly.
    """
    depths = [min(draft_length, sequence.room - 1) for sequence in batch]
    drafts = check_drafts(drafter, drafter.propose(batch, depths), depths, target.vocab_size)
    windows = [Window(s.slot, (s.tokens[-1], *draft.tokens)) for s, draft in zip(batch, drafts, strict=True)]
    records = []
    for sequence, draft, scores in zip(batch, drafts, target.verify(windows), strict=True):
        position = len(sequence.tokens)
        verdict = verify(draft, scores.logits, sequence.params, position)
        emitted = sequence.extend((*draft.tokens[: verdict.accepted], verdict.token))
        target.commit(sequence.slot, keep=emitted)  # all that was emitted but its last token, and the one before it
        drafter.observe(sequence, position - 1, None if scores.hidden is None else scores.hidden[:emitted])
        records.append(StepRecord(sequence, position, draft, verdict, emitted))
    return records


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
