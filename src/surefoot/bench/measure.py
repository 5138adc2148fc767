"""Tokens per second of every way to decode, taking turns over the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import zip_longest

from surefoot.bench.library import Library
from surefoot.bench.lossless import Outputs, check_outputs
from surefoot.bench.settings import PLAIN, Method
from surefoot.bench.turns import Action, Spread, median_ratio, nothing
from surefoot.engine.engine import Engine
from surefoot.engine.stats import Seconds, Stats
from surefoot.sampling import SamplingParams

LIBRARY = "transformers"
Batch = Seq[list[int]]  # prompts that are decoded together
Prompts = Seq[Batch]


@dataclass(frozen=True)
class Sample:
    """All prompts decoded once: their tokens, the seconds by phase, and how many tokens and steps (of all that ran
    together) took `seconds.decode_s`."""

    outputs: Outputs
    counted: int
    steps: int
    seconds: Seconds
    stats: list[Stats] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One way to decode. Spreads are over the rounds, `to_plain` and `to_library` medians of ratios taken within each;
    `step_ms`, and `seconds` over all prompts, are the median round's. `kept_by_position`: the share of drafts that
    reach a position whose token there was kept; where `acceptance_set`, drafts were overwritten to that end."""

    name: str
    drafter: str
    depth: int
    tokens_per_second: Spread
    step_ms: float
    to_plain: float
    to_library: float | None
    tokens_per_step: float
    kept_by_position: list[float]
    seconds: dict[str, float]
    acceptance_set: bool = False


def decode(engine: Engine, prompts: Batch, params: SamplingParams) -> Sample:
    """One batch of prompts."""
    answers = engine.generate(list(prompts), params)
    outputs = [answer.token_ids for answer in answers]
    stats = [answer.stats for answer in answers]
    # The one that ends last has seen the whole of the batch.
    longest = {name: max(getattr(own, name) for own in stats) for name in vars(Seconds())}
    return Sample(outputs, sum(map(len, outputs)), max(own.steps for own in stats), Seconds(**longest), stats)


def decode_library(library: Library, prompts: Batch, tokens: int) -> Sample:
    """The same by `transformers`; the time of a generate less that of a generate of one token."""
    _, prefill = library.generate(prompts, 1)
    outputs, whole = library.generate(prompts, tokens)
    counted = sum(len(output) - 1 for output in outputs)
    return Sample(outputs, counted, tokens - 1, Seconds(prefill_s=prefill, decode_s=whole - prefill))


def joined(samples: Seq[Sample]) -> Sample:
    """Samples of several batches as one."""
    seconds = {name: sum(getattr(sample.seconds, name) for sample in samples) for name in vars(Seconds())}
    return Sample(
        [output for sample in samples for output in sample.outputs],
        sum(sample.counted for sample in samples),
        sum(sample.steps for sample in samples),
        Seconds(**seconds),
        [stats for sample in samples for stats in sample.stats],
    )


def measure(
    actions: Mapping[str, Callable[[Batch], Sample]],
    prompts: Prompts,
    rounds: int,
    free: Seq[str] = (),
    turn: Action = nothing,
) -> dict[str, list[Sample]]:
    """`rounds` samples of each action over all prompts, by name. Batch after batch, since a prompt that was just read
    need not be read again; on each the actions take turns. `turn()` is called after each. Raises NotLosslessError if an
    output differs from plain's in any round; those of the names in `free` may."""
    parts: dict[str, list[list[Sample]]] = {name: [[] for _ in range(rounds)] for name in actions}
    for batch in prompts:
        for number in range(rounds):
            for name, action in actions.items():
                parts[name][number].append(action(batch))
                turn()
    samples = {name: [joined(batches) for batches in own] for name, own in parts.items()}
    for number in range(rounds):
        check_outputs({name: own[number].outputs for name, own in samples.items() if name not in free})
    return samples


def rates(samples: Iterable[Sample]) -> list[float]:
    """Tokens per second of each round."""
    return [sample.counted / sample.seconds.decode_s for sample in samples]


def make_row(name: str, method: Method | None, samples: Mapping[str, Seq[Sample]], acceptance_set: bool = False) -> Row:
    """What the samples say of one of them; `method` None is `transformers`."""
    own = rates(samples[name])
    stats = samples[name][0].stats  # the same in every round
    emitted, passes = sum(s.tokens for s in stats), sum(s.steps for s in stats)
    order = sorted(range(len(own)), key=lambda i: own[i])
    middle = samples[name][order[len(own) // 2]]
    return Row(
        name,
        "" if method is None else method.drafter,
        0 if method is None else method.depth,
        Spread.of(own),
        1000 * middle.seconds.decode_s / middle.steps,
        median_ratio(own, rates(samples[PLAIN])),
        median_ratio(own, rates(samples[LIBRARY])) if LIBRARY in samples else None,
        emitted / passes if passes else 1.0,
        kept_shares(stats),
        dict(vars(middle.seconds)),
        acceptance_set,
    )


def kept_shares(stats: Iterable[Stats]) -> list[float]:
    """By position: the share of drafts that reach it whose token there was kept. Drafts are shorter at an output's end
    alone, so for a drafter of fixed length this is p1, p1 p2, ... of the steps."""
    stats = list(stats)
    kept = [sum(column) for column in zip_longest(*(s.accepted_by_position for s in stats), fillvalue=0)]
    tried = [sum(column) for column in zip_longest(*(s.proposed_by_position for s in stats), fillvalue=0)]
    return [a / b if b else 0.0 for a, b in zip(kept, tried, strict=True)]
