"""Are these draws from that law? Chi-square tests, and a threshold for several of them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch

LEAST_EXPECTED = 5.0  # draws of a cell below which the chi-square distribution is no good approximation


def goodness_of_fit(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """The p-value of draws under a law (Pearson's chi-square). A draw that the law has no chance for gives 0."""
    if not all(law.get(outcome, 0.0) > 0 for outcome, count in counts.items() if count):
        return 0.0
    total, cells = sum(counts.values()), [outcome for outcome, chance in law.items() if chance > 0]
    pairs = _pooled([(counts.get(outcome, 0), total * law[outcome]) for outcome in cells])
    return _survival(sum((seen - due) ** 2 / due for seen, due in pairs), len(pairs) - 1)


def same_law(one: Mapping[Any, int], other: Mapping[Any, int]) -> float:
    """The p-value of two sets of draws being from one law (chi-square test of homogeneity)."""
    sizes = sum(one.values()), sum(other.values())
    share = sizes[0] / sum(sizes)
    both = [(one.get(outcome, 0), one.get(outcome, 0) + other.get(outcome, 0)) for outcome in {*one, *other}]
    least = min(share, 1 - share)
    pairs = _pooled([(seen, together * least) for seen, together in both])
    value = 0.0
    for seen, due in pairs:
        together = due / least
        value += (seen - together * share) ** 2 / (together * share * (1 - share))
    return _survival(value, len(pairs) - 1)


def holm(p_values: Seq[float], level: float) -> list[bool]:
    """Which of several tests fail if all of them together may fail by chance with probability `level` (Holm 1979):
    from the smallest p-value on, each is held against level / (how many are left), until one passes."""
    failed = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if p_values[index] >= level / (len(p_values) - rank):
            break
        failed[index] = True
    return failed


def _pooled(cells: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Cells (seen, expected), of which the rare ones have been put together until each expects enough."""
    cells = sorted(cells, key=lambda cell: cell[1])
    while len(cells) > 1 and cells[0][1] < LEAST_EXPECTED:
        (seen, due), (next_seen, next_due), *rest = cells
        cells = sorted([(seen + next_seen, due + next_due), *rest], key=lambda cell: cell[1])
    return cells


def _survival(value: float, degrees: int) -> float:
    """The chance that a chi-square number of so many degrees of freedom is at least `value`."""
    if degrees < 1:
        return 1.0
    halves = torch.tensor([degrees / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))
