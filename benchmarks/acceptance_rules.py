"""How often one draft token is kept, under both acceptance rules, against what the papers promise.

Pairs of distributions of a chosen distance (total variation, TV): the target is a softmax of random logits, the
drafter's logits are the target's with noise, scaled until the distance is right. A drafter that samples proposes one
token as `draft_token` would, verification keeps it or not; everything runs through `surefoot.verify`.

    python benchmarks/acceptance_rules.py
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import Tensor

from surefoot.sampling import SamplingParams
from surefoot.types import Draft
from surefoot.verify import choose, draft_token, probabilities, verify

SHAPES = {"flat": 1.0, "peaked": 4.0}  # standard deviation of the target's logits
ROWS = 64  # positions per call: bounds the memory at large vocabularies


def pair(vocab_size: int, spread: float, tv: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits [V] of a target and of a drafter at total variation `tv`, found by bisection on the noise."""
    target = torch.randn(vocab_size, generator=generator, dtype=torch.float64) * spread
    noise = torch.randn(vocab_size, generator=generator, dtype=torch.float64)
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if distance(target, target + middle * noise) < tv else (low, middle)
    return target.float(), (target + low * noise).float()


def distance(one: Tensor, other: Tensor) -> float:
    """Total variation between the softmaxes of two rows of logits [V]."""
    return float((one.softmax(-1) - other.softmax(-1)).abs().sum() / 2)


def coupled_rate(target: Tensor, drafter: Tensor, samples: int, seed: int) -> float:
    """How often target and drafter choose the same token under the same noise."""
    params = SamplingParams(temperature=1.0, seed=seed)
    matches = 0
    for start in range(0, samples, ROWS):
        count = min(ROWS, samples - start)
        ours = choose(target.expand(count, -1), params, start)
        theirs = choose(drafter.expand(count, -1), params, start)
        matches += sum(a == b for a, b in zip(ours, theirs, strict=True))
    return matches / samples


def rejection_rate(target: Tensor, drafter: Tensor, samples: int, seed: int) -> float:
    """How often a token drawn from the drafter passes the p/q test."""
    params = SamplingParams(temperature=1.0, seed=seed, acceptance="rejection")
    window = target.expand(2, -1)
    kept = 0
    for position in range(samples):
        token, probs = draft_token(drafter, params, position)
        assert probs is not None
        kept += verify(Draft((token,), probs[None]), window, params, position).accepted
    return kept / samples


def argmax_rate(target: Tensor, drafter: Tensor) -> float:
    """The chance that the drafter's most likely token is kept, which is the same under both rules."""
    return float(probabilities(target[None], SamplingParams(temperature=1.0))[0, drafter.argmax()])


def main() -> None:
    """Print one row per pair, as a Markdown table."""
    parser = argparse.ArgumentParser(description="Acceptance of one draft token under both rules.")
    parser.add_argument("--vocab", type=int, nargs="+", default=[100, 8192])
    parser.add_argument("--tv", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4, 0.6, 0.8])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(args.seed)
    print(
        "| V | target | TV | coupled, at least (1 − TV)/(1 + TV) | coupled, measured"
        " | rejection, 1 − TV | rejection, measured | argmax draft, either rule |"
    )
    print("|--:|---|--:|--:|--:|--:|--:|--:|")
    pairs = itertools.product(args.vocab, SHAPES.items(), args.tv)
    for seed, (vocab_size, (shape, spread), tv) in enumerate(pairs, start=args.seed):  # rows do not share their noise
        target, drafter = pair(vocab_size, spread, tv, generator)
        coupled = coupled_rate(target, drafter, args.samples, seed)
        rejection = rejection_rate(target, drafter, args.samples, seed)
        print(
            f"| {vocab_size} | {shape} | {distance(target, drafter):.2f} | {(1 - tv) / (1 + tv):.3f} "
            f"| {coupled:.3f} | {1 - tv:.3f} | {rejection:.3f} | {argmax_rate(target, drafter):.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
