"""Do short sampled continuations of the real model, drafted, look like plainly decoded ones? A two-sample test."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from surefoot.prove.report import Check, Section
from surefoot.prove.statistics import holm, same_law
from surefoot.prove.subject import Subject
from surefoot.sampling import SamplingParams

LENGTH = 3  # tokens of a continuation
PROMPT_TAIL = 6  # tokens of the prompt, twice: so that n-gram lookup has something to find
SLOTS = 16
PREFIXES = 2**28  # bytes of what was read of the prompt, which all share: reading it would take most of the time
PARAMS = SamplingParams(temperature=0.7, top_k=6, max_new_tokens=LENGTH, ignore_eos=True, acceptance="rejection")
SHIFT = 1.4  # the control's temperature


def prove_samples(subject: Subject) -> Section:
    """Continuations by every drafter under the p/q rule, against plain ones of other seeds, and a control."""
    s = subject.settings
    section = Section(
        "two samples",
        f"{s.sample_count} continuations of {LENGTH} tokens by each drafter, sampled by the p/q rule, cannot be told from "
        f"as many of plain decoding with other seeds, and those of another temperature can.",
    )
    depth = s.depths[-1]
    prompt = subject.prompts[0][-PROMPT_TAIL:] * 2
    drafters = [name for name in subject.drafters if name != "auto" and not (s.quick and "+" in name)]
    ways = {"plain, coupled": ("none", 0, replace(PARAMS, acceptance="coupled"))}
    ways |= {f"{name}, K = {depth}": (name, depth, PARAMS) for name in drafters}
    control_name = f"control: plain at temperature {SHIFT:g}"
    ways[control_name] = ("none", 0, replace(PARAMS, temperature=SHIFT))
    drawn: dict[str, Counter[tuple[int, ...]]] = {}
    kept: dict[str, str] = {}

    def draw(name: str, drafter: str, depth: int, params: SamplingParams, block: int) -> Check:
        first = (s.seed + block * 10**7) % 2**63
        answers = subject.engine(drafter, depth, SLOTS, PREFIXES).generate(
            [prompt] * s.sample_count, [replace(params, seed=first + number) for number in range(s.sample_count)]
        )
        drawn[name] = Counter(tuple(answer.token_ids) for answer in answers)
        stats = [answer.stats for answer in answers]
        kept[name] = f"{sum(x.accepted for x in stats)} of {sum(x.proposed for x in stats)} draft tokens kept"
        return Check(name, True, f"{len(drawn[name])} different ones")

    section.check("plain", lambda: draw("plain", "none", 0, PARAMS, 0))
    failed = Section("", "")
    for block, (name, way) in enumerate(ways.items(), start=1):
        failed.check(name, lambda n=name, w=way, b=block: draw(n, *w, b))  # type: ignore[misc]
    section.checks += [check for check in failed.checks if not check.passed]
    if "plain" not in drawn:
        return section
    names = [name for name in ways if name in drawn]
    chances = [same_law(drawn["plain"], drawn[name]) for name in names]
    for name, chance, told in zip(names, chances, holm(chances, s.level), strict=True):
        wanted = name == control_name
        drafted = "" if ways[name][0] == "none" else f"; {kept[name]}"
        seen = f"p = {chance:.2g}: {'told apart' if told else 'not told apart'}{drafted}"
        if wanted and not told:
            seen += "; no power: the samples are too small to notice anything, so this section shows nothing"
        section.checks.append(Check(name, told == wanted, seen))
    section.notes.append(f"p-values of {len(names)} comparisons, judged together by Holm's method at level {s.level:g}")
    return section
