"""`drafter="auto"` on a GPU beside plain decoding and a fixed MTP draft: the same tokens, and what it gains and loses.

    python benchmarks/auto_gpu.py --shape qwen3.5-9b --json runs/auto-9b.json
    python benchmarks/auto_gpu.py --model surefoot-demo --json runs/auto-demo.json

First the model's own tokens, greedy and sampled, must be plain decoding's. Then texts are dictated: a token's logit is
raised within the recorded step, so that every pass takes its time and the text turns where it hurts. Every way must put
out the dictated text. In each round all ways decode it with what they learned forgotten; a token's time is the least of
its rounds. "worst": the most that any 256 tokens behind the first 64 took longer than plainly, as a share; negative is
faster. "noise": the same of plain decoding against itself. Exits with code 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.guard import fastest_of, worst
from surefoot import Engine, SamplingParams
from surefoot.bench.machine import versions
from surefoot.bench.prompts import random_tokens
from surefoot.bench.run import load_model
from surefoot.bench.settings import Settings
from surefoot.drafters.auto import DEEPEST
from surefoot.drafters.policy import StepCosts
from surefoot.engine.calibrate import batches_for
from surefoot.engine.depths import ChosenDepth
from surefoot.engine.device import DeviceDrafterName, DeviceTarget
from surefoot.engine.drafting import DRAFT_LENGTH
from surefoot.engine.hardware import device_name
from surefoot.engine.loaded import FUSED_WINDOW
from surefoot.engine.rehearsal import measure_steps
from surefoot.kernels.fused.rows import Text
from surefoot.loading.shapes import SHAPES
from surefoot.model import Decoder, MTPHead
from surefoot.model.fused import FusedModel

PROMPT, LENGTH = 64, 704
RAISED = 1e9  # a dictated token's logit
WAYS: dict[str, tuple[DeviceDrafterName, int]] = {
    "plain": ("none", 0),
    f"mtp, K = {DRAFT_LENGTH}": ("mtp", DRAFT_LENGTH),
    "auto": ("auto", DEEPEST),
    "plain, again": ("none", 0),
}


class Dictated(FusedModel):
    """Puts out the text that it is given, or its own where that has -1."""

    def __init__(self, decoder: Decoder, head: MTPHead | None) -> None:
        super().__init__(decoder, head, 1, FUSED_WINDOW)
        self.told = torch.full_like(self.progress.tokens, -1)

    @torch.inference_mode()
    def dictate(self, text: Seq[int]) -> None:
        """From now on this text, of which the prompt is the beginning."""
        self.told.fill_(-1)
        self.told[0, : len(text)] = torch.tensor(text, dtype=torch.int32)

    def score(self, text: Text, window: int) -> Tensor:
        """The model's own logits, one of each row raised."""
        logits = super().score(text, window)
        places = text.length[:1, None] + 1 + torch.arange(window, device=logits.device)
        token = self.told.gather(1, places.clamp(max=self.told.shape[1] - 1).long()).view(-1, 1)
        at = token.clamp(min=0).long()
        return logits.scatter_(1, at, torch.where(token >= 0, RAISED, logits.gather(1, at)))


