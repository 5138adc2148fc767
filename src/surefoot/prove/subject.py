"""The model that is on trial, with the prompts and the engines over it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from surefoot.bench.prompts import kinds, random_prompts
from surefoot.engine.engine import Engine
from surefoot.engine.loaded import LoadedModel
from surefoot.errors import InputError
from surefoot.loading.tokenizer import require_tokenizer
from surefoot.prove.reference import Reference
from surefoot.prove.settings import Settings
from surefoot.types import Window

LONGEST_PROMPT = 512  # tokens; of a longer one the end is taken
BUILT_IN = 64  # tokens of a built-in prompt
RANDOM = 24  # tokens of a prompt where there is no tokenizer


@dataclass
class Subject:
    """A loaded model on trial. `tolerance` is what rounding may do to a logit, as a share of their spread."""

    settings: Settings
    model: LoadedModel
    reference: Reference
    prompts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.prompts = prompts_of(self.settings, self.model)

    @property
    def drafters(self) -> Seq[str]:
        """Names of the drafters to prove."""
        return self.settings.drafters_of(self.model.head is not None)

    @property
    def tolerance(self) -> float:
        """Largest difference from the reference that counts as rounding, as a share of the logits' spread."""
        return 1e-3 if self.model.decoder.dtype == torch.float32 else 0.15

    def engine(self, drafter: str, depth: int, slots: int = 1, prefix_cache_bytes: int = 0) -> Engine:
        """An engine over the model."""
        return Engine.over(self.model, drafter=drafter, draft_length=depth, slots=slots,
                           prefix_cache_bytes=prefix_cache_bytes)  # fmt: skip

    def plain(self, slots: int = 1) -> Engine:
        """One that decodes plainly."""
        return self.engine("none", 0, slots)

    def row(self, prompt: Seq[int], output: Seq[int]) -> Tensor:
        """The engine's logits [V] of what follows, read as plain decoding reads: the prompt, then token by token."""
        target = self.model.target(1)
        with torch.inference_mode():
            for _ in target.prefill(0, prompt[:-1]):
                pass
            row = torch.empty(0)
            for token in (prompt[-1], *output):
                row = target.verify([Window(0, (token,))])[0].logits[0]
                target.commit(0, 1)
            target.release(0)
        return row

    def shown(self, token: int) -> str:
        """A token's id, with its text if there is a tokenizer."""
        return str(token) if self.model.tokenizer is None else f"{token} {self.model.tokenizer.decode([token])!r}"


def prompts_of(settings: Settings, model: LoadedModel) -> list[list[int]]:
    """The prompts in tokens. Raises TokenizerError for texts without a tokenizer, InputError for one of no tokens."""
    if settings.prompts is None and model.tokenizer is None:
        return random_prompts(model.config.vocab_size, 2 if settings.quick else 4, RANDOM)
    texts, longest = settings.prompts, LONGEST_PROMPT
    if texts is None:
        texts, longest = tuple(listed[0] for listed in kinds().values()), BUILT_IN
        texts = texts[:2] if settings.quick else texts
    encode = require_tokenizer(model.tokenizer, "a text prompt").encode
    room = min(longest, model.decoder.max_len - settings.new_tokens)
    prompts = [encode(text)[-max(1, room) :] for text in texts]
    if not all(prompts):
        raise InputError("prompts: expected at least one token in each, found none")
    return prompts
