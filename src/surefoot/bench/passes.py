"""Single passes of a model at a known context: windows of the target and steps of the MTP head, to compare and to time.

`EagerPasses` goes through the Target and the drafter that the engine's loop uses; `FusedPasses` through the fused
model, recorded as CUDA graphs where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from surefoot.bench.prompts import random_tokens
from surefoot.bench.turns import Action, nothing
from surefoot.drafters.mtp import MTPDrafter
from surefoot.engine.target import DecoderTarget
from surefoot.kernels.fused.rows import Text
from surefoot.model import MTPHead
from surefoot.model.fused import FusedModel
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Window

EAGER_SIZES, FUSED_SIZES = range(1, 9), range(1, 17)
REPLAYS = 20  # timed together: a graph is launched in less time than a clock is read around a wait


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

    def wait(self) -> None:
        """Return when the device has done what it was given."""


class EagerPasses:
    """Passes of a DecoderTarget and, if there is a head, of the MTP drafter."""

    def __init__(self, target: DecoderTarget, head: MTPHead | None, context: int) -> None:
        self.context, self.sizes, self.calls = context, EAGER_SIZES, 1
        self.vocab_size = target.vocab_size
        self._target, self._head = target, head
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
        drafter = MTPDrafter(head, len(self._slots))
        hidden = torch.randn(1, head.config.hidden_size, generator=torch.Generator().manual_seed(2))
        hidden = hidden.to(head.decoder.device)
        text = random_tokens(self.vocab_size, self.context + 2)
        sequences = [Sequence(slot, text, SamplingParams(), limit=self._target.max_len) for slot in self._slots]

        def draft() -> None:
            for sequence in sequences:
                drafter.observe(sequence, self.context, hidden)
            drafter.propose(sequences, [1] * len(sequences))

        return draft


class FusedPasses:
    """Passes of a FusedModel. Timed ones stand at the context again and again, behind a window of which one token was
    kept."""

    def __init__(self, model: FusedModel, context: int) -> None:
        self.context, self.sizes = context, [size for size in FUSED_SIZES if size <= model.window]
        self.vocab_size = model.decoder.config.vocab_size
        self._model = model
        self._cuda = model.decoder.device.type == "cuda"
        self.calls = REPLAYS if self._cuda else 1
        tokens = torch.tensor([random_tokens(self.vocab_size, max(1, model.window - 1))], dtype=torch.int32)
        slots = torch.arange(model.slots, dtype=torch.int32)
        self._slots, self._drafts = (tensor.to(model.decoder.device) for tensor in (slots, tokens))

    def start(self) -> None:
        """Read the context into every slot anew."""
        model, tokens = self._model, random_tokens(self.vocab_size, self.context + 1)
        for slot in range(model.slots):
            model.prefill_cache.reset(slot)
            hidden = model.decoder.prefill(tokens[:-1], model.prefill_cache, slot)[-1]
            model.prefill_cache.finish(slot)
            model.progress.start(slot, tokens, model.decoder.max_len, hidden)

    def read(self, tokens: Seq[int], keep: int) -> Tensor:
        """A window of slot 0; the next one applies what was kept."""
        model, device = self._model, self._drafts.device
        position = int(model.progress.length[0])
        model.progress.tokens[0, position : position + len(tokens)] = torch.tensor(tokens, dtype=torch.int32).to(device)
        drafts = torch.tensor([[*tokens[1:], 0][: max(1, len(tokens) - 1)]], dtype=torch.int32, device=device)
        logits = model.score(self._text(self._slots[:1], drafts), len(tokens)).clone()
        model.progress.length[0] += keep
        model.progress.replay[0] = keep
        return logits

    def actions(self) -> dict[str, Action]:
        """On a GPU each is the replay of a recorded graph."""
        model = self._model
        drafts = self._drafts.expand(model.slots, -1).contiguous()
        text = self._text(self._slots, drafts)
        self.start()
        model.progress.replay.fill_(1)
        actions = {f"verify {size}": self._recorded(partial(model.score, text, size)) for size in self.sizes}
        if model.head is not None:
            actions["draft"] = self._recorded(partial(model.draft_next, text, model.progress.length))
        return actions

    def wait(self) -> None:
        """For the GPU, if it is one."""
        if self._cuda:
            torch.cuda.synchronize()

    def _text(self, slots: Tensor, drafts: Tensor) -> Text:
        return Text(slots, self._model.progress.length, self._model.progress.tokens, drafts)

    def _recorded(self, action: Callable[[], Tensor]) -> Action:
        if not self._cuda:
            return action
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles what has to be, which recording must not see
            action()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            action()
        return graph.replay


def rewinding(passes: Passes) -> Action:
    """What goes before an action's turn: passes that read on must go back."""
    return passes.start if isinstance(passes, EagerPasses) else nothing
