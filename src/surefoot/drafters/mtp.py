"""Drafting with the checkpoint's own multi-token-prediction head, chained.

The head's lane holds one row per position p, made from the target's hidden state at p and the token at p + 1. Rows of
committed positions always come from the target: what a chain wrote from the head's own hidden states is overwritten
once the target has read those tokens. The prompt is the first thing observed, so the lane starts full.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from surefoot.drafters.lane import Lane
from surefoot.errors import InputError, shown
from surefoot.kernels.rows import padded_rows
from surefoot.model import DraftHead, MTPHead
from surefoot.model.spans import Layout, into_passes
from surefoot.sequence import Sequence
from surefoot.types import Draft, Kept
from surefoot.verify import draft_row, draft_token

BULK_ROWS = 16  # observed rows above which a prefill pass fills the lane, not the draft's first pass
MOST_PENDING = 64  # observed rows that may wait for a draft: while none is asked for, one bulk pass serves them all


def check_confidence(min_confidence: float) -> None:
    """Raise InputError for a threshold that no product of probabilities, or every one, falls below."""
    number = isinstance(min_confidence, (int, float)) and not isinstance(min_confidence, bool)
    if not number or not 0.0 <= min_confidence < 1.0:
        raise InputError(f"min_confidence: expected at least 0 and below 1, found {shown(min_confidence)}")


class MTPDrafter:
    """Drafts greedily at temperature 0 and by the request's acceptance rule above it, among the tokens of `draft_head`
    if there is one. A chain ends after a stop id, and, if `min_confidence` is above 0, after the token up to which the
    head's own probabilities of its most likely tokens multiply to less than that: what is as unlikely as this to be
    kept is drafted (its pass has been paid for), but nothing behind it."""

    name = "mtp"
    part: str | None = Lane.part

    def __init__(
        self, head: MTPHead, slots: int, min_confidence: float = 0.0, draft_head: DraftHead | None = None
    ) -> None:
        check_confidence(min_confidence)
        self._head = head
        self._lane = Lane(head, head.build_lane(slots), slots, MOST_PENDING)
        self._lm_head = draft_head or head.decoder
        self._min_confidence = min_confidence

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Remember the target's hidden states; long runs of them enter the lane right away."""
        self._lane.observe(sequence, position, hidden)

    def keep(self, sequence: Sequence, start: int, stop: int) -> Kept:
        """Copy the lane's rows and the states that wait."""
        return self._lane.keep(sequence.slot, start, stop)

    def resume(self, sequence: Sequence, kept: Seq[Kept]) -> None:
        """Put them back."""
        self._lane.resume(sequence.slot, kept)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """Chain the head up to `depths[i]` times behind each sequence; nothing where nothing was observed yet."""
        for sequence, depth in zip(sequences, depths, strict=True):
            if depth > 0:
                self._lane.fill(sequence, BULK_ROWS)
        chains = [
            _Chain(sequence, depth, *pending)
            for sequence, depth in zip(sequences, depths, strict=True)
            if depth > 0 and (pending := self._lane.pending[sequence.slot]) is not None
        ]
        running = chains
        while running:
            counts = [chain.hidden.shape[0] for chain in running]
            passes = into_passes(running, counts, self._head.decoder.device)
            running = [chain for part in passes for chain in self._extend(part)]
        for chain in chains:  # the rows they held are in the lane for good now
            self._lane.release(chain.sequence.slot)
        by_slot = {chain.sequence.slot: chain.draft() for chain in chains}
        return [by_slot.get(sequence.slot, Draft(source=self.name)) for sequence in sequences]

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence; its lane is overwritten by the slot's next one."""
        self._lane.release(sequence.slot)

    def _extend(self, chains: list[_Chain]) -> list[_Chain]:
        """Draft one more token for each chain in one pass; returns those that go on."""
        decoder = self._head.decoder
        device, least = decoder.device, decoder.linear.least_rows
        layout = Layout.of([(c.sequence.slot, c.position, c.hidden.shape[0]) for c in chains], device, least)
        hidden = torch.cat([c.hidden for c in chains])
        out = self._head.decode(hidden, [t for c in chains for t in c.following()], self._lane.cache, layout)
        last = [span.row + span.count - 1 for span in layout.spans]
        padding = padded_rows(len(last), device, least) - len(last)
        out = out[last + last[:1] * padding]
        logits = self._lm_head.logits(out)
        return [c for c, row, h in zip(chains, logits, out, strict=False) if c.accepts(row, h, self._min_confidence)]


class _Chain:
    """One sequence's draft while it grows: the rows to feed next, and the tokens drafted so far."""

    def __init__(self, sequence: Sequence, depth: int, position: int, hidden: Tensor) -> None:
        self.sequence, self.depth = sequence, depth
        self.position, self.hidden = position, hidden
        self._tokens: list[int] = []
        self._probs: list[Tensor] = []
        self._confidence = 1.0

    def following(self) -> list[int]:
        """The tokens that follow the rows to feed."""
        start = self.position + 1
        known = self.sequence.tokens[start : start + self.hidden.shape[0]]
        return known or self._tokens[-1:]

    def accepts(self, logits: Tensor, hidden: Tensor, min_confidence: float) -> bool:
        """Draft a token from logits [V]; whether the chain goes on, from the head's own hidden [H]."""
        start = len(self.sequence.tokens)
        row = draft_row(self.sequence, logits, self._tokens)
        if row is None:
            return False
        token, probs = draft_token(row, self.sequence.params, start + len(self._tokens), start)
        self._tokens.append(token)
        if probs is not None:
            self._probs.append(probs)
        self.position += self.hidden.shape[0]
        self.hidden = hidden.unsqueeze(0)
        if len(self._tokens) == self.depth or token in self.sequence.stop_ids:
            return False
        # The rows decide, not what was drawn from them: a token that is dropped, or drafted, because of what it is
        # would make the drafts that remain follow another distribution than the one handed over.
        if min_confidence > 0:
            self._confidence *= logits.softmax(-1).amax().item()
        return self._confidence >= min_confidence

    def draft(self) -> Draft:
        probs = torch.stack(self._probs) if self._probs else None
        return Draft(tuple(self._tokens), probs, MTPDrafter.name)
