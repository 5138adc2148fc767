"""Single passes of the fused model, recorded as CUDA graphs where there is a GPU. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import torch
from torch import Tensor

from surefoot.bench.prompts import random_tokens
from surefoot.bench.turns import Action, timed
from surefoot.engine.device import DeviceReader
from surefoot.kernels.fused.launch import recorded
from surefoot.kernels.fused.rows import Text
from surefoot.model import DraftHead
from surefoot.model.fused import FusedModel
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence

SIZES = range(1, 17)
REPLAYS = 20  # at most, timed together: a graph is launched in less time than a clock is read around a wait
TIMING = 0.01  # seconds that such a timing takes, if so many replays do


class FusedPasses:
    """Passes of a FusedModel, behind a prompt in every slot (all equally long), whose last token is read with what
    follows. Timed ones stand there again and again, behind a window of which one token was kept."""

    def __init__(self, model: FusedModel, prompts: Seq[list[int]], draft_head: DraftHead | None = None) -> None:
        self.context, self.calls = len(prompts[0]) - 1, 1
        self.sizes: Seq[int] = [size for size in SIZES if size <= model.window]
        self.vocab_size = model.decoder.config.vocab_size
        self._model, self._prompts, self._draft_head = model, prompts, draft_head
        self._cuda = model.decoder.device.type == "cuda"
        tokens = [random_tokens(self.vocab_size, max(1, model.window - 1), slot + 1) for slot in range(model.slots)]
        self._drafts = torch.tensor(tokens, dtype=torch.int32).to(model.decoder.device)
        self._slots = torch.arange(model.slots, dtype=torch.int32).to(model.decoder.device)

    def start(self) -> None:
        """Read the prompts, if the cache does not have them."""
        reader = DeviceReader(self._model)
        for slot, prompt in enumerate(self._prompts):
            for _ in reader.read(Sequence(slot, list(prompt), SamplingParams(), len(prompt) + 1)):
                pass

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
        text = self._text(self._slots, self._drafts)
        self.start()
        model.progress.replay.fill_(1)
        actions = {f"verify {size}": self._recorded(partial(model.score, text, size)) for size in self.sizes}
        if model.head is not None:
            draft = partial(model.draft_next, text, model.progress.length, self._draft_head)
            actions["draft"] = self._recorded(draft)
        if self._cuda:
            self.calls = max(1, min(REPLAYS, round(TIMING / timed(actions["verify 1"], self.wait))))
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
