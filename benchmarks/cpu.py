"""The CPU numbers: the bundled checkpoint on held-out text, and published shapes with random weights, each beside
`transformers` in the same process.

    python benchmarks/cpu.py                                   both parts, the page on the terminal
    python benchmarks/cpu.py --part shape --shape qwen3.5-2b
    python benchmarks/cpu.py --json runs/cpu.json --page docs/benchmarks-cpu.md

Lossless first: a part that is not gives no numbers, says why, and ends the run with exit code 1. A busy neighbour slows
runs of several threads up to thirtyfold: look at the load that each part prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import demo, report, shapes
from benchmarks.checkout import ROOT
from surefoot.bench.lossless import NotLosslessError
from surefoot.engine.arguments import DTYPES

PROMPTS = ROOT / "src" / "surefoot" / "bench" / "heldout.jsonl"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=["demo", "shape"], default=["demo", "shape"])
    parser.add_argument("--threads", type=int, help="default: torch's, which follows OMP_NUM_THREADS")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every setting")
    parser.add_argument("--json", type=Path, help="save the results here")
    parser.add_argument("--page", type=Path, help="save the page here too")
    group = parser.add_argument_group("demo")
    group.add_argument("--model", default="surefoot-demo")
    group.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["float32", "bfloat16"])
    group.add_argument("--prompts-file", type=Path, default=PROMPTS)
    group.add_argument("--prompts", type=int, help="how many of the file; default: all")
    group.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    group = parser.add_argument_group("shape")
    group.add_argument("--shape", nargs="+", choices=list(shapes.SHAPES), default=["qwen3.5-0.8b"])
    group.add_argument("--shape-dtype", choices=list(DTYPES), default="bfloat16")
    group.add_argument("--context", type=int, default=128, help="tokens before those that are timed")
    args = parser.parse_args()
    for name, low in (("rounds", 1), ("tokens", 2), ("context", 1), ("prompts", 1), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and value < low:
            parser.error(f"--{name}: expected at least {low}, found {value}")
    return args


def measure(args: argparse.Namespace) -> Iterator[report.Section]:
    """The sections, each when it is done."""
    if "demo" in args.part:
        for dtype in args.dtypes:
            yield demo.run(args.model, dtype, args.prompts_file, args.prompts, args.tokens, args.rounds)
    if "shape" in args.part:
        for shape in args.shape:
            yield shapes.run(shape, args.shape_dtype, args.context, args.rounds)


def main() -> None:
    args = parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    sections = []
    try:
        with torch.inference_mode():
            for section in measure(args):
                sections.append(section)
                print(report.render(section) + "\n", flush=True)
    except NotLosslessError as error:
        raise SystemExit(str(error)) from error
    if args.json is not None:
        report.save(args.json, sections)
    if args.page is not None:
        args.page.write_text(report.page(sections), encoding="utf-8")


if __name__ == "__main__":
    main()
