"""A small second model as drafter: it decodes a few tokens ahead of the target, one after the other.

The first draft token comes from the pass that reads what was emitted since the last draft, each further one from a pass
over its predecessor: K passes for K tokens. Tokens read as guesses have to be taken back when the target refuses one,
so the draft model's slot is marked where the certain tokens end and rewound to there (a `DraftTarget`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from surefoot.errors import InputError
from surefoot.sequence import Sequence
from surefoot.types import Draft, Target, Window
from surefoot.verify import draft_row, draft_token

CATCH_UP = 32  # tokens read in one pass when several were emitted since the last draft


class DraftTarget(Target, Protocol):
    """A Target that can take committed tokens back."""

    def mark(self, slot: int) -> None:
        """Remember the slot's committed state, in the place of an earlier mark. No window may be open."""

    def rewind(self, slot: int) -> None:
        """Return to the mark: what was committed since is forgotten. The mark stays."""


@dataclass
class _Reading:
    """What the draft model has read of a sequence: its first `known` tokens (the mark stands behind them), then
    `guesses`, its own drafts. `logits` [V] follow the known tokens."""

    sequence: Sequence
    known: int
    guesses: list[int] = field(default_factory=list)
    logits: Tensor | None = None


class DraftModelDrafter:
    """Drafts with `model`, whose slots stand beside those of the target whose vocabulary has `vocab_size` tokens.

    Under coupled acceptance and at temperature 0 it proposes what the target would choose if it had the draft model's
    logits; under rejection it samples, and hands its distributions over. A draft ends at a stop token. A sequence that
    outgrows the draft model's context gets no more drafts.

    Raises InputError if the vocabularies differ, or for a sequence in a slot that the draft model does not have.
    """

    name = "draft-model"
    part: str | None = None  # it reads the whole prompt itself

    def __init__(self, model: DraftTarget, vocab_size: int) -> None:
        if model.vocab_size != vocab_size:
            raise InputError(f"draft model: expected a vocabulary of {vocab_size} tokens, found {model.vocab_size}")
        self._model = model
        self._readings: dict[int, _Reading] = {}  # by slot

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """At most `depths[i]` tokens each; the sequences that still draft share every pass of the model."""
        # The token that ends a draft is not read, so a draft may reach one past the context.
        rooms = [
            min(depth, self._model.max_len + 1 - len(s.tokens)) for s, depth in zip(sequences, depths, strict=True)
        ]
        active = [(i, s) for i, s in enumerate(sequences) if rooms[i] > 0]
        rows = dict(zip((i for i, _ in active), self._catch_up([s for _, s in active]), strict=True))
        tokens: list[list[int]] = [[] for _ in sequences]
        probs: list[list[Tensor]] = [[] for _ in sequences]
        while active:
            for i, s in active:
                row = draft_row(s, rows[i], tokens[i])
                if row is None:
                    rooms[i] = len(tokens[i])
                    continue
                token, drawn_from = draft_token(row, s.params, len(s.tokens) + len(tokens[i]), start=len(s.tokens))
                tokens[i].append(token)
                if drawn_from is not None:
                    probs[i].append(drawn_from)
            active = [(i, s) for i, s in active if len(tokens[i]) < rooms[i] and tokens[i][-1] not in s.stop_ids]
            guesses = [(self._readings[s.slot], [tokens[i][-1]]) for i, s in active]
            rows = dict(zip((i for i, _ in active), self._read(guesses), strict=True))
            for reading, guess in guesses:
                reading.guesses += guess
        return [Draft(tuple(t), torch.stack(p) if p else None, self.name) for t, p in zip(tokens, probs, strict=True)]

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Read the prompt when it is first seen; later tokens are read when a draft is asked for."""
        self._reading(sequence)

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence, in the draft model too."""
        reading = self._readings.pop(sequence.slot, None)
        if reading is not None:
            self._model.release(sequence.slot)

    def _reading(self, sequence: Sequence) -> _Reading | None:
        """The sequence's reading, begun if there is none; None if the sequence is too long to begin."""
        slot = sequence.slot
        reading = self._readings.get(slot)
        if reading is not None and reading.sequence is sequence:
            return reading
        if not 0 <= slot < self._model.slots:
            raise InputError(
                f"slot {slot}: expected a draft model with more than {slot} slots, found {self._model.slots}"
            )
        if len(sequence.tokens) > self._model.max_len:
            return None
        for _ in self._model.prefill(slot, sequence.tokens[:-1]):
            pass
        self._model.mark(slot)
        self._readings[slot] = reading = _Reading(sequence, len(sequence.tokens) - 1)
        return reading

    def _catch_up(self, sequences: Seq[Sequence]) -> list[Tensor]:
        """Read every sequence to its end and mark it; the logits [V] that follow each."""
        behind: list[tuple[_Reading, list[int]]] = []
        readings = []
        for sequence in sequences:
            reading = self._reading(sequence)
            assert reading is not None  # the caller has asked for sequences that fit
            readings.append(reading)
            end = reading.known + len(reading.guesses)
            if sequence.tokens[reading.known : end] == reading.guesses:
                reading.known = end
            else:
                self._model.rewind(sequence.slot)
            reading.guesses = []
            rest = sequence.tokens[reading.known :]
            while len(rest) > CATCH_UP:  # another drafter was busy for a while
                self._read([(reading, rest[:CATCH_UP])])
                rest = rest[CATCH_UP:]
            if rest:
                behind.append((reading, rest))
        for (reading, _), logits in zip(behind, self._read(behind), strict=True):
            reading.known = len(reading.sequence.tokens)
            reading.logits = logits
            self._model.mark(reading.sequence.slot)
        rows = []
        for reading in readings:
            assert reading.logits is not None
            rows.append(reading.logits)
        return rows

    def _read(self, windows: Seq[tuple[_Reading, list[int]]]) -> list[Tensor]:
        """Read tokens into their sequences' slots in one pass; the logits [V] after each one's last."""
        if not windows:
            return []
        scores = self._model.verify([Window(reading.sequence.slot, tuple(tokens)) for reading, tokens in windows])
        for reading, tokens in windows:
            self._model.commit(reading.sequence.slot, keep=len(tokens))
        return [score.logits[-1] for score in scores]
