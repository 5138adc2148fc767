"""A target and drafters small enough to enumerate: a table for a model, and a strict reading of the Protocols.

One long file: the fakes build on one another, and tests of every part draw on them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.engine.loop import StepRecord, prefill, step
from surefoot.engine.target import DecoderTarget
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter, Scores, Verdict, Window
from surefoot.verify import Rules, acceptance, choose, draft_token, probabilities, process, ruled

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]

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
        window = self.windows.pop(slot)
        assert 1 <= keep <= len(window)
        self.committed[slot] += window[:keep]

    def release(self, slot: int) -> None:
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
        raise NotImplementedError  # each scripted drafter has its own

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        return [self._draft(sequence, depth) for sequence, depth in zip(sequences, depths, strict=True)]

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        assert position in (0, self.seen.get(sequence.slot))  # 0 is a new sequence in the slot
        # Without hidden states the call does not say how many positions it shows: all but the last token.
        self.seen[sequence.slot] = len(sequence.tokens) - 1 if hidden is None else position + len(hidden)
        assert self.seen[sequence.slot] < len(sequence.tokens)

    def release(self, sequence: Sequence) -> None:
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
        return choose(self.ruled(sequence, prefix), sequence.params, len(prefix))[0], None


class Wrong(Right):
    """Always proposes another token than `Right`."""

    name = "wrong"

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        return (super().token(sequence, prefix)[0] + 1) % len(self.row(prefix)), None


class Sometimes(Right):
    """Right or wrong by a hash of the prefix, two in three times right."""

    name = "sometimes"

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        shift = int(hash(prefix) % 3 == 0)
        return (super().token(sequence, prefix)[0] + shift) % len(self.row(prefix)), None


class Argmax(Right):
    """A point mass on the most likely token of its own rows."""

    name = "argmax"

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        return int(self.row(prefix).argmax()), None


class Sampled(Right):
    """Draws from its own rows as the request's acceptance rule wants it."""

    name = "sampled"

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        row = self.ruled(sequence, prefix)[0]
        return draft_token(row, sequence.params, len(prefix), start=len(sequence.tokens))


class Liar(Sampled):
    """Draws like `Sampled`, then says that it drew from something else."""

    name = "liar"

    def __init__(self, row: Row, lie: Row) -> None:
        super().__init__(row)
        self.lie = lie

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        token, _ = super().token(sequence, prefix)
        return token, probabilities(self.lie(prefix)[None], sequence.params)[0]


class Ragged(Scripted):
    """Another drafter's drafts, cut to a length that changes from step to step, 0 included."""

    name = "ragged"

    def __init__(self, inner: Scripted) -> None:
        super().__init__()
        self.inner = inner

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        cut = [min(depth, len(s.tokens) * 7 % 5) for s, depth in zip(sequences, depths, strict=True)]
        return self.inner.propose(sequences, cut)


def decided(logits: Tensor, params: SamplingParams, tolerance: float) -> Tensor:
    """Whether top_p's verdict on each token is clear, [n, V] bool: not where the probability of all better ones lies
    within `tolerance` of top_p. Two devices may differ there, since they add up rounded numbers in another order.
    Computed in float64 on the CPU."""
    scaled = process(logits.cpu(), replace(params, top_p=1.0, min_p=0.0)).double()
    ranked = scaled.sort(dim=-1, descending=True, stable=True)  # of equals the lowest id first
    mass = ranked.values.softmax(dim=-1)
    before = torch.empty_like(mass).scatter_(-1, ranked.indices, mass.cumsum(dim=-1) - mass)
    return (before - params.top_p).abs() > tolerance if params.top_p < 1 else torch.ones_like(before, dtype=torch.bool)


def assert_same_kept(one: Tensor, other: Tensor, logits: Tensor, params: SamplingParams) -> None:
    """Two devices kept the same tokens of `logits` [n, V], wherever top_p's verdict is clear: of nearly all tokens. A
    float32 softmax of 248,320 logits was seen to be off by 2e-5 of its mass."""
    clear = decided(logits, params, tolerance=1e-4)
    assert (~clear).sum(dim=-1).max() <= 64
    assert torch.equal(one.isfinite().cpu()[clear], other.isfinite().cpu()[clear])


@dataclass
class Run:
    """What a run of one sequence gave."""

    sequence: Sequence
    records: list[StepRecord] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
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
        for _ in prefill(runs[-1].sequence, drafter, target):  # one turn per chunk
            pass
    while running := [run for run in runs if run.sequence.finish_reason is None]:
        for run, record in zip(running, step([r.sequence for r in running], drafter, target, depth), strict=True):
            run.records.append(record)
            # All but the last token, whatever was accepted and wherever the output ended.
            assert target.committed[run.sequence.slot] == run.sequence.tokens[:-1]
    for run in runs:
        target.release(run.sequence.slot)
        drafter.release(run.sequence)
    return runs


