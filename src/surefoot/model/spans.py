"""Which rows of a pass belong to which sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from surefoot.kernels.rows import MIN_ROWS, padded_rows, rows_of_a_pass

Item = TypeVar("Item")


@dataclass(frozen=True)
class Span:
    """Rows `row .. row + count - 1` of the pass are tokens `position ...` of the sequence in `slot`."""

    slot: int
    position: int
    row: int
    count: int

    @property
    def rows(self) -> slice:
        """The span's rows of the pass."""
        return slice(self.row, self.row + self.count)


@dataclass(frozen=True)
class Layout:
    """The rows of one pass: the spans one after the other, then padding rows that nobody reads."""

    spans: tuple[Span, ...]
    rows: int

    @classmethod
    def of(cls, parts: Seq[tuple[int, int, int]], device: torch.device, least_rows: int = MIN_ROWS) -> Layout:
        """From (slot, position of the first token, number of tokens) for each sequence."""
        spans, row = [], 0
        for slot, position, count in parts:
            spans.append(Span(slot, position, row, count))
            row += count
        return cls(tuple(spans), padded_rows(row, device, least_rows))

    def positions(self, device: torch.device) -> Tensor:
        """The position of every row [rows]; 0 for padding."""
        listed = [p for span in self.spans for p in range(span.position, span.position + span.count)]
        return torch.tensor(listed + [0] * (self.rows - len(listed)), device=device)

    def shares(self) -> list[tuple[Span, slice]]:
        """Each span with its rows, the padding given to the last one: for what may be computed for it without harm,
        so that the shares together are all rows."""
        ends = [*(span.row for span in self.spans[1:]), self.rows]
        return [(span, slice(span.row, end)) for span, end in zip(self.spans, ends, strict=True)]

    def join(self, parts: Seq[Tensor]) -> Tensor:
        """The spans' rows, one tensor a span, as one tensor of all rows; padding is zero."""
        padding = self.rows - sum(part.shape[0] for part in parts)
        if padding:
            parts = [*parts, parts[0].new_zeros(padding, *parts[0].shape[1:])]
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def into_passes(items: Seq[Item], counts: Seq[int], device: torch.device) -> list[list[Item]]:
    """Items of `counts` rows each, in order, in groups that one pass may hold."""
    limit = rows_of_a_pass(device)
    if limit is None:
        return [list(items)] if items else []
    groups: list[list[Item]] = []
    room = 0
    for item, count in zip(items, counts, strict=True):
        if count > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= count
    return groups
