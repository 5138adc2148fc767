"""Exactness in law, on a target of three tokens where it can be computed: the engine's loop and acceptance rules."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch

from surefoot.drafters.none import NoDrafter
from surefoot.prove.enumeration import Dice, Law, distance, every_verdict, exact_law, loop_law
from surefoot.prove.report import Check, Section
from surefoot.prove.settings import Settings
from surefoot.prove.statistics import goodness_of_fit
from surefoot.prove.table import Argmax, Liar, Sampled, Scripted, TableTarget, decode, hashed_rows, steady_rows
from surefoot.sampling import SamplingParams
from surefoot.types import Drafter
from surefoot.verify import Purpose, acceptance, philox

VOCAB = 3
PROMPT = (1, 2, 0, 1)
SPREAD = 0.8  # of the logits: enough for two laws to differ, and not so much that tokens are certain
ROUNDING = 1e-5  # total variation that float32 probabilities and the ends of intervals explain
LIE = 0.01  # total variation that a control must exceed
# For many seeds: one law behind every prefix, so that draws which depend on one another show. A certain draft is right
# half of the time, one drawn from the other law is kept with 0.4 where it is a 2.
STEADY, OTHER = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 1.5, "top_k": 2}]


def prove_law(settings: Settings) -> Section:
    """Every outcome under the p/q rule; many seeds under both; controls."""
    section = Section(
        "exact law",
        "On a target of three tokens, over every outcome of drafting and verification, the engine's output has exactly "
        "the target's law; with the engine's own random numbers it has it as far as many seeds can tell.",
    )
    target, other = (hashed_rows(VOCAB, settings.seed + salt, SPREAD) for salt in (1, 2))
    drafters: list[Scripted] = [Sampled(other), Argmax(other)]
    for setting in SETTINGS[:2] if settings.quick else SETTINGS:
        for drafter in drafters:
            for depth in (1, 2, 3):
                length = 4 if depth == 3 and not setting and drafter.name == "sampled" and not settings.quick else 3
                params = _params(setting, max_new_tokens=max(length, depth + 1) if drafter.name == "argmax" else length)
                name = f"{drafter.name} drafts, K = {depth}, {_spelled(setting)}"
                section.check(name, lambda n=name, d=drafter, p=params, k=depth: _enumerated(n, target, d, p, k))  # type: ignore[misc]
    section.check("accept() alone", lambda: _accept_alone(settings.seed))
    section.check("control: a drafter that lies about q", lambda: _lie(target, Liar(other, lie=target)))
    section.check("random numbers", lambda: _numbers(settings.seed))
    seeds = 5 * settings.sample_count // 2
    ways: list[tuple[str, Drafter, int]] = [("coupled", NoDrafter(), 0), ("rejection", NoDrafter(), 0)]
    steady, unlike = steady_rows(*STEADY), steady_rows(*OTHER)
    ways += [(rule, drafter, 2) for rule in ("coupled", "rejection") for drafter in (Sampled(unlike), Argmax(steady))]
    level = settings.level / (len(ways) + 1)
    for rule, way, depth in ways:
        name = f"{seeds} seeds, {rule}, {way.name} drafts, K = {depth}"
        section.check(name, lambda n=name, r=rule, d=way, k=depth: _seeds(n, steady, d, r, k, seeds, settings, level))  # type: ignore[misc]
    name, liar = f"control: {seeds} seeds, a drafter that lies about q", Liar(unlike, lie=steady)
    section.check(name, lambda: _opposite(_seeds(name, steady, liar, "rejection", 2, seeds, settings, level)))
    section.notes.append("this is the acceptance of the host's loop; on a GPU, where a step has kernels of its own, "
                         "sections 1 and 3 run those")  # fmt: skip
    return section


def _params(setting: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "acceptance": "rejection", **setting, **more})


def _spelled(setting: dict[str, Any]) -> str:
    full = {"temperature": 1.0} | setting
    return ", ".join(f"{name} {value:g}" for name, value in full.items())


def _enumerated(name: str, target: Any, drafter: Scripted, params: SamplingParams, depth: int) -> Check:
    law = loop_law(target, drafter, params, depth, PROMPT)
    apart = distance(law, exact_law(target, params, PROMPT, params.max_new_tokens))
    return Check(name, apart < ROUNDING and abs(sum(law.values()) - 1) < ROUNDING,
                 f"distance {apart:.1e} over {len(law)} outputs of {params.max_new_tokens} tokens, "
                 f"expected below {ROUNDING:g}")  # fmt: skip


def _lie(target: Any, liar: Scripted) -> Check:
    params = _params({}, max_new_tokens=3)
    apart = distance(loop_law(target, liar, params, 2, PROMPT), exact_law(target, params, PROMPT, 3))
    return Check("control: a drafter that lies about q", apart > LIE,
                 f"distance {apart:.3f}, expected above {LIE:g}")  # fmt: skip


def _accept_alone(seed: int) -> Check:
    """`verify.accept` on rows that do not depend on what was drafted: its output, filled up from p, has p's law."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(3, VOCAB, generator=generator).softmax(-1) for _ in range(2))
    law: Law = defaultdict(float)
    dice = Dice()
    with every_verdict(dice):
        for _ in dice.outcomes():
            draft = [dice.roll(row.tolist()) for row in q[:2]]
            verdict = acceptance.accept(draft, p, q[:2], [0.5] * 3)
            output = (*draft[: verdict.accepted], verdict.token)
            output += tuple(dice.roll(row.tolist()) for row in p[len(output) :])
            law[output] += dice.chance
    due = {
        (a, b, c): float(p[0, a] * p[1, b] * p[2, c]) for a in range(VOCAB) for b in range(VOCAB) for c in range(VOCAB)
    }
    apart = distance(law, due)
    return Check("accept() alone", apart < ROUNDING, f"distance {apart:.1e}, expected below {ROUNDING:g}")