class Dice:
    """Walks through every outcome of a random program: `roll(chances)` returns each index in turn over repeated runs,
    and `chance` is the probability of the run just made."""

    def __init__(self) -> None:
        self._path: list[tuple[int, tuple[float, ...]]] = []
        self._depth = 0

    @property
    def chance(self) -> float:
        return math.prod(chances[index] for index, chances in self._path)

    def roll(self, chances: Seq[float]) -> int:
        """An index of positive chance."""
        if self._depth == len(self._path):
            self._path.append((next(i for i, chance in enumerate(chances) if chance > 0), tuple(chances)))
        index, _ = self._path[self._depth]
        self._depth += 1
        return index

    def outcomes(self) -> Iterator[None]:
        """One iteration per outcome; run the program inside the loop."""
        while True:
            self._depth = 0
            yield
            while self._path:
                index, chances = self._path.pop()
                later = next((i for i, c in enumerate(chances) if i > index and c > 0), None)
                if later is not None:
                    self._path.append((later, chances))
                    break
            else:
                return


@contextmanager
def every_verdict(dice: Dice) -> Iterator[None]:
    """Within, verification under the p/q rule takes every outcome in turn.

    Its uniforms are replaced by the middles of the intervals on which its verdict is constant, and each interval is
    taken with its length as its chance. The verdict itself is the engine's own.
    """
    judge = acceptance._accept

    def judge_every_outcome(tokens: Tensor, p: Tensor, q: Tensor | None, draws: Tensor) -> Verdict:
        uniforms, stopped = [], None
        for i, token in enumerate(tokens.tolist()):
            ratio = p[i, token].item() / (1.0 if q is None else q[i, token].item())
            kept = min(1.0, ratio)
            refused = dice.roll((kept, 1 - kept)) == 1 if stopped is None else True
            uniforms.append((1 + kept) / 2 if refused else kept / 2)
            if refused and stopped is None:
                stopped = i
        last = p[len(tokens) if stopped is None else stopped].double().tolist()
        if stopped is not None:
            token = int(tokens[stopped])
            minus = [float(x == token) for x in range(len(last))] if q is None else q[stopped].double().tolist()
            last = [max(0.0, x - y) for x, y in zip(last, minus, strict=True)]
        chances = [x / sum(last) for x in last]
        index = dice.roll(chances)
        uniforms.append(sum(chances[:index]) + chances[index] / 2)
        return judge(tokens, p, q, torch.tensor([min(u, 1 - 2**-53) for u in uniforms], dtype=torch.float64))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "_accept", judge_every_outcome)
        yield


def exact_law(
    row: Row, params: SamplingParams, prompt: Seq[int], length: int, stop: Seq[int] = (), **rules: Any
) -> dict[tuple[int, ...], float]:
    """The target's own law of the next `length` tokens (fewer, where a stop id ends them), from its rows one at a time,
    ruled by fresh `Rules` and processed. `rules` are as `decode` takes them."""
    law: dict[tuple[int, ...], float] = {}

    def grow(output: tuple[int, ...], chance: float) -> None:
        if len(output) == length or (output and output[-1] in stop):
            law[output] = chance
            return
        made = {name: value() if name == "grammar" else value for name, value in rules.items()}
        history = (*prompt, *output)
        ruled_row = Rules(params, prompt, stop_ids=stop, **made).rows(row(history)[None], history, ())
        for token, share in enumerate(probabilities(ruled_row, params)[0].tolist()):
            if share > 0:
                grow((*output, token), chance * share)

    grow((), 1.0)
    return law


class ListGrammar:
    """A `verify.rules.Grammar` of a few texts, each a list of tokens that a stop id must follow."""

    def __init__(self, texts: Seq[Seq[int]], ends: Seq[int], vocab_size: int) -> None:
        self.texts, self._ends, self.size = [tuple(text) for text in texts], tuple(ends), vocab_size
        self.read: tuple[int, ...] = ()

    def following(self) -> set[int]:
        begun = len(self.read)
        return {text[begun] for text in self.texts if len(text) > begun and text[:begun] == self.read}

    def push(self, token: int) -> bool:
        fits = token in self.following()
        self.read += (token,) * fits
        return fits

    def pop(self, count: int) -> None:
        assert 0 <= count <= len(self.read)
        self.read = self.read[: len(self.read) - count]

    def mask(self) -> Tensor:
        mask = torch.zeros(self.size, dtype=torch.bool)
        mask[list(self.following())] = True
        return mask

    def ends(self) -> tuple[int, ...]:
        return self._ends if self.read in self.texts else ()

    def complete(self) -> bool:
        return not self.following()

    def forced(self) -> list[int]:
        begun = len(self.read)
        tokens: list[int] = []
        while len(following := self.following()) == 1 and not self.ends():
            tokens += following
            self.push(tokens[-1])
        self.read = self.read[:begun]
        return tokens


def keep_drafts_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage checkpoints' targets: every draft token is made the likeliest, and so kept."""
    honest = DecoderTarget.verify

    def verify(self: DecoderTarget, windows: Seq[Window]) -> list[Scores]:
        scores = honest(self, windows)
        for window, score in zip(windows, scores, strict=True):
            for row, token in enumerate(window.tokens[1:]):
                score.logits[row, token] += 1e6
        return scores

    monkeypatch.setattr(DecoderTarget, "verify", verify)
