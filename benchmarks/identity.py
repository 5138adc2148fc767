"""Every drafter, draft length and batch size against plain decoding of one prompt at a time: all tokens must be equal.

    python benchmarks/identity.py --device cuda --dtypes bfloat16
    python benchmarks/identity.py --device cuda --shape qwen3.5-9b --weights whole fp8 --json runs/identity.json
    python benchmarks/identity.py --prompts 4 --depths 1 4 --tokens 32          on a CPU, in a minute or two

Greedy, and at temperature 0.8 with top_k, top_p and min_p under a seed of each prompt's own. Prompts are the built-in
held-out texts, cut to different lengths and, when all have been used, cut elsewhere and used again. The weights are
loaded once for each type. Prints how many outputs are identical; exits with code 1 if any is not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import checkout
from surefoot import Engine, SamplingParams
from surefoot.bench.machine import Watch
from surefoot.bench.prompts import held_out, random_prompts
from surefoot.bench.run import load_model
from surefoot.bench.settings import LABELS, Method, Settings
from surefoot.engine.arguments import DTYPES, WEIGHTS
from surefoot.engine.drafting import NEED_HEAD
from surefoot.engine.hardware import device_name
from surefoot.engine.loaded import LoadedModel
from surefoot.errors import InputError
from surefoot.loading.shapes import SHAPES

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.02)
SAMPLING = {"greedy": GREEDY, "sampled": SAMPLED}


@dataclass(frozen=True)
class Count:
    """How many outputs of a way to decode are plain decoding's, and which prompts' are not; `kept`: accepted draft
    tokens, without which equal tokens would say nothing."""

    dtype: str
    weights: str
    batch: int
    drafter: str
    depth: int
    sampling: str
    prompts: int
    identical: int
    kept: int
    differing: list[int]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="surefoot-demo", help="a bundled name, a folder, or a hub id")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of a published shape instead")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bfloat16"])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=["whole"])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--context", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a prompt")
    parser.add_argument("--drafters", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument("--depths", nargs="+", type=int, default=list(range(1, 9)))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--draft-vocab", type=int, help="tokens that the MTP head drafts among")
    parser.add_argument("--json", type=Path, help="save the counts here")
    args = parser.parse_args()
    for name, least, low in (("prompts", args.prompts, 1), ("context", args.context, 2), ("tokens", args.tokens, 2),
                             ("batches", min(args.batches), 1)):  # fmt: skip
        if least < low:
            parser.error(f"--{name}: expected at least {low}, found {least}")
    return args


def make_prompts(model: LoadedModel, count: int, longest: int) -> list[list[int]]:
    """Texts of half to all of `longest` tokens; without a tokenizer random tokens."""
    lengths = [longest - number * 13 % (longest // 2 + 1) for number in range(count)]
    if model.tokenizer is None:
        texts = random_prompts(model.config.vocab_size, count, longest)
        return [text[:length] for text, length in zip(texts, lengths, strict=True)]
    texts = [model.tokenizer.encode(line["text"]) for line in held_out()]
    prompts = []
    for number, length in enumerate(lengths):
        text, start = texts[number % len(texts)], 37 * (number // len(texts)) % len(texts[number % len(texts)])
        prompts.append([*text[start:], *text[:start]][:length])
    return prompts


def counts(model: LoadedModel, methods: Seq[Method], prompts: list[list[int]], args: argparse.Namespace,
           weights: str) -> Iterator[Count]:  # fmt: skip
    """A count for every batch size, method and way of sampling, as each is done."""
    params = {
        name: [replace(chosen, max_new_tokens=args.tokens, seed=number) for number in range(len(prompts))]
        for name, chosen in SAMPLING.items()
    }
    dtype = str(model.decoder.dtype).removeprefix("torch.")
    plain = Engine.over(model, drafter="none", draft_length=0)
    expected = {name: plain.generate(prompts, each) for name, each in params.items()}
    for batch in args.batches:
        for method in methods:
            vocabulary = args.draft_vocab if method.drafter in NEED_HEAD else None
            engine = Engine.over(model, drafter=method.drafter, draft_length=method.depth, slots=batch,
                                 draft_vocab=vocabulary)  # fmt: skip
            for name, right in expected.items():
                found = engine.generate(prompts, params[name])
                pairs = enumerate(zip(right, found, strict=True))
                differing = [number for number, (a, b) in pairs if a.token_ids != b.token_ids]
                kept = sum(answer.stats.accepted for answer in found)
                yield Count(dtype, weights, batch, method.drafter, method.depth, name, len(prompts),
                            len(prompts) - len(differing), kept, differing)  # fmt: skip


def methods_of(drafters: Seq[str], depths: Seq[int], with_head: bool) -> list[Method]:
    """Those of the drafters that the model has parts for, at every depth."""
    chosen = [name for name in drafters if with_head or name not in NEED_HEAD]
    return [Method(name, depth) for name in chosen for depth in ([0] if name == "none" else depths)]


def measure(args: argparse.Namespace) -> Iterator[Count]:
    """All counts, model after model."""
    for dtype in args.dtypes:
        for weights in args.weights:
            settings = Settings(
                model=None if args.shape else args.model, shape=args.shape, device=args.device, dtype=dtype,
                weights=weights, context=args.context, tokens=args.tokens, depths=tuple(args.depths),
            )  # fmt: skip
            model = load_model(settings, lambda done, total: None)
            methods = methods_of(args.drafters, args.depths, model.head is not None)
            prompts = make_prompts(model, args.prompts, args.context)
            yield from counts(model, methods, prompts, args, weights)


def main() -> None:
    args = parse_args()
    watch = Watch()
    found: list[Count] = []
    try:
        for count in measure(args):
            found.append(count)
            name = Method(count.drafter, count.depth).name
            print(f"{count.dtype}, {count.weights}, batch {count.batch}, {count.sampling:7}  {name:20}  "
                  f"{count.identical} of {count.prompts} identical, {count.kept} draft tokens kept"
                  + (f", not prompts {count.differing}" if count.differing else ""), flush=True)  # fmt: skip
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    identical, total = sum(count.identical for count in found), sum(count.prompts for count in found)
    print(f"{identical} of {total} outputs identical with plain decoding's, {args.tokens} tokens each")
    if args.json is not None:
        config = {**vars(args), "json": None, "model": None if args.shape else Path(args.model).name}
        saved = {"identical": identical, "outputs": total, "config": config,
                 "device": device_name(torch.device(args.device)), "machine": asdict(checkout.machine(watch)),
                 "counts": [asdict(count) for count in found]}  # fmt: skip
        args.json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if identical < total:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
