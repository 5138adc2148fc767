"""Timing single steps: verify passes, draft steps, reads of memory; whatever is timed takes turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial

import torch

from surefoot.drafters.mtp import MTPDrafter
from surefoot.engine.target import DecoderTarget
from surefoot.model import MTPHead
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Window

Action = Callable[[], object]

BURST = 4  # timed calls of one action in a row, after one that is not timed


def take_turns(actions: Mapping[str, Action], rounds: int, before: Action = lambda: None) -> dict[str, float]:
    """Median milliseconds of each action. In every round each has one turn: `before`, one call that warms up, BURST
    timed ones."""
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            before()
            action()
            samples[name] += [timed(action) for _ in range(BURST)]
    return {name: 1000 * statistics.median(values) for name, values in samples.items()}


def timed(action: Action) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def random_tokens(vocab_size: int, count: int) -> list[int]:
    tokens: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    return tokens


def fill(target: DecoderTarget, context: int) -> None:
    """Read `context` random tokens into slot 0 and mark the place."""
    for _ in target.prefill(0, random_tokens(target.vocab_size, context)):
        pass
    target.mark(0)


def step_actions(target: DecoderTarget, head: MTPHead, sizes: Seq[int], context: int) -> dict[str, Action]:
    """What a step is made of, for a target filled to `context` that is rewound between turns.

    "verify N" is a pass over N tokens and the commit of all of them, whose bookkeeping the next pass pays for; "draft"
    is one step of the head, with the LM head and the choice of a token.
    """
    tokens = random_tokens(target.vocab_size, max(sizes))
    drafter = MTPDrafter(head, slots=1)
    hidden = torch.randn(1, head.config.hidden_size, generator=torch.Generator().manual_seed(2))
    text = random_tokens(target.vocab_size, context + 2)
    sequence = Sequence(0, text, SamplingParams(), limit=target.max_len)

    def verify(size: int) -> None:
        target.verify([Window(0, tuple(tokens[:size]))])
        target.commit(0, size)

    def draft() -> None:
        drafter.observe(sequence, context, hidden)
        drafter.propose([sequence], [1])

    return {**{f"verify {size}": partial(verify, size) for size in sizes}, "draft": draft}


def time_steps(target: DecoderTarget, head: MTPHead, sizes: Seq[int], context: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the actions above, alone."""
    fill(target, context)
    times = take_turns(step_actions(target, head, sizes, context), rounds, lambda: target.rewind(0))
    target.release(0)
    return times


def check_windows(target: DecoderTarget, context: int) -> int:
    """Compare windows of 2 to 9 tokens, of which about half are committed, with single steps, bit for bit; returns the
    number of positions compared. Exits with a message if they differ."""
    sizes = range(2, 10)
    keeps = [1 + size // 2 for size in sizes]
    count = sum(keeps) + max(sizes)
    tokens = random_tokens(target.vocab_size, context + count)[context:]

    def read(position: int, size: int, keep: int) -> torch.Tensor:
        scores = target.verify([Window(0, tuple(tokens[position : position + size]))])[0]
        target.commit(0, keep)
        return scores.logits[:size].clone()

    fill(target, context)
    single = torch.cat([read(position, 1, 1) for position in range(count)])
    target.rewind(0)
    position = 0
    for size, keep in zip(sizes, keeps, strict=True):
        if not torch.equal(read(position, size, keep), single[position : position + size]):
            raise SystemExit(f"not lossless: a window of {size} at {context + position} differs from single steps")
        position += keep
    target.release(0)
    return position - keeps[-1] + sizes[-1]
