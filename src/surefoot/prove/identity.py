"""Token identity: every drafter and draft length gives plain decoding's tokens, greedy and with coupled sampling."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from surefoot.bench.settings import Method
from surefoot.prove.report import Check, Section
from surefoot.prove.subject import Subject
from surefoot.sampling import SamplingParams

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)
GREEDY = SamplingParams(ignore_eos=True)
MOST_SLOTS = 8


def prove_identity(subject: Subject) -> Section:
    """Decode every prompt plainly and alone, then by each method, several prompts together."""
    s = subject.settings
    section = Section(
        "token identity",
        "Greedy, and sampled with one seed a prompt, every drafter at every draft length gives the very tokens of "
        "plain decoding of each prompt alone.",
    )
    cases = {"greedy": [GREEDY] * len(subject.prompts),
             "sampled": [replace(SAMPLED, seed=s.seed + number) for number in range(len(subject.prompts))]}  # fmt: skip
    for name, chosen in cases.items():
        params = [replace(each, max_new_tokens=s.new_tokens) for each in chosen]
        expected: list[list[int]] = []

        def plain(name: str = name, params: Seq[SamplingParams] = params, into: list[list[int]] = expected) -> Check:
            engine = subject.plain()
            into += [engine.generate(p, each).token_ids for p, each in zip(subject.prompts, params, strict=True)]
            return Check(f"{name}, plain", True, f"{sum(map(len, into))} tokens of {len(into)} prompts to compare with")

        section.check(f"{name}, plain", plain)
        if not expected:
            continue
        for drafter in subject.drafters:
            for depth in s.depths if name == "greedy" and drafter != "auto" else s.depths[-1:]:
                label = f"{name}, {Method(drafter, depth).name}"
                section.check(label, lambda d=drafter, k=depth, n=label, p=params, e=expected:
                              compare(subject, n, (d, k), p, e))  # type: ignore[misc]  # fmt: skip
    return section


def compare(
    subject: Subject, name: str, method: tuple[str, int], params: Seq[SamplingParams], expected: list[list[int]]
) -> Check:
    """A method's tokens beside plain decoding's."""
    drafter, depth = method
    engine = subject.engine(drafter, depth, min(MOST_SLOTS, len(subject.prompts)))
    found = engine.generate(subject.prompts, params)
    kept, proposed = (sum(getattr(answer.stats, what) for answer in found) for what in ("accepted", "proposed"))
    table = [
        explain(subject, number, right, answer.token_ids)
        for number, (right, answer) in enumerate(zip(expected, found, strict=True))
        if right != answer.token_ids
    ]
    same = len(found) - len(table)
    seen = f"{same} of {len(found)} outputs identical; {kept} of {proposed} draft tokens kept"
    return Check(name, not table, seen + ("" if proposed else ": nothing was drafted, so this says little"), table)


def explain(subject: Subject, number: int, right: Seq[int], found: Seq[int]) -> dict[str, Any]:
    """Where two outputs part, and how near the two tokens are in the engine's and in the reference's logits."""
    place = next(i for i, (a, b) in enumerate(zip_longest(right, found)) if a != b)
    told: dict[str, Any] = {"prompt": number, "position": place}
    if place >= min(len(right), len(found)):
        return told | {"reason": f"lengths {len(right)} (plain) and {len(found)}"}
    prompt, plain, other = subject.prompts[number], right[place], found[place]
    ours = subject.row(prompt, right[:place])
    with torch.inference_mode():
        book = subject.expected([*prompt, *right[:place]], len(prompt) + place - 1)[0]
    gap = (ours[plain] - ours[other]).item()
    near = abs(gap) <= 2 * subject.tolerance * ours.std().item()
    return told | {
        "plain": subject.shown(plain),
        "drafted": subject.shown(other),
        "plain logit": ours[plain].item(),
        "drafted logit": ours[other].item(),
        "gap": gap,
        "reference gap": (book[plain] - book[other]).item(),
        "reason": "a near-tie that rounding turned" if near else "no near-tie: the state or the rule is wrong",
    }
