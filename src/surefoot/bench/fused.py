"""Single passes of the fused model, recorded as CUDA graphs where there is a GPU. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import torch
from torch import Tensor

from surefoot.bench.prompts import random_tokens
from surefoot.bench.turns import Action
from surefoot.kernels.fused.launch import recorded
from surefoot.kernels.fused.rows import Text
from surefoot.model import DraftHead
from surefoot.model.fused import FusedModel

SIZES = range(1, 17)
REPLAYS = 20  # timed together: a graph is launched in less time than a clock is read around a wait


class FusedPasses:
    """Passes of a FusedModel. Timed ones stand at the context again and again, behind a window of which one token was
    kept."""

    def __init__(self, model: FusedModel, context: int, draft_head: DraftHead | None = None) -> None:
        self.context, self.calls = context, REPLAYS if model.decoder.device.type == "cuda" else 1
        self.sizes: Seq[int] = [size for size in SIZES if size <= model.window]
        self.vocab_size = model.decoder.config.vocab_size
        self._model, self._draft_head = model, draft_head
        self._cuda = model.decoder.device.type == "cuda"
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
            model.progress.start(slot, tokens, hidden)

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
            draft = partial(model.draft_next, text, model.progress.length, self._draft_head)
            actions["draft"] = self._recorded(draft)
        return actions

    def rewind(self) -> None:
        """Nothing: actions stay where they are."""

    def wait(self) -> None:
        """For the GPU, if it is one."""
        if self._cuda:
            torch.cuda.synchronize()

    def _text(self, slots: Tensor, drafts: Tensor) -> Text:
        return Text(slots, self._model.progress.length, self._model.progress.tokens, drafts)

    def _recorded(self, action: Callable[[], Tensor]) -> Action:
        if not self._cuda:
            return action
        return recorded(action)
