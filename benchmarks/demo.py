"""Real weights on held-out text: our settings and `transformers`' generate, taking turns in one process."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import checkout
from benchmarks.report import Demo, Row, speedup_model
from surefoot import Engine, SamplingParams
from surefoot.bench.library import Library
from surefoot.bench.machine import Watch
from surefoot.bench.measure import kept_shares
from surefoot.bench.passes import EagerPasses
from surefoot.bench.turns import median_ratio, take_turns
from surefoot.engine.arguments import DTYPES
from surefoot.engine.loaded import LoadedModel
from surefoot.engine.stats import Stats
from surefoot.loading.checkpoint import find_model

PLAIN, LIBRARY = "plain", "transformers"
MTP_LENGTHS = range(1, 7)
SETTINGS = {
    PLAIN: ("none", 0),
    "n-gram, K = 4": ("ngram", 4),
    **{f"MTP, K = {k}": ("mtp", k) for k in MTP_LENGTHS},
    "MTP + n-gram, K = 4": ("mtp+ngram", 4),
}
CONTEXT = 256  # tokens before the steps that are timed alone
STEP_ROUNDS = 10


@dataclass(frozen=True)
class Prompt:
    kind: str
    tokens: list[int]


@dataclass(frozen=True)
class Sample:
    """One generation: its tokens, and how many of them took how many seconds."""

    kind: str
    tokens: list[int]
    counted: int
    seconds: float
    stats: Stats


Round = dict[str, list[Sample]]  # by setting, one sample per prompt


@dataclass(frozen=True)
class Bench:
    """One model twice, ours under every setting (all on one target) and theirs."""

    model: LoadedModel
    engines: dict[str, Engine]
    library: Library
    params: SamplingParams

    @classmethod
    def load(cls, model: str, dtype: str, tokens: int, max_len: int) -> Bench:
        folder, device = find_model(model), torch.device("cpu")
        loaded = LoadedModel.from_checkpoint(folder, mtp="require", device=device, dtype=DTYPES[dtype], max_len=max_len)
        engines = {
            name: Engine.over(loaded, drafter=drafter, draft_length=length)
            for name, (drafter, length) in SETTINGS.items()
        }
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        return cls(loaded, engines, Library.from_folder(folder, False, DTYPES[dtype]), params)

    def ours(self, name: str, prompt: Prompt) -> Sample:
        out = self.engines[name].generate(prompt.tokens, self.params)
        return Sample(prompt.kind, out.token_ids, len(out.token_ids), out.stats.decode_s, out.stats)

    def theirs(self, prompt: Prompt) -> Sample:
        _, first = self.library.generate([prompt.tokens], 1)
        (tokens,), seconds = self.library.generate([prompt.tokens], self.params.max_new_tokens)
        return Sample(prompt.kind, tokens, len(tokens) - 1, seconds - first, Stats())

    def round(self, prompts: Seq[Prompt]) -> Round:
        """Every setting on every prompt, in turns. Exits with a message if a setting's tokens are not plain's."""
        samples: Round = {LIBRARY: [], **{name: [] for name in self.engines}}
        for number, prompt in enumerate(prompts):
            samples[LIBRARY].append(self.theirs(prompt))
            for name in self.engines:
                samples[name].append(self.ours(name, prompt))
                if samples[name][-1].tokens != samples[PLAIN][-1].tokens:
                    raise SystemExit(f"not lossless: {name}, prompt {number} ({prompt.kind}) differs from plain")
        return samples


def run(model: str, dtype: str, prompts_file: Path, count: int | None, tokens: int, rounds: int) -> Demo:
    """Measure one dtype: a round for correctness that also warms up, then `rounds` that count."""
    watch = Watch()
    lines = read_prompts(prompts_file, count)
    longest = max(len(line["text"].encode()) for line in lines)  # a token is at least a byte
    bench = Bench.load(model, dtype, tokens, max_len=max(longest + tokens, CONTEXT + 64))
    prompts = [Prompt(line["kind"], bench.engines[PLAIN].encode(line["text"])) for line in lines]
    checked = bench.round(prompts)
    results = [bench.round(prompts) for _ in range(rounds)]
    passes = EagerPasses(bench.model.target(1), bench.model.head, CONTEXT, range(1, max(MTP_LENGTHS) + 2))
    times = take_turns(passes.actions(), STEP_ROUNDS, passes.rewind)
    steps = {name: spread.median for name, spread in times.items()}
    equal = sum(a.tokens == b.tokens for a, b in zip(checked[PLAIN], checked[LIBRARY], strict=True))
    rows = [make_row(name, results, steps) for name in (LIBRARY, *SETTINGS)]
    return Demo(model, dtype, len(prompts), tokens, rounds, equal, rows, steps, checkout.machine(watch))


def read_prompts(path: Path, count: int | None) -> list[dict[str, str]]:
    """All prompts, or `count` of them spread over the file. Exits with a message if there is none."""
    if not path.is_file():
        raise SystemExit(f"{path}: expected held-out prompts, one JSON object with kind and text a line, found no file")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise SystemExit(f"{path}: expected at least one prompt, found none")
    return lines if count is None else lines[:: max(1, len(lines) // count)][:count]


def rates(results: Seq[Round], name: str, kind: str | None = None) -> list[float]:
    """Tokens per second of each round, over all prompts (of a kind)."""
    chosen = [[s for s in samples[name] if kind in (None, s.kind)] for samples in results]
    return [sum(s.counted for s in samples) / sum(s.seconds for s in samples) for samples in chosen]


def make_row(name: str, results: Seq[Round], steps: dict[str, float]) -> Row:
    own, plain = rates(results, name), rates(results, PLAIN)
    kinds = {
        kind: median_ratio(rates(results, name, kind), rates(results, PLAIN, kind))
        for kind in dict.fromkeys(sample.kind for sample in results[0][name])
    }
    stats = [sample.stats for sample in results[0][name]]  # the same in every round
    drafter, length = SETTINGS.get(name, ("", 0))
    shares = kept_shares(stats)
    predicted = None
    if drafter == "mtp":
        base = steps["verify 1"]
        predicted = speedup_model(shares, steps[f"verify {length + 1}"] / base, steps["draft"] / base)
    emitted, passes = sum(s.tokens for s in stats), sum(s.steps for s in stats)
    return Row(name, statistics.median(own), median_ratio(own, plain), median_ratio(own, rates(results, LIBRARY)),
               kinds, emitted / passes if passes else 1.0, shares, predicted)  # fmt: skip