def _numbers(seed: int) -> Check:
    """Numbers for different positions, purposes and seeds are different, and look uniform."""
    count, used = 2000, vars(acceptance)  # what verification imported
    drawn = [draw(s, range(count), purpose) for draw in (philox.uniforms, used["uniforms"])
             for s in (seed, (seed + 1) % 2**64) for purpose in Purpose]  # fmt: skip
    if not all(torch.equal(a, b) for a, b in zip(drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :], strict=True)):
        return Check("random numbers", False, "verification draws others than surefoot.verify.philox gives")
    numbers = torch.stack(drawn[: len(drawn) // 2])
    distinct = len(numbers.unique())
    counts = Counter((numbers.flatten() * 16).long().tolist())
    even = goodness_of_fit(counts, dict.fromkeys(range(16), 1 / 16))
    noise = torch.cat([draw(seed, range(100), 40) for draw in (philox.gumbel, used["gumbel"])])
    rows = len(noise.unique(dim=0))
    mean = abs(noise.mean().item() - 0.5772)
    passed = distinct == numbers.numel() and even > 1e-6 and rows == 100 and mean < 0.2
    return Check("random numbers", passed,
                 f"{distinct} of {numbers.numel()} uniforms distinct over positions, purposes and seeds, evenness "
                 f"p = {even:.2g}; noise of {rows} of 100 positions distinct, mean {mean:.3f} off")  # fmt: skip


def _seeds(name: str, target: Any, drafter: Drafter, rule: str, depth: int, seeds: int, settings: Settings,
           level: float) -> Check:  # fmt: skip
    first = settings.seed * seeds % 2**40
    counts: dict[Any, int] = defaultdict(int)
    for seed in range(first, first + seeds):
        params = _params({}, max_new_tokens=3, seed=seed, acceptance=rule)
        counts[tuple(decode(TableTarget(target, VOCAB), drafter, params, depth, PROMPT).output)] += 1
    chance = goodness_of_fit(counts, exact_law(target, _params({}), PROMPT, 3))
    return Check(name, chance > level, f"p = {chance:.2g}, expected above {level:.2g}")


def _opposite(check: Check) -> Check:
    return Check(check.name, not check.passed, check.seen.replace("above", "at most"))
