"""Single passes of a model at a known context: windows of the target and steps of the MTP head, to compare and to time.

`EagerPasses` goes through the Target and the drafter that the engine's loop uses; `bench.fused` is the fused model's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from surefoot.bench.prompts import random_tokens
from surefoot.bench.turns import Action
from surefoot.drafters.mtp import MTPDrafter
from surefoot.engine.target import DecoderTarget
from surefoot.model import DraftHead, MTPHead
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Window

SIZES = range(1, 9)


class Passes(Protocol):
    """All slots hold the same `context` random tokens; windows of the `sizes` may follow."""

    context: int
    sizes: Seq[int]
    calls: int  # of an action for one timing
    vocab_size: int

    def start(self) -> None:
        """Bring the slots to the context, whatever was read since."""

    def read(self, tokens: Seq[int], keep: int) -> Tensor:
        """Logits [n, V] of a window of n tokens of slot 0; its first `keep` tokens stay."""

    def actions(self) -> dict[str, Action]:
        """ "verify N" is a pass over N tokens of every slot, "draft" a step of the head, with the LM head."""

    def rewind(self) -> None:
        """What goes before an action's turn: back to the context, if actions read on."""

    def wait(self) -> None:
        """Return when the device has done what it was given."""


class EagerPasses:
    """Passes of a DecoderTarget and, if there is a head, of the MTP drafter."""

    def __init__(
        self,
        target: DecoderTarget,
        head: MTPHead | None,
        context: int,
        sizes: Seq[int] = SIZES,
        draft_head: DraftHead | None = None,
    ) -> None:
        self.context, self.sizes, self.calls = context, sizes, 1
        self.vocab_size = target.vocab_size
        self._target, self._head, self._draft_head = target, head, draft_head
        self._slots = range(target.slots)
        self._filled = False
        self._cuda = target.decoder.device.type == "cuda"

    def start(self) -> None:
        """Read the context at the first call; go back to it at the next ones."""
        for slot in self._slots:
            if self._filled:
                self._target.rewind(slot)
                continue
            for _ in self._target.prefill(slot, random_tokens(self.vocab_size, self.context)):
                pass
            self._target.mark(slot)
        self._filled = True

    def rewind(self) -> None:
        """Go back to the context: actions read on."""
        self.start()

    def close(self) -> None:
        """Leave the slots to others."""
        for slot in self._slots:
            self._target.release(slot)
        self._filled = False

    def read(self, tokens: Seq[int], keep: int) -> Tensor:
        """A window of slot 0, and its commit."""
        scores = self._target.verify([Window(0, tuple(tokens))])[0]
        self._target.commit(0, keep)
        return scores.logits[: len(tokens)].clone()

    def actions(self) -> dict[str, Action]:
        """A pass commits all of its window, whose bookkeeping the next one pays for; a draft step includes the choice
        of a token."""
        actions: dict[str, Action] = {f"verify {size}": partial(self._verify, size) for size in self.sizes}
        return actions if self._head is None else actions | {"draft": self._draft_action(self._head)}

    def wait(self) -> None:
        """For the GPU, if it is one."""
        if self._cuda:
            torch.cuda.synchronize()

    def _verify(self, size: int) -> None:
        tokens = tuple(random_tokens(self.vocab_size, size))
        self._target.verify([Window(slot, tokens) for slot in self._slots])
        for slot in self._slots:
            self._target.commit(slot, size)

    def _draft_action(self, head: MTPHead) -> Action:
        drafter = MTPDrafter(head, len(self._slots), draft_head=self._draft_head)
        hidden = torch.randn(1, head.config.hidden_size, generator=torch.Generator().manual_seed(2))
        hidden = hidden.to(head.decoder.device)
        text = random_tokens(self.vocab_size, self.context + 2)
        sequences = [Sequence(slot, text, SamplingParams(), limit=self._target.max_len) for slot in self._slots]

        def draft() -> None:
            for sequence in sequences:
                drafter.observe(sequence, self.context, hidden)
            drafter.propose(sequences, [1] * len(sequences))

        return draft
