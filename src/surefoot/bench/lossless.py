"""What must hold before a number is printed: every way to decode gives plain decoding's tokens, and a window's rows are
those of single steps, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import zip_longest

import torch

from surefoot.bench.passes import Passes
from surefoot.bench.prompts import random_tokens
from surefoot.bench.settings import PLAIN
from surefoot.errors import NumericalError


class NotLosslessError(NumericalError):
    """Something differs from plain decoding; the message says what, and nothing was measured."""


@dataclass(frozen=True)
class Verdict:
    """What was compared, all of it equal: greedy `tokens` of each of the `prompts` by the `methods`, and logits of
    windows of the `window_sizes` at so many `positions` behind a context."""

    identical: bool
    methods: list[str]
    prompts: int
    batch: int
    tokens: int
    window_sizes: list[int]
    positions: int


Outputs = list[list[int]]  # by prompt


def check_outputs(found: Mapping[str, Outputs]) -> None:
    """Compare every method's tokens with plain's. Raises NotLosslessError naming all that differ."""
    differing = [
        f"{name}, prompt {number}: token {first}"
        for name, outputs in found.items()
        for number, first in _differences(found[PLAIN], outputs)
    ]
    if differing:
        raise NotLosslessError(
            f"not lossless, so nothing was measured: {'; '.join(differing)} differs from plain decoding's"
        )


def _differences(expected: Outputs, found: Outputs) -> Iterator[tuple[int, int]]:
    for number, (right, own) in enumerate(zip(expected, found, strict=True)):
        wrong = [i for i, (a, b) in enumerate(zip_longest(right, own)) if a != b]
        if wrong:
            yield number, wrong[0]


def check_windows(passes: Passes, sizes: Seq[int]) -> int:
    """Compare windows of the sizes, of which about half are committed, with single steps; returns the number of
    positions compared. Raises NotLosslessError."""
    keeps = [1 + size // 2 for size in sizes]
    count = sum(keeps) + max(sizes)
    tokens = random_tokens(passes.vocab_size, passes.context + count)[passes.context :]
    passes.start()
    single = torch.cat([passes.read(tokens[position : position + 1], 1) for position in range(count)])
    passes.start()
    position = 0
    for size, keep in zip(sizes, keeps, strict=True):
        rows = passes.read(tokens[position : position + size], keep)
        if not torch.equal(rows, single[position : position + size]):
            raise NotLosslessError(f"not lossless, so nothing was measured: logits of a window of {size} tokens at "
                              f"{passes.context + position} differ from those of single steps")  # fmt: skip
        position += keep
    return position - keeps[-1] + sizes[-1]
