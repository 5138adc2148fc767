"""Gathered rows against their references."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.kernels.fused.linear import Feed
from surefoot.kernels.fused.rows import (
    Text,
    embed,
    embed_reference,
    final_norm,
    final_norm_reference,
    head_inputs,
    head_inputs_reference,
)

HIDDEN = 1100


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_text(device: torch.device) -> Text:
    generator = torch.Generator().manual_seed(5)
    rows = [[2, -1, 0], [4, 9, 0]]
    tokens = torch.randint(0, 50, (3, 20), generator=generator)
    drafts = torch.tensor([[7, 8, -1], [1, 2, 3], [9, 11, -1]])
    table = [torch.tensor(row) for row in rows]
    return Text(*(t.to(torch.int32).to(device) for t in (table[0], torch.tensor([4, 9, 0]), tokens, drafts)))


def empty_feed(rows: int, device: torch.device) -> Feed:
    return Feed(*(torch.full((rows, columns), torch.nan, device=device) for columns in (HIDDEN, 35)))


def test_embeddings_and_head_inputs(device: torch.device) -> None:
    text, table, scale = make_text(device), random(50, HIDDEN).to(device), random(HIDDEN, seed=6).to(device)
    for window, start in ((4, text.length), (2, text.length - 2), (1, text.length + 2)):
        found, expected = (torch.full((3 * window, HIDDEN), torch.nan, device=device) for _ in range(2))
        feeds = [empty_feed(3 * window, device) for _ in range(2)]
        embed(table, text, start, found, scale, feeds[0], window=window)
        embed_reference(table, text, start, expected, scale, feeds[1], window=window)
        assert torch.equal(found, expected)
        assert torch.equal(feeds[0].scaled, feeds[1].scaled)
        torch.testing.assert_close(feeds[0].squares.sum(-1), feeds[1].squares.sum(-1))
        hidden = random(3, 4, HIDDEN, seed=1).to(device)
        norms = (random(HIDDEN, seed=2).to(device), random(HIDDEN, seed=3).to(device))
        found, expected = (torch.full((3 * window, 2 * HIDDEN), torch.nan, device=device) for _ in range(2))
        head_inputs(table, text, start, hidden, norms, found, window=window, eps=1e-6)
        head_inputs_reference(table, text, start, hidden, norms, expected, window=window, eps=1e-6)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_final_norm(device: torch.device) -> None:
    """States go to their positions' rows of their slots' rings; a sequence without a slot leaves them alone."""
    x, scale = random(9, HIDDEN).to(device), random(HIDDEN, seed=1).to(device)
    slots, start = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([2, -1, 1], [0, 2, 3]))
    for last, room in ((False, 4), (True, 1)):
        found, expected = (torch.full((3, room, HIDDEN), 7.0, device=device) for _ in range(2))
        narrow, other = (torch.full((3 if last else 9, HIDDEN), torch.nan, device=device) for _ in range(2))
        final_norm(x, scale, slots, start, found, narrow, window=3, eps=1e-6, last=last)
        final_norm_reference(x, scale, slots, start, expected, other, window=3, eps=1e-6, last=last)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(narrow, other, rtol=1e-5, atol=1e-6)
        assert (found[0] == 7).all()
        torch.testing.assert_close(found[1, 0], narrow[-1], rtol=1e-5, atol=1e-6)
