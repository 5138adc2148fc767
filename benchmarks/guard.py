"""What `drafter="auto"` costs at its worst: the most that any 256 tokens behind the first 64 took longer than plainly.

    python benchmarks/guard.py [--model surefoot-demo] [--threads 1] [--rounds 4] [--texts random teased]

The texts are dictated: the target's logits are computed as ever and then overwritten, so that every pass takes its time
and the text turns where it hurts. In each round both ways decode the same text with what they learned in earlier rounds
forgotten; a token's time is the least of its rounds. Lossless first: both must put out the dictated text. The last
column is the noise: the same of plain decoding against itself.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise

import torch

from surefoot import Engine, SamplingParams
from surefoot.bench.prompts import held_out
from surefoot.drafters.policy import GUARDED, UNGUARDED
from surefoot.engine.loaded import LoadedModel
from surefoot.engine.target import DecoderTarget
from surefoot.types import Drafter, Scores, Target, Window

LENGTH = 720
PROMPT = 32


class Dictated:
    """A target whose every token is the text's."""

    def __init__(self, target: DecoderTarget, text: Seq[int]) -> None:
        self._target, self._text = target, text
        self.vocab_size, self.max_len, self.slots = target.vocab_size, target.max_len, target.slots
        self.prefill, self.commit, self.release = target.prefill, target.commit, target.release

    def verify(self, windows: Seq[Window]) -> list[Scores]:
        """The target's pass, its logits overwritten."""
        starts = [self._target.cache.length[window.slot] for window in windows]
        return [
            replace(scores, logits=self._over(scores.logits, start))
            for scores, start in zip(self._target.verify(windows), starts, strict=True)
        ]

    def _over(self, logits: torch.Tensor, start: int) -> torch.Tensor:
        following = torch.tensor([*self._text, *[0] * len(logits)][start + 1 : start + 1 + len(logits)])
        return logits.fill_(-1.0).scatter_(1, following[:, None], 1.0)


def texts(natural: Seq[int], vocab_size: int) -> dict[str, list[int]]:
    """By name: texts that are easy, hard, and that turn from one to the other and back."""
    dice = random.Random(7)

    def noise(count: int) -> list[int]:
        return [dice.randrange(vocab_size) for _ in range(count)]

    block = list(natural[:24])

    def cycled(*parts: Callable[[], list[int]]) -> Iterator[int]:
        while True:
            for part in parts:
                yield from part()

    def again(times: int) -> Callable[[], list[int]]:
        return lambda: block * times

    def altered() -> list[int]:
        """The block with every sixth token another one: each copy fails soon, after a long agreement."""
        return [dice.randrange(vocab_size) if place % 6 == 5 else token for place, token in enumerate(block)]

    def teased() -> list[int]:
        """Four tokens that stood there before, then something else."""
        place = dice.randrange(len(block) - 4)
        return [*block[place : place + 4], *noise(3)]

    plans: dict[str, tuple[Callable[[], list[int]], ...]] = {
        "natural": (lambda: list(natural),),
        "repeated": (again(1),),
        "random": (lambda: noise(50),),
        "repeated, random, every 300": (again(12), lambda: noise(300)),
        "repeated, random, every 96": (again(4), lambda: noise(96)),
        "repeated, random, every 24": (again(1), lambda: noise(24)),
        "natural, random, every 100": (lambda: list(natural[:100]), lambda: noise(100)),
        "copied with mistakes": (altered,),
        "teased": (lambda: list(block), *[teased] * 20),
    }
    return {name: [token for token, _ in zip(cycled(*parts), range(LENGTH), strict=False)]
            for name, parts in plans.items()}  # fmt: skip


def timeline(target: Target, drafter: Drafter, depth: int, text: list[int]) -> list[float]:
    """Seconds from the end of the prompt to each token of the output; a step's tokens come at its end."""
    engine = Engine(target, drafter, depth)
    params = SamplingParams(max_new_tokens=LENGTH - PROMPT, ignore_eos=True)
    times: list[float] = []
    output: list[int] = []
    start = None
    for record in engine.stream(text[:PROMPT], params):
        now = time.perf_counter()
        start = now if start is None else start  # the first step's time is the prompt's, too
        times += [now - start] * record.emitted
        output += record.tokens
    assert output == text[PROMPT:], "not the dictated text"
    return times


def steps_of(times: Seq[float]) -> list[float]:
    """Seconds from each token to the next."""
    return [after - before for before, after in pairwise(times)]


def fastest_of(rounds: Seq[list[float]]) -> list[float]:
    """The timeline of the least times of every token."""
    least, clock = [0.0], 0.0
    for own in zip(*map(steps_of, rounds), strict=True):
        clock += min(own)
        least.append(clock)
    return least


def worst(plain: Seq[float], chosen: Seq[float]) -> float:
    """The most that a span took longer than plainly, as a share."""
    spans = range(UNGUARDED, len(plain) - GUARDED)
    return max((chosen[i + GUARDED] - chosen[i]) / (plain[i + GUARDED] - plain[i]) - 1 for i in spans)


def main() -> None:
    """Print a table, as Markdown."""
    parser = argparse.ArgumentParser(description="The most that drafter='auto' loses.")
    parser.add_argument("--model", default="surefoot-demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--texts", nargs="+", default=[])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = LoadedModel.from_checkpoint(
        options.model,
        device=torch.device("cpu"),
        dtype=getattr(torch, options.dtype),
        max_len=LENGTH + 16,
        mtp="if-present",
    )
    assert model.tokenizer is not None, "expected a model with a tokenizer"
    natural = [token for line in held_out() for token in model.tokenizer.encode(line["text"])]
    print("| text | times plain | worst 256 tokens | noise |\n|---|--:|--:|--:|")
    for name, text in texts(natural, model.config.vocab_size).items():
        if options.texts and name not in options.texts:
            continue
        rounds: dict[str, list[list[float]]] = {"none": [], "auto": [], "none, again": []}
        for _ in range(options.rounds):
            for drafter, own in rounds.items():
                model.clear()  # what was learned
                with torch.inference_mode():
                    chosen = model.drafter(drafter.split(",")[0], 1)
                    target = Dictated(model.target(1), text)
                own.append(timeline(target, chosen, 8 if drafter == "auto" else 0, text))
        plain, auto, again = (fastest_of(own) for own in rounds.values())
        lost, noise = 100 * worst(plain, auto), 100 * worst(plain, again)
        print(f"| {name} | {plain[-1] / auto[-1]:.2f} | {lost:+.1f} % | {noise:+.1f} % |", flush=True)


if __name__ == "__main__":
    main()
