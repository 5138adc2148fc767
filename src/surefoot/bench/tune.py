"""`surefoot tune`: how fast every way to decode is on this machine by kind of prompt, what the speed-up model foretold,
and the profile that `drafter="auto"` starts from.

The model: a step emits as many tokens as were kept on average and one more, and takes a pass over its window and the
drafting (`drafters.policy`), with the costs that were measured here. Where measurement and model part, `auto` chooses
by wrong costs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from surefoot.bench.machine import Machine, Watch, versions
from surefoot.bench.measure import Sample, decode, measure, rates
from surefoot.bench.plot import COLOURS, require_matplotlib, save_picture
from surefoot.bench.prompts import kinds
from surefoot.bench.settings import MTP_DEPTHS, PLAIN, Method
from surefoot.bench.turns import Spread, median_ratio
from surefoot.drafters.auto import DEEPEST, MTP, AutoDrafter
from surefoot.drafters.policy import StepCosts
from surefoot.engine.calibrate import measure_costs
from surefoot.engine.engine import Engine
from surefoot.engine.hardware import device_name
from surefoot.engine.loaded import LoadedModel
from surefoot.engine.profile import Profile, profile_file, save_profile
from surefoot.engine.prompts import Progress
from surefoot.engine.stats import Stats
from surefoot.errors import InputError
from surefoot.loading.tokenizer import require_tokenizer
from surefoot.sampling import SamplingParams

AUTO = AutoDrafter.name


@dataclass(frozen=True)
class Cell:
    """One way to decode prompts of one kind. `to_plain` is the median over rounds of ratios taken within each,
    `foretold` the model's ratio for the same steps."""

    kind: str
    drafter: str
    depth: int
    name: str
    tokens_per_second: Spread
    tokens_per_step: float
    to_plain: float
    foretold: float


@dataclass(frozen=True)
class Tuned:
    """What tuning found, and the `file` that has the profile now."""

    model: str
    device: str
    machine: Machine
    cells: list[Cell]
    profile: Profile
    file: Path

    def save(self, file: Path) -> None:
        """Write it as JSON."""
        data = {
            "model": self.model,
            "device": self.device,
            "machine": asdict(self.machine),
            "cells": [asdict(cell) for cell in self.cells],
            "costs": self.profile.costs.as_json(),
            "priors": {arm: list(chances) for arm, chances in self.profile.priors.items()},
        }
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def some_kinds(names: Seq[str]) -> dict[str, list[str]]:
    """Built-in prompts of these kinds, of all if none are named. Raises InputError for an unknown one."""
    known = kinds()
    for name in names:
        if name not in known:
            raise InputError(f"--kinds: expected some of {', '.join(known)}, found {name!r}")
    return {name: known[name] for name in names or known}


def methods_of(model: LoadedModel, depths: Seq[int]) -> list[Method]:
    """What is measured, plain decoding first and the policy last."""
    heads = [Method(MTP, depth) for depth in (depths or MTP_DEPTHS)] if model.head is not None else []
    return [Method("none", 0), Method("ngram", 4), Method("ngram", DEEPEST), *heads, Method(AUTO, DEEPEST)]


