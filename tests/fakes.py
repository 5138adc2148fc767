"""What tests of several parts draw on, beside the table and its drafters (`surefoot.prove.table`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.engine.target import DecoderTarget
from surefoot.prove.table import Scripted
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Draft, Scores, Window
from surefoot.verify import process

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]


class Ragged(Scripted):
    """Another drafter's drafts, cut to a length that changes from step to step, 0 included."""

    name = "ragged"

    def __init__(self, inner: Scripted) -> None:
        super().__init__()
        self.inner = inner

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        cut = [min(depth, len(s.tokens) * 7 % 5) for s, depth in zip(sequences, depths, strict=True)]
        return self.inner.propose(sequences, cut)


def decided(logits: Tensor, params: SamplingParams, tolerance: float) -> Tensor:
    """Whether top_p's verdict on each token is clear, [n, V] bool: not where the probability of all better ones lies
    within `tolerance` of top_p. Two devices may differ there, since they add up rounded numbers in another order.
    Computed in float64 on the CPU."""
    scaled = process(logits.cpu(), replace(params, top_p=1.0, min_p=0.0)).double()
    ranked = scaled.sort(dim=-1, descending=True, stable=True)  # of equals the lowest id first
    mass = ranked.values.softmax(dim=-1)
    before = torch.empty_like(mass).scatter_(-1, ranked.indices, mass.cumsum(dim=-1) - mass)
    return (before - params.top_p).abs() > tolerance if params.top_p < 1 else torch.ones_like(before, dtype=torch.bool)


def assert_same_kept(one: Tensor, other: Tensor, logits: Tensor, params: SamplingParams) -> None:
    """Two devices kept the same tokens of `logits` [n, V], wherever top_p's verdict is clear: of nearly all tokens. A
    float32 softmax of 248,320 logits was seen to be off by 2e-5 of its mass."""
    clear = decided(logits, params, tolerance=1e-4)
    assert (~clear).sum(dim=-1).max() <= 64
    assert torch.equal(one.isfinite().cpu()[clear], other.isfinite().cpu()[clear])


class ListGrammar:
    """A `verify.rules.Grammar` of a few texts, each a list of tokens that a stop id must follow."""

    def __init__(self, texts: Seq[Seq[int]], ends: Seq[int], vocab_size: int) -> None:
        self.texts, self._ends, self.size = [tuple(text) for text in texts], tuple(ends), vocab_size
        self.read: tuple[int, ...] = ()

    def following(self) -> set[int]:
        begun = len(self.read)
        return {text[begun] for text in self.texts if len(text) > begun and text[:begun] == self.read}

    def push(self, token: int) -> bool:
        fits = token in self.following()
        self.read += (token,) * fits
        return fits

    def pop(self, count: int) -> None:
        assert 0 <= count <= len(self.read)
        self.read = self.read[: len(self.read) - count]

    def mask(self) -> Tensor:
        mask = torch.zeros(self.size, dtype=torch.bool)
        mask[list(self.following())] = True
        return mask

    def ends(self) -> tuple[int, ...]:
        return self._ends if self.read in self.texts else ()

    def complete(self) -> bool:
        return not self.following()

    def forced(self) -> list[int]:
        begun = len(self.read)
        tokens: list[int] = []
        while len(following := self.following()) == 1 and not self.ends():
            tokens += following
            self.push(tokens[-1])
        self.read = self.read[:begun]
        return tokens


def keep_drafts_unseen(monkeypatch: pytest.MonkeyPatch, target: type = DecoderTarget) -> None:
    """Sabotage targets of a class, checkpoints' if not given: every draft token is made the likeliest, and so kept."""
    honest = target.verify  # type: ignore[attr-defined]  # of any class that is a Target

    def verify(self: Any, windows: Seq[Window]) -> list[Scores]:
        scores: list[Scores] = honest(self, windows)
        for window, score in zip(windows, scores, strict=True):
            for row, token in enumerate(window.tokens[1:]):
                score.logits[row, token] += 1e6
        return scores

    monkeypatch.setattr(target, "verify", verify)
