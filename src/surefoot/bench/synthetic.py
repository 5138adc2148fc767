"""Drafts of a set acceptance in place of a drafter's own, which it makes all the same: for weights whose drafts mean
nothing. The known continuation is what plain decoding gave, so tokens stay plain's."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter
from surefoot.verify.synthetic import synthetic_draft

if TYPE_CHECKING:  # what needs Triton is imported where there is a GPU
    from surefoot.kernels.fused.rows import Text
    from surefoot.model.fused import FusedModel


class Continuations:
    """Prompt and output of every prompt that was decoded plainly."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, ...], list[int]] = {}

    def learn(self, prompts: Seq[list[int]], outputs: Seq[list[int]]) -> None:
        """Plain decoding's answers."""
        for prompt, output in zip(prompts, outputs, strict=True):
            self._texts[tuple(prompt)] = prompt + output

    def of(self, sequence: Sequence) -> list[int]:
        """The whole text of which the sequence has the beginning."""
        return self._texts[tuple(sequence.tokens[: sequence.prompt_length])]


class SyntheticDrafter:
    """A drafter that works as it always does, and hands over drafts of the set acceptance."""

    def __init__(self, inner: Drafter, shares: Seq[float], texts: Continuations, vocab_size: int) -> None:
        self.name = inner.name
        self._inner, self._shares, self._texts, self._vocab_size = inner, shares, texts, vocab_size

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """Drafts of `depths[i]` tokens, as far as shares were set."""
        drafts = self._inner.propose(sequences, depths)
        return [
            replace(draft, tokens=self._tokens(sequence, depth), probs=None)
            for draft, sequence, depth in zip(drafts, sequences, depths, strict=True)
        ]

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """The inner drafter's."""
        self._inner.observe(sequence, position, hidden)

    def release(self, sequence: Sequence) -> None:
        """The inner drafter's."""
        self._inner.release(sequence)

    def _tokens(self, sequence: Sequence, depth: int) -> tuple[int, ...]:
        position = len(sequence.tokens)
        known = self._texts.of(sequence)[position : position + depth]
        return tuple(synthetic_draft(known, self._shares, sequence.slot, position, self._vocab_size))


class SyntheticStep:
    """The same inside a step on the device (`engine.device.Overwrite`); steps of all drafters share it."""

    def __init__(self, model: FusedModel, shares: Seq[float], texts: Continuations) -> None:
        from surefoot.verify.fused.synthetic import overwrite_drafts

        self._overwrite, self._vocab_size = overwrite_drafts, model.decoder.config.vocab_size
        self._texts, self._known = texts, torch.zeros_like(model.progress.tokens)
        self._shares = torch.tensor(shares, dtype=torch.float64, device=self._known.device)

    def start(self, sequence: Sequence) -> None:
        """Put the sequence's whole text where the kernel reads it."""
        text = torch.tensor(self._texts.of(sequence), dtype=torch.int32)
        self._known[sequence.slot, : len(text)] = text.to(self._known.device)

    def __call__(self, text: Text) -> None:
        """The drafts, in place."""
        self._overwrite(text.drafts, text.slots, text.length, self._known, self._shares, vocab_size=self._vocab_size)
