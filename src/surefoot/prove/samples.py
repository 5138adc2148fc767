"""Do short sampled continuations of the real model, drafted, look like plainly decoded ones? A two-sample test."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from surefoot.bench.settings import Method
from surefoot.prove.report import Check, Section
from surefoot.prove.statistics import holm, same_law
from surefoot.prove.subject import Subject
from surefoot.sampling import SamplingParams

LENGTH = 3  # tokens of a continuation
PROMPT_TAIL = 6  # tokens of the prompt, twice: so that n-gram lookup has something to find
SLOTS = 16
PREFIXES = 2**28  # bytes of what was read of the prompt, which all share: reading it would take most of the time
PARAMS = SamplingParams(temperature=0.7, top_k=6, max_new_tokens=LENGTH, ignore_eos=True, acceptance="rejection")
SHIFTS = (1.5, 2.0, 4.0)  # factors of the controls' temperatures, until one is noticed


@dataclass(frozen=True)
class Way:
    """A way to draw continuations."""

    drafter: str
    depth: int
    params: SamplingParams


@dataclass(frozen=True)
class Drawn:
    """How often each continuation came, and what became of the drafts."""

    counts: Counter[tuple[int, ...]]
    kept: int
    proposed: int

    def beginnings(self, length: int) -> Counter[tuple[int, ...]]:
        """How often each beginning of so many tokens came."""
        found = Counter[tuple[int, ...]]()
        for tokens, count in self.counts.items():
            found[tokens[:length]] += count
        return found


def prove_samples(subject: Subject) -> Section:
    """Continuations by every drafter under the p/q rule, against plain ones of other seeds, and a control."""
    s = subject.settings
    section = Section(
        "two samples",
        f"{subject.samples} continuations of {LENGTH} tokens by each drafter, sampled by the p/q rule, cannot be told "
        "from as many of plain decoding with other seeds, and those of another temperature can.",
    )
    drafters = [name for name in subject.drafters if name != "auto" and not (s.quick and "+" in name)]
    ways = {"plain, coupled": Way("none", 0, replace(PARAMS, acceptance="coupled"))}
    ways |= {Method(name, s.depths[-1]).name: Way(name, s.depths[-1], PARAMS) for name in drafters}
    drawn: dict[str, Drawn] = {}
    for block, (name, way) in enumerate({"plain": Way("none", 0, PARAMS), **ways}.items()):
        try:
            drawn[name] = draw(subject, way, block)
        except Exception as error:  # as a broken engine may raise
            section.failed(name, error)
    if "plain" not in drawn:
        return section
    names = [name for name in ways if name in drawn]
    chances = [same(drawn["plain"], drawn[name]) for name in names]
    for name, chance, told in zip(names, chances, holm(chances, s.level), strict=True):
        one = drawn[name]
        drafted = f"; {one.kept} of {one.proposed} draft tokens kept" if ways[name].depth else ""
        section.checks.append(Check(name, not told, f"p = {chance:.2g}: {'' if told else 'not '}told apart{drafted}"))
    section.check("control: another temperature", lambda: _control(subject, drawn["plain"], len(ways)))
    section.notes.append(f"p-values of {len(names)} comparisons, judged together by Holm's method at level {s.level:g} "
                         f"(the control: {s.level:g} / {len(ways)})")  # fmt: skip
    return section


def draw(subject: Subject, way: Way, block: int) -> Drawn:
    """Continuations of one prompt under seeds of the block's own."""
    s = subject.settings
    first = (s.seed + block * 10**7) % 2**63
    prompt = subject.prompts[0][-PROMPT_TAIL:] * 2
    answers = subject.engine(way.drafter, way.depth, SLOTS, PREFIXES).generate(
        [prompt] * subject.samples, [replace(way.params, seed=first + number) for number in range(subject.samples)]
    )
    stats = [answer.stats for answer in answers]
    return Drawn(Counter(tuple(answer.token_ids) for answer in answers), sum(one.accepted for one in stats),
                 sum(one.proposed for one in stats))  # fmt: skip


def same(one: Drawn, other: Drawn) -> float:
    """The p-value of both being from one law: the least of those of the first token, the first two, and so on, times
    their number. Whole continuations are many and rare where a model is not sure, single tokens are not."""
    by_length = [same_law(one.beginnings(length), other.beginnings(length)) for length in range(1, LENGTH + 1)]
    return min(1.0, LENGTH * min(by_length))


def _control(subject: Subject, plain: Drawn, comparisons: int) -> Check:
    """Plain decoding at a higher temperature, and a higher one until it is noticed."""
    seen = []
    for block, factor in enumerate(SHIFTS, start=100):
        temperature = PARAMS.temperature * factor
        other = draw(subject, Way("none", 0, replace(PARAMS, temperature=temperature)), block)
        chance = same(plain, other)
        told = chance < subject.settings.level / comparisons
        seen.append(f"{temperature:g} for {PARAMS.temperature:g}: p = {chance:.2g}, {'' if told else 'not '}told apart")
        if told:
            return Check("control: another temperature", True, "; ".join(seen))
    seen.append("no power: the samples are too few to notice anything, so this section shows nothing")
    return Check("control: another temperature", False, "; ".join(seen))