def tune(
    label: str,
    model: LoadedModel,
    prompts: Mapping[str, Seq[str]],
    command: str,
    *,
    depths: Seq[int] = (),
    tokens: int = 64,
    rounds: int = 2,
    progress: Progress | None = None,
) -> Tuned:
    """Measure costs, keep them, then decode all prompts in every way; at last keep what was learned of acceptance, too.

    Raises InputError for a model on a GPU, whose steps have one draft length for good, or without a tokenizer, and
    NotLosslessError if a way changes a token.
    """
    if model.decoder.device.type != "cpu":
        raise InputError("surefoot tune: expected --device cpu, as a GPU's recorded step cannot choose its draft; "
                         f"found {model.decoder.device}")  # fmt: skip
    tokenizer = require_tokenizer(model.tokenizer, "surefoot tune")
    watch = Watch()
    costs = measure_costs(model.decoder, model.head, (1,))
    file = profile_file(model.decoder, model.head)
    save_profile(file, Profile(costs))
    model.clear()  # what had other costs
    cells: list[Cell] = []
    judged: dict[str, list[Stats]] = {}
    methods = methods_of(model, depths)
    engines = {method: Engine.over(model, drafter=method.drafter, draft_length=method.depth) for method in methods}
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    for done, (kind, texts) in enumerate(prompts.items(), start=1):
        actions = {method.name: partial(_decode, engines[method], params) for method in methods}
        samples = measure(actions, [[tokenizer.encode(text)] for text in texts], rounds)
        context = max(len(tokenizer.encode(text)) for text in texts)
        cells += [cell_of(kind, method, samples, costs, context) for method in methods]
        for method in methods:
            judged.setdefault(method.drafter, []).extend(samples[method.name][0].stats)
        if progress is not None:
            progress(done, len(prompts))
    chooser = engines[methods[-1]].drafter
    assert isinstance(chooser, AutoDrafter)
    profile = Profile(costs, chooser.learned())
    save_profile(file, profile)
    return Tuned(label, device_name(model.decoder.device), watch.machine(command, versions()), cells, profile, file)


def _decode(engine: Engine, params: SamplingParams, batch: Seq[list[int]]) -> Sample:
    return decode(engine, batch, params)


def cell_of(kind: str, method: Method, samples: Mapping[str, Seq[Sample]], costs: StepCosts, context: int) -> Cell:
    """What the samples say of one way, and what the model says of its steps."""
    own = samples[method.name]
    stats = own[0].stats  # the same in every round, but for what "auto" has learned
    steps, emitted = sum(s.steps for s in stats), sum(s.tokens for s in stats)
    seconds = sum(_foretold_s(s, method, costs, context) for s in stats)
    return Cell(
        kind,
        method.drafter,
        method.depth,
        method.name,
        Spread.of(rates(own)),
        emitted / steps,
        median_ratio(rates(own), rates(samples[PLAIN])),
        emitted * costs.pass_s(1, 1, context) / seconds,
    )


def _foretold_s(stats: Stats, method: Method, costs: StepCosts, context: int) -> float:
    """Seconds of the steps: how many drafted how much is known by place."""
    lengths = [stats.steps, *stats.proposed_by_position, 0]
    total = 0.0
    for length in range(len(lengths) - 1):
        count = lengths[length] - lengths[length + 1]  # steps that drafted just so many tokens
        drafting = costs.draft_s(1, length) if method.drafter == MTP else 0.0
        total += count * (costs.pass_s(1, 1 + length, context) + drafting)
    return total


def draw(tuned: Tuned, path: Path) -> None:
    """Write a picture: each kind's speed-ups as measured, with what was foretold as a mark. Raises InputError for a
    name whose ending no format has."""
    names = list(dict.fromkeys(cell.kind for cell in tuned.cells))
    figure = require_matplotlib()(figsize=(11, 2.4 * len(names)))
    for place, kind in enumerate(names, start=1):
        cells = [cell for cell in tuned.cells if cell.kind == kind and cell.drafter != "none"]
        axes = figure.add_subplot(len(names), 1, place)
        axes.bar([c.name for c in cells], [c.to_plain for c in cells], color=[COLOURS[c.drafter] for c in cells])
        told = [c for c in cells if c.drafter != AUTO]
        axes.plot([c.name for c in told], [c.foretold for c in told], "k_", markersize=22)
        axes.axhline(1, color=COLOURS["none"], linestyle=":")
        axes.set_ylabel("× plain")
        axes.set_title(kind, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{tuned.model}, {tuned.device.split(' (')[0]}; bars measured, marks foretold", fontsize=10)
    figure.tight_layout()
    save_picture(figure, path)


def best_fixed(cells: Seq[Cell]) -> Cell:
    """Of the ways that do not choose, the one that is fastest over all kinds: by the geometric mean of its ratios."""
    fixed = {cell.name: cell for cell in cells if cell.drafter != AUTO}
    ratios = {name: [cell.to_plain for cell in cells if cell.name == name] for name in fixed}
    return fixed[max(fixed, key=lambda name: statistics.geometric_mean(ratios[name]))]
