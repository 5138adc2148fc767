"""What a reduced draft vocabulary costs in kept drafts and saves of a draft step, on held-out text.

    python benchmarks/draft_vocab.py [--model surefoot-demo] [--sizes 4096 2048 1024] [--draft-length 3]

Sizes are taken from the checkpoint's counted list, and from the lowest ids. Lossless first: no row is printed whose
tokens are not plain decoding's, so all rows of a temperature draft for the same text. `covered` is the share of that
text's tokens which are in the vocabulary: no drafter can have more kept at a position. `speed` is tokens per step /
(T_v(K + 1) + K T_d), over that of all tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Seq
from itertools import chain

import torch

from surefoot import Engine, SamplingParams
from surefoot.bench.measure import decode, kept_shares
from surefoot.bench.passes import EagerPasses
from surefoot.bench.prompts import held_out
from surefoot.bench.turns import Action, take_turns
from surefoot.engine.loaded import LoadedModel

MAX_LEN = 1024
CONTEXT = 256  # tokens before the draft steps that are timed
ROUNDS = 20


Vocabulary = int | range | None


def vocabularies(sizes: Seq[int]) -> dict[str, Vocabulary]:
    """By how a table names them."""
    listed: dict[str, Vocabulary] = {"all": None}
    listed |= {f"{size}, counted": size for size in sizes}
    return listed | {f"{size}, lowest ids": range(size) for size in sizes}


def times_of(model: LoadedModel, chosen: dict[str, Vocabulary], width: int) -> dict[str, float]:
    """Milliseconds of a draft step by vocabulary, the choice of a token included, and of a pass over `width` tokens
    (""); all take turns."""
    target = model.target(1)
    verify = EagerPasses(target, None, CONTEXT, (width,))
    actions: dict[str, Action] = {"": verify.actions()[f"verify {width}"]}
    for name, vocabulary in chosen.items():
        passes = EagerPasses(target, model.head, CONTEXT, (), model.draft_head(vocabulary)[0])
        actions[name] = passes.actions()["draft"]
    times = take_turns(actions, ROUNDS, verify.rewind)
    verify.close()
    return {name: spread.median for name, spread in times.items()}


def main() -> None:
    """Print one table for each temperature, as Markdown."""
    parser = argparse.ArgumentParser(description="Kept drafts by the size of the draft vocabulary.")
    parser.add_argument("--model", default="surefoot-demo")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 2048, 1024])
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = LoadedModel.from_checkpoint(
        args.model, device=torch.device("cpu"), dtype=torch.float32, max_len=MAX_LEN, mtp="require"
    )
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(line["text"]) for line in held_out()]
    chosen, depth = vocabularies(args.sizes), args.draft_length
    with torch.inference_mode():
        times = times_of(model, chosen, depth + 1)
    print(f"T_v({depth + 1}) {times['']:.2f} ms")
    plain = Engine.over(model, drafter="none", draft_length=0)
    for temperature in args.temperatures:
        params = SamplingParams(max_new_tokens=args.tokens, temperature=temperature, ignore_eos=True)
        expected = decode(plain, prompts, params).outputs
        text = list(chain.from_iterable(expected))
        print(f"\ntemperature {temperature:g}, {len(prompts)} prompts, {len(text)} tokens, K = {depth}\n")
        print("| draft vocabulary | covered | kept, by draft position | tokens per step | T_d, ms | speed |")
        print("|---|--:|---|--:|--:|--:|")
        base = 0.0
        for name, vocabulary in chosen.items():
            engine = Engine.over(model, draft_length=depth, draft_vocab=vocabulary)
            sample = decode(engine, prompts, params)
            if sample.outputs != expected:
                raise SystemExit(f"not lossless: {name} at temperature {temperature:g} differs from plain decoding")
            head, _ = model.draft_head(vocabulary)
            inside = set(range(model.config.vocab_size) if head is None else head.ids.tolist())
            covered = sum(token in inside for token in text) / len(text)
            kept = ", ".join(f"{share:.1%}" for share in kept_shares(sample.stats))
            per_step = len(text) / sum(stats.steps for stats in sample.stats)
            speed = per_step / (times[""] + depth * times[name])
            base = base or speed
            print(f"| {name} | {covered:.1%} | {kept} | {per_step:.2f} | {times[name]:.2f} | {speed / base:.2f} |",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
