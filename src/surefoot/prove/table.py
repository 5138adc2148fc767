"""A target and drafters small enough to enumerate: a table for a model, and a strict reading of the Protocols.

What runs over them is the engine's own loop, with its own acceptance rules. A broken loop fails an assertion here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surefoot.engine import loop
from surefoot.engine.loop import StepRecord
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter, Scores, Window
from surefoot.verify import Rules, choose, draft_token, probabilities, ruled

Row = Callable[[tuple[int, ...]], Tensor]
"""From everything read so far to the logits [V] of what follows."""


def hashed_rows(vocab_size: int, salt: int = 0, scale: float = 1.5, order: int | None = None) -> Row:
    """Random logits that depend on the whole prefix, so that one wrong token in a state changes all that follows; on
    its last `order` tokens if that is given, so that the text repeats itself."""
    table: dict[tuple[int, ...], Tensor] = {}

    def row(prefix: tuple[int, ...]) -> Tensor:
        seen = prefix if order is None else prefix[max(0, len(prefix) - order) :]
        if seen not in table:
            source = random.Random(hash((salt, *seen)))  # a tuple of integers: the same hash in every process
            table[seen] = torch.tensor([scale * source.gauss(0, 1) for _ in range(vocab_size)])
        return table[seen]

    return row


def steady_rows(*chances: float) -> Row:
    """The same law behind every prefix."""
    row = torch.tensor(chances).log()
    return lambda prefix: row


class TableTarget:
    """A Target over a function of the prefix. It holds only what was committed and fails on any misuse: a window that
    does not follow the slot's last commit, a commit without a window, a keep outside 1 .. W."""

    def __init__(self, row: Row, vocab_size: int, max_len: int = 4096, slots: int = 8, hidden: bool = False) -> None:
        self.vocab_size, self.max_len, self.slots = vocab_size, max_len, slots
        self.row = row
        self.committed: dict[int, list[int]] = {}
        self.windows: dict[int, tuple[int, ...]] = {}
        self.verified = 0  # verify passes
        self._hidden = hidden

    def prefill(self, slot: int, tokens: Seq[int]) -> Iterator[tuple[int, Tensor | None]]:
        """Chunks of three tokens."""
        assert 0 <= slot < self.slots
        self.windows.pop(slot, None)
        self.committed[slot] = []
        for position in range(0, len(tokens), 3):
            chunk = self._checked(tokens[position : position + 3])
            self.committed[slot] += chunk
            yield position, self._state(chunk)

    def verify(self, windows: Seq[Window]) -> list[Scores]:
        """The rows of every window."""
        self.verified += 1
        assert len({window.slot for window in windows}) == len(windows)
        answers = []
        for window in windows:
            assert window.slot not in self.windows, "a window before the last one was committed"
            assert window.tokens
            prefix = self.committed[window.slot] + self._checked(window.tokens)
            assert len(prefix) <= self.max_len
            start = len(prefix) - len(window.tokens)
            logits = torch.stack([self.row(tuple(prefix[: i + 1])) for i in range(start, len(prefix))])
            self.windows[window.slot] = window.tokens
            answers.append(Scores(logits, self._state(window.tokens)))
        return answers

    def commit(self, slot: int, keep: int) -> None:
        """Keep the window's first tokens."""
        window = self.windows.pop(slot)
        assert 1 <= keep <= len(window)
        self.committed[slot] += window[:keep]

    def release(self, slot: int) -> None:
        """Empty the slot."""
        self.committed.pop(slot)
        self.windows.pop(slot, None)

    def _checked(self, tokens: Seq[int]) -> list[int]:
        assert all(0 <= token < self.vocab_size for token in tokens), "a placeholder reached the target"
        return list(tokens)

    def _state(self, tokens: Seq[int]) -> Tensor | None:
        return torch.tensor(tokens, dtype=torch.float32)[:, None] if self._hidden else None