def texts(vocab_size: int) -> dict[str, list[int]]:
    """Token ids by name: one that repeats itself, one that does not, and one that turns there and back."""
    dice = random.Random(7)

    def noise(count: int) -> list[int]:
        return [dice.randrange(vocab_size) for _ in range(count)]

    block = noise(24)
    again = block * (LENGTH // len(block) + 1)
    return {
        "repeated": again[:LENGTH],
        "random": noise(LENGTH),
        "repeated, random, repeated": (again[: PROMPT + 192] + noise(272) + again)[:LENGTH],
    }


def build(model: Dictated, name: DeviceDrafterName, depth: int) -> DeviceTarget:
    """The target, its steps recorded."""
    target = DeviceTarget(model, name, depth)
    target.warm_up()
    return target


def timeline(target: DeviceTarget, depth: int, text: list[int]) -> list[float]:
    """Seconds from the first step's report to each token's."""
    engine = Engine(target, target.drafter, depth)
    times: list[float] = []
    output: list[int] = []
    start = None
    for record in engine.stream(text[:PROMPT], SamplingParams(max_new_tokens=LENGTH - PROMPT, ignore_eos=True)):
        now = time.perf_counter()
        start = now if start is None else start
        times += [now - start] * record.emitted
        output += record.tokens
    assert output == text[PROMPT:], "not the dictated text"
    return times


def check(targets: dict[str, DeviceTarget], vocab_size: int) -> int:
    """The model's own tokens in every way; how many outputs were compared. Exits if two differ."""
    compared = 0
    for temperature in (0.0, 0.8):
        for seed in (1, 2):
            prompt = random_tokens(vocab_size, PROMPT, seed)
            params = SamplingParams(max_new_tokens=160, temperature=temperature, seed=seed, ignore_eos=True)
            found = {
                name: Engine(target, target.drafter, WAYS[name][1]).generate(prompt, params).token_ids
                for name, target in targets.items()
            }
            for name, tokens in found.items():
                compared += 1
                if tokens != found["plain"]:
                    sys.exit(f"{name}, temperature {temperature}, seed {seed}: other tokens than plain decoding")
    return compared


def measure(
    model: Dictated, targets: dict[str, DeviceTarget], costs: StepCosts, text: list[int], rounds: int
) -> dict[str, Any]:
    """Of one text: tokens per second, worst spans, and what was chosen in the last round."""
    model.dictate(text)
    timelines: dict[str, list[list[float]]] = {name: [] for name in targets}
    for _ in range(rounds):
        targets["auto"].choose_by(costs, {})  # what was learned is forgotten
        for name, target in targets.items():
            timelines[name].append(timeline(target, WAYS[name][1], text))
    least = {name: fastest_of(own) for name, own in timelines.items()}
    plain, chosen = least["plain"], targets["auto"].depths
    assert isinstance(chosen, ChosenDepth)
    return {
        "tokens_per_second": {name: (len(own) - 1) / own[-1] for name, own in least.items()},
        "worst": {name: worst(plain, own) for name, own in least.items() if name != "plain"},
        "choices": {f"{arm} {depth}": count for (arm, depth), count in sorted(chosen.choices.items())},
        "probed": chosen.probed,
    }


def main() -> None:
    """Print a table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="surefoot-demo", help="a bundled name, a folder, or a hub id")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of a published shape instead")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="save all figures here")
    args = parser.parse_args()
    chosen = {"shape": args.shape} if args.shape else {"model": args.model}
    settings = Settings(**chosen, device=args.device, dtype=args.dtype, drafters=("mtp",))
    with torch.inference_mode():
        loaded = load_model(settings, lambda *_: None)
        model = Dictated(loaded.decoder, loaded.head)
        targets = {name: build(model, *way) for name, way in WAYS.items()}
        costs = measure_steps(targets["auto"], batches_for(1))
        targets["auto"].choose_by(costs, {})
    vocab_size = loaded.config.vocab_size
    identical = check(targets, vocab_size)
    print(f"{identical} outputs with plain decoding's tokens")
    step_ms = [1000 * costs.pass_s(1, 1 + depth, 0) for depth in range(DEEPEST + 1)]
    print("ms a step, by depth: " + ", ".join(f"{ms:.3f}" for ms in step_ms))
    found = {}
    print("| text | " + " | ".join(f"{name}, tokens/s" for name in WAYS) + " | worst of auto | noise |")
    print("|---" + "|--:" * (len(WAYS) + 2) + "|")
    for name, text in texts(vocab_size).items():
        found[name] = own = measure(model, targets, costs, text, args.rounds)
        speeds = " | ".join(f"{speed:.0f}" for speed in own["tokens_per_second"].values())
        print(f"| {name} | {speeds} | {100 * own['worst']['auto']:+.1f} % | "
              f"{100 * own['worst']['plain, again']:+.1f} % |", flush=True)  # fmt: skip
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "command": " ".join(sys.argv), "model": chosen, "dtype": args.dtype, "rounds": args.rounds,
            "device": device_name(loaded.decoder.device), "versions": versions(), "identical_outputs": identical,
            "costs": costs.as_json(), "texts": found,
        }  # fmt: skip
        args.json.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
