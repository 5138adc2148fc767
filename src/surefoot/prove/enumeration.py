"""The exact law of the engine's loop on a table: every draw of the drafter and of verification in turn."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from surefoot.prove.table import Right, Row, Scripted, TableTarget, decode
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Verdict
from surefoot.verify import Rules, acceptance, probabilities

Law = dict[Any, float]
"""Chances of outputs (tuples of tokens)."""

NEAR_END = 1e-5  # of an interval, where its ends are tried


class Dice:
    """Walks through every outcome of a random program: `roll(chances)` returns each index in turn over repeated runs,
    and `chance` is the probability of the run just made."""

    def __init__(self) -> None:
        self._path: list[tuple[int, tuple[float, ...]]] = []
        self._depth = 0

    @property
    def chance(self) -> float:
        """The probability of the outcome that was just run."""
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
def every_verdict(dice: Dice, place: float = NEAR_END) -> Iterator[None]:
    """Within, verification under the p/q rule takes every outcome in turn.

    Its uniforms are replaced by those that stand at `place` (above 0, below 1) in the intervals on which the right
    rule's verdict is constant, and each interval is taken with its length as its chance. The verdict itself is the
    engine's own.
    """
    judge = acceptance._accept

    def judge_every_outcome(tokens: Tensor, p: Tensor, q: Tensor | None, draws: Tensor) -> Verdict:
        uniforms, stopped = [], None
        for i, token in enumerate(tokens.tolist()):
            ratio = p[i, token].item() / (1.0 if q is None else q[i, token].item())
            kept = min(1.0, ratio)
            refused = dice.roll((kept, 1 - kept)) == 1 if stopped is None else True
            uniforms.append(kept + (1 - kept) * place if refused else kept * place)
            if refused and stopped is None:
                stopped = i
        last = p[len(tokens) if stopped is None else stopped].double().tolist()
        if stopped is not None:
            token = int(tokens[stopped])
            minus = [float(x == token) for x in range(len(last))] if q is None else q[stopped].double().tolist()
            last = [max(0.0, x - y) for x, y in zip(last, minus, strict=True)]
        chances = [x / sum(last) for x in last]
        index = dice.roll(chances)
        uniforms.append(sum(chances[:index]) + chances[index] * place)
        return judge(tokens, p, q, torch.tensor([min(u, 1 - 2**-53) for u in uniforms], dtype=torch.float64))

    acceptance._accept = judge_every_outcome  # type: ignore[assignment]  # called by position
    try:
        yield
    finally:
        acceptance._accept = judge


def exact_law(
    row: Row, params: SamplingParams, prompt: Seq[int], length: int, stop: Seq[int] = (), **rules: Any
) -> Law:
    """The target's own law of the next `length` tokens (fewer, where a stop id ends them), from its rows one at a time,
    ruled by fresh `Rules` and processed. `rules` are as `decode` takes them."""
    law: Law = {}

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


class EveryOutcome(Scripted):
    """Wraps a drafter: each token of positive draft probability is drafted in turn."""

    def __init__(self, dice: Dice, inner: Scripted) -> None:
        super().__init__()
        self.dice, self.inner = dice, inner

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """The inner drafter's, with the draw made by the dice."""
        token, claimed = self.inner.token(sequence, prefix)
        if claimed is None:
            return token, None
        assert isinstance(self.inner, Right)
        drawn_from = probabilities(self.inner.ruled(sequence, prefix), sequence.params)[0]
        return self.dice.roll(drawn_from.tolist()), claimed


def loop_law(
    row: Row,
    drafter: Scripted,
    params: SamplingParams,
    depth: int,
    prompt: Seq[int],
    stop: Seq[int] = (),
    every: Callable[[Dice, Scripted], Scripted] = EveryOutcome,
    **rules: Any,
) -> Law:
    """The exact law of what the loop puts out over a table's rows, at rejection acceptance. All uniforms are tried near
    the lower ends of their intervals, then near the upper ones: so a verdict that changes within an interval shows.
    `every` wraps the drafter; `rules` are as `decode` takes them."""
    law = defaultdict[tuple[int, ...], float](float)
    vocab_size = len(row(tuple(prompt)))
    for place in (NEAR_END, 1 - NEAR_END):
        dice = Dice()
        with every_verdict(dice, place):
            for _ in dice.outcomes():
                run = decode(TableTarget(row, vocab_size), every(dice, drafter), params, depth, prompt, stop, **rules)
                law[tuple(run.output)] += dice.chance / 2
    return law


def distance(one: Law, other: Law) -> float:
    """Half the sum of absolute differences (total variation)."""
    return sum(abs(one.get(x, 0.0) - other.get(x, 0.0)) for x in {*one, *other}) / 2