class Scripted:
    """A drafter whose tokens come from `token(sequence, prefix)`, one after another. Checks that it is shown every
    committed position once and in order."""

    name = "scripted"

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """The next token behind `prefix`, and the distribution it was drawn from (None: certain)."""
        raise NotImplementedError  # each scripted drafter has its own

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """Token by token."""
        return [self._draft(sequence, depth) for sequence, depth in zip(sequences, depths, strict=True)]

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Check that it follows what was shown before."""
        assert position in (0, self.seen.get(sequence.slot))  # 0 is a new sequence in the slot
        # Without hidden states the call does not say how many positions it shows: all but the last token.
        self.seen[sequence.slot] = len(sequence.tokens) - 1 if hidden is None else position + len(hidden)
        assert self.seen[sequence.slot] < len(sequence.tokens)

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self.seen.pop(sequence.slot, None)

    def _draft(self, sequence: Sequence, depth: int) -> Draft:
        assert depth >= 0
        prefix, probs = tuple(sequence.tokens), []
        for _ in range(depth):
            token, row = self.token(sequence, prefix)
            prefix += (token,)
            if row is not None:
                probs.append(row)
        return Draft(prefix[len(sequence.tokens) :], torch.stack(probs) if probs else None, self.name)


class Right(Scripted):
    """Knows the target: always proposes its own choice (at rejection acceptance, its most likely token)."""

    name = "right"

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.row = row

    def ruled(self, sequence: Sequence, prefix: tuple[int, ...]) -> Tensor:
        """The row that follows a prefix, by the sequence's rules, [1, V]."""
        return ruled(sequence, self.row(prefix)[None], prefix[len(sequence.tokens) :])

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """The target's own choice."""
        return choose(self.ruled(sequence, prefix), sequence.params, len(prefix))[0], None


class Wrong(Right):
    """Always proposes another token than `Right`."""

    name = "wrong"

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """Its neighbour."""
        return (super().token(sequence, prefix)[0] + 1) % len(self.row(prefix)), None


class Sometimes(Right):
    """Right or wrong by a hash of the prefix, two in three times right."""

    name = "sometimes"

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """Its neighbour, now and then."""
        shift = int(hash(prefix) % 3 == 0)
        return (super().token(sequence, prefix)[0] + shift) % len(self.row(prefix)), None


class Argmax(Right):
    """A point mass on the most likely token of its own rows."""

    name = "argmax"

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """The likeliest one."""
        return int(self.row(prefix).argmax()), None


class Sampled(Right):
    """Draws from its own rows as the request's acceptance rule wants it."""

    name = "sampled"

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """A drawn one, and what it was drawn from."""
        row = self.ruled(sequence, prefix)[0]
        return draft_token(row, sequence.params, len(prefix), start=len(sequence.tokens))


class Liar(Sampled):
    """Draws like `Sampled`, then says that it drew from something else."""

    name = "liar"

    def __init__(self, row: Row, lie: Row) -> None:
        super().__init__(row)
        self.lie = lie

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """A drawn one, and something else."""
        token, _ = super().token(sequence, prefix)
        return token, probabilities(self.lie(prefix)[None], sequence.params)[0]


@dataclass
class Run:
    """What a run of one sequence gave."""

    sequence: Sequence
    records: list[StepRecord] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """The emitted tokens."""
        return self.sequence.output


def decode(
    target: TableTarget,
    drafter: Drafter,
    params: SamplingParams,
    depth: int,
    prompt: Seq[int] = (1, 2, 0, 1),
    stop: Seq[int] = (),
    **rules: Any,
) -> Run:
    """Decode one sequence to its end in slot 0 and check what the target holds afterwards. `rules` are further
    arguments of `Rules`; a grammar comes from a function."""
    return decode_batch(target, drafter, [(prompt, params)], depth, stop, **rules)[0]


def decode_batch(
    target: TableTarget,
    drafter: Drafter,
    requests: Seq[tuple[Seq[int], SamplingParams]],
    depth: int,
    stop: Seq[int] = (),
    **rules: Any,
) -> list[Run]:
    """Decode several sequences together, each until it ends."""
    runs = []
    for slot, (prompt, params) in enumerate(requests):
        stops = frozenset((*stop, *params.stop_token_ids))
        sequence = Sequence(slot, list(prompt), params, len(prompt) + params.max_new_tokens, stops)
        if params.ruled or rules:
            made = {name: value() if name == "grammar" else value for name, value in rules.items()}
            sequence.rules = Rules(params, prompt, stop_ids=stops, **made)
        runs.append(Run(sequence))
        for _ in loop.prefill(runs[-1].sequence, drafter, target):  # one turn per chunk
            pass
    while running := [run for run in runs if run.sequence.finish_reason is None]:
        for run, record in zip(running, loop.step([r.sequence for r in running], drafter, target, depth), strict=True):
            run.records.append(record)
            # All but the last token, whatever was accepted and wherever the output ended.
            assert target.committed[run.sequence.slot] == run.sequence.tokens[:-1]
    for run in runs:
        target.release(run.sequence.slot)
        drafter.release(run.sequence)
    return runs
