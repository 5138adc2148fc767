"""Which drafter pays on which kind of text: tokens per pass and speed beside plain decoding, on the built-in prompts.

    python benchmarks/drafters.py [--model surefoot-demo] [--tokens 96] [--rounds 3] [--kinds code edit] [--only suffix]

Lossless first: what a drafter gives is compared with plain decoding's tokens in every round, and nothing is printed if
one differs. On a prompt all drafters take turns; a speed is the median over the rounds of its ratio to plain decoding's
in the same round. "suffix" is new at every prompt and knows that prompt alone; "suffix, asked again" has answered all
of them once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import checkout
from benchmarks.report import table
from surefoot import Engine, SamplingParams
from surefoot.bench.lossless import NotLosslessError
from surefoot.bench.machine import Watch
from surefoot.bench.measure import Batch, Sample, decode, measure, rates
from surefoot.bench.prompts import kinds
from surefoot.bench.settings import PLAIN
from surefoot.bench.turns import median_ratio
from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.mtp import MTPDrafter
from surefoot.drafters.ngram import NgramDrafter
from surefoot.drafters.suffix import SuffixDrafter
from surefoot.engine.arguments import DTYPES
from surefoot.engine.loaded import LoadedModel
from surefoot.types import Drafter

MAX_LEN = 1024


def drafters(model: LoadedModel, confidences: Seq[float]) -> dict[str, tuple[Callable[[], Drafter | str], int]]:
    """By the name of the row: what makes the drafter of an engine, and the draft length."""
    again = SuffixDrafter()
    made: dict[str, tuple[Callable[[], Drafter | str], int]] = {
        PLAIN: (lambda: "none", 0),
        "ngram, K = 4": (NgramDrafter, 4),
        "ngram, K = 8": (NgramDrafter, 8),
        "ngram, K = 8, not re-anchored": (partial(NgramDrafter, reanchor=False), 8),
        "suffix, K = 8": (SuffixDrafter, 8),
        "suffix, K = 8, asked again": (partial(same, again), 8),
    }
    if (head := model.head) is None:
        return made
    both = MTPDrafter(head, 1)
    made |= {f"mtp, K = {depth}": (lambda: "mtp", depth) for depth in (3, 6)}
    for least in confidences:
        sure = MTPDrafter(head, 1, min_confidence=least)
        made[f"mtp, K = 6, sure of {least:g}"] = (partial(same, sure), 6)
    return made | {
        "mtp+ngram, K = 4": (lambda: "mtp+ngram", 4),
        "mtp+suffix, K = 4": (lambda: CombinedDrafter(SuffixDrafter(), both), 4),
        "auto, K = 8": (lambda: "auto", 8),
    }


def same(drafter: Drafter) -> Drafter:
    """The drafter."""
    return drafter


def run(model: LoadedModel, make: Callable[[], Drafter | str], depth: int, tokens: int, prompts: Batch) -> Sample:
    """One prompt."""
    engine = Engine.over(model, drafter=make(), draft_length=depth)
    return decode(engine, prompts, SamplingParams(max_new_tokens=tokens, ignore_eos=True))


def cells(samples: Mapping[str, Seq[Sample]], name: str) -> tuple[float, float]:
    """Tokens per pass, and the speed over plain decoding's."""
    first = samples[name][0]
    return first.counted / first.steps, median_ratio(rates(samples[name]), rates(samples[PLAIN]))


def main() -> None:
    """Print one table, as Markdown."""
    prompts = kinds()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="surefoot-demo")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(prompts), default=list(prompts))
    parser.add_argument("--only", nargs="+", default=[""], metavar="START", help="drafters whose names begin like this")
    parser.add_argument("--confidence", type=float, nargs="+", default=[0.35], help="rows of MTP with this cut-off")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    watch = Watch()
    model = LoadedModel.from_checkpoint(
        args.model, device=torch.device("cpu"), dtype=DTYPES[args.dtype], max_len=MAX_LEN, mtp="if-present"
    )
    if model.tokenizer is None:
        parser.error(f"--model: expected one with a tokenizer, found {args.model}")
    encode = model.tokenizer.encode
    chosen = {
        name: partial(run, model, *how, args.tokens)
        for name, how in drafters(model, args.confidence).items()
        if name == PLAIN or name.startswith(tuple(args.only))
    }
    results: dict[str, dict[str, list[Sample]]] = {}
    try:
        for kind in args.kinds:
            batches = [[encode(text)] for text in prompts[kind]]
            measure(chosen, batches, 1)  # warms up, and shows every prompt to the drafter that is asked again
            results[kind] = measure(chosen, batches, args.rounds)
            print(f"{kind}: every token is plain decoding's", file=sys.stderr, flush=True)
    except NotLosslessError as error:
        raise SystemExit(str(error)) from error
    rows = []
    for name in chosen:
        shown = [cells(results[kind], name) for kind in results]
        passes = [sum(getattr(results[kind][name][0], part) for kind in results) for part in ("counted", "steps")]
        speeds = [
            sum(results[kind][name][i].counted for kind in results)
            / sum(results[kind][name][i].seconds.decode_s for kind in results)
            for i in range(args.rounds)
        ]
        rows.append([name, *(f"{tokens:.2f}, {speed:.2f} x" for tokens, speed in shown),
                     f"{passes[0] / passes[1]:.2f}", f"{sorted(speeds)[len(speeds) // 2]:.0f}"])  # fmt: skip
    print(table(["", *results, "tokens a pass", "tokens/s"], rows))
    machine = checkout.machine(watch)
    print(f"\n{machine.command}: {machine.cores} cores, {machine.threads} thread, load {machine.load}")


if __name__ == "__main__":
    main()
