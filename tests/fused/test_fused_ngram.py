"""Prompt lookup on the device against the host's drafter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.drafters.ngram import AFTER_ONE, LONGEST, NgramDrafter
from surefoot.kernels.fused import ngram
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(
    texts: list[list[int]],
    slots: list[int],
    depth: int,
    max_ngram: int,
    min_ngram: int,
    reference: bool = False,
    columns: int | None = None,
) -> list[tuple[list[int], int, int]]:
    """(draft's columns, count, match) of every sequence; a slot for every text."""
    width = max(len(text) for text in texts) + 7
    tokens = torch.full((len(texts), width), -1, dtype=torch.int32)
    for slot, text in enumerate(texts):
        tokens[slot, : len(text)] = torch.tensor(text)
        tokens[slot, len(text) :] = text[-1]  # left behind by another request, and bound to be found if it were read
    length = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32, device=DEVICE)
    sequences = len(slots)

    def full(*shape: int) -> Tensor:
        return torch.full(shape, -9, dtype=torch.int32, device=DEVICE)

    drafts, count, match = full(sequences, columns or depth), full(sequences), full(sequences)
    function = ngram.propose_reference if reference else ngram.propose
    function(
        tokens.to(DEVICE),
        length,
        torch.tensor(slots, dtype=torch.int32, device=DEVICE),
        drafts,
        count,
        match,
        ngram.workspace(sequences, width, DEVICE),
        depth=depth,
        max_ngram=max_ngram,
        min_ngram=min_ngram,
    )
    return list(zip(drafts.tolist(), count.tolist(), match.tolist(), strict=True))


def on_host(text: list[int], depth: int, max_ngram: int, min_ngram: int) -> tuple[list[int], int, int]:
    drafter = NgramDrafter(max_ngram, min_ngram)
    sequence = Sequence(0, list(text), SamplingParams(), len(text) + depth)
    match = drafter.find(sequence)
    draft = list(drafter.draft(sequence, match, depth).tokens)
    return draft + [-1] * (depth - len(draft)), len(draft), 0 if match is None else match.length


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), min_size=1, max_size=3),
    depth=st.integers(1, 9),
    min_ngram=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_same_drafts_as_the_host(texts: list[list[int]], depth: int, min_ngram: int, more: int) -> None:
    slots = list(reversed(range(len(texts))))
    found = run(texts, slots, depth, min_ngram + more, min_ngram)
    assert found == run(texts, slots, depth, min_ngram + more, min_ngram, reference=True)
    assert found == [on_host(texts[slot], depth, min_ngram + more, min_ngram) for slot in slots]


@pytest.mark.parametrize("size", [1023, 1024, 1025, 5000])
def test_long_texts(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    text: list[int] = torch.randint(0, 1000, (size,), generator=generator).tolist()
    text[-6:] = text[100:106]
    other: list[int] = torch.randint(0, 12, (size,), generator=generator).tolist()
    alone = list(range(size))
    found = run([text, other, alone], [0, 1, 2], 4, 5, 2)
    assert found[0] == (text[106:110], 4, 6)
    assert found == [on_host(t, 4, 5, 2) for t in (text, other, alone)]
    assert found[2] == ([-1] * 4, 0, 0)


def test_absent_sequences_and_further_columns() -> None:
    text = [1, 2, 3, 1, 2]
    found = run([text, text], [-1, 1, -1], 4, 5, 2, columns=7)
    assert found[0] == found[2] == ([-1] * 7, 0, 0)
    assert found[1] == ([3, 1, 2, 3, -1, -1, -1], 4, 2)
    assert found == run([text, text], [-1, 1, -1], 4, 5, 2, reference=True, columns=7)


def test_the_hosts_constants() -> None:
    assert (ngram.AFTER_ONE, ngram.LONGEST) == (AFTER_ONE, LONGEST)
    repeated = [4] * 100
    assert run([repeated], [0], 5, 5, 2) == [([4] * 5, 5, LONGEST)]
