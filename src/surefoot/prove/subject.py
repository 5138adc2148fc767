"""The model that is on trial, with the prompts and the engines over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from surefoot.bench.prompts import kinds, random_prompts
from surefoot.cache import RecurrentCache
from surefoot.drafters.draft_model import DraftTarget
from surefoot.engine.drafting import NEED_HEAD
from surefoot.engine.engine import Engine
from surefoot.engine.loaded import LoadedModel
from surefoot.engine.target import DecoderTarget
from surefoot.errors import InputError
from surefoot.loading.tokenizer import Tokenizer, require_tokenizer
from surefoot.prove.reference import Reference
from surefoot.prove.settings import BY_NAME, Settings
from surefoot.types import Window

LONGEST_PROMPT = 512  # tokens; of a longer one the end is taken
SPARE = 64  # positions beside prompt and output
BUILT_IN = 64  # tokens of a built-in prompt
RANDOM = 24  # tokens of a prompt where there is no tokenizer
ROUNDING = {True: 1e-3, False: 0.15}  # of the logits' spread: float32, and the half precisions


class Subject(ABC):
    """A model on trial: what the sections ask of it. `drafters` are the names of those to prove, `samples` short
    continuations of each way to sample, `tolerance` what rounding may do to a logit as a share of their spread, `notes`
    what the user should know of the model."""

    drafters: Seq[str]
    samples: int
    notes: Seq[str]

    def __init__(
        self, settings: Settings, tokenizer: Tokenizer | None, vocab_size: int, max_len: int, dtype: torch.dtype
    ) -> None:
        self.settings, self.tokenizer, self.vocab_size = settings, tokenizer, vocab_size
        self.tolerance = ROUNDING[dtype == torch.float32]
        self.prompts = prompts_of(settings, tokenizer, vocab_size, max_len)

    @abstractmethod
    def target(self, slots: int) -> DraftTarget:
        """The host's target, with at least so many slots; asked again, the same one."""

    @abstractmethod
    def engine(self, drafter: str, depth: int, slots: int = 1, prefix_cache_bytes: int = 0) -> Engine:
        """An engine over the model."""

    @abstractmethod
    def expected(self, tokens: list[int], start: int = 0) -> Tensor:
        """The reference's logits after each of the tokens from `start` on, [T - start, V] float32 on the CPU."""

    @abstractmethod
    def length(self, slot: int) -> int:
        """Tokens that the slot of `target(2)` holds."""

    @abstractmethod
    def state(self, slot: int) -> Iterator[tuple[str, Tensor]]:
        """Every cache tensor of a slot of `target(2)` that a later step can read, with its layer's name."""

    def plain(self, slots: int = 1) -> Engine:
        """An engine that decodes plainly."""
        return self.engine("none", 0, slots)

    def row(self, prompt: Seq[int], output: Seq[int]) -> Tensor:
        """The engine's logits [V] of what follows, read as plain decoding reads: the prompt, then token by token."""
        target = self.target(1)
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
        return str(token) if self.tokenizer is None else f"{token} {self.tokenizer.decode([token])!r}"


class CheckpointSubject(Subject):
    """A checkpoint of the engine's own family. `source` says where its reference's weights come from."""

    def __init__(self, settings: Settings, model: LoadedModel, reference: Reference, source: str) -> None:
        super().__init__(settings, model.tokenizer, model.config.vocab_size, model.decoder.max_len, model.decoder.dtype)
        self.model, self.reference, self.source = model, reference, source
        self.drafters = drafters_of(settings, model.head is not None)
        self.samples, self.notes = settings.sample_count, model.notes

    def target(self, slots: int) -> DecoderTarget:
        """The loaded model's."""
        return self.model.target(slots)

    def engine(self, drafter: str, depth: int, slots: int = 1, prefix_cache_bytes: int = 0) -> Engine:
        """An engine over the model."""
        return Engine.over(self.model, drafter=drafter, draft_length=depth, slots=slots,
                           prefix_cache_bytes=prefix_cache_bytes)  # fmt: skip

    def expected(self, tokens: list[int], start: int = 0) -> Tensor:
        """By the book."""
        return self.reference.logits(self.reference.hidden(tokens)[start:])

    def length(self, slot: int) -> int:
        """By the cache."""
        return self.target(2).cache.length[slot]

    def state(self, slot: int) -> Iterator[tuple[str, Tensor]]:
        """Settles the slot's open window."""
        return state_of(self.target(2), slot)


def state_of(target: DecoderTarget, slot: int) -> Iterator[tuple[str, Tensor]]:
    """Every cache tensor that a later step can read, with its layer's name."""
    target.cache.settle(slot)
    for number, layer in enumerate(target.cache.layers):
        held: tuple[Tensor, ...]
        if isinstance(layer, RecurrentCache):
            held = (layer.state[slot], layer.conv_past(slot))
        else:
            held = layer.read(slot, target.cache.length[slot])
        for tensor in held:
            yield f"layer {number} ({type(layer).__name__})", tensor


def drafters_of(settings: Settings, with_head: bool) -> Seq[str]:
    """The drafters to prove of a checkpoint. Raises InputError for one that needs an MTP head that is not there."""
    known = [name for name in BY_NAME if with_head or name not in NEED_HEAD]
    return settings.drafters_among(known, "the checkpoint has no MTP head")


def prompts_of(settings: Settings, tokenizer: Tokenizer | None, vocab_size: int, max_len: int) -> list[list[int]]:
    """The prompts in tokens. Raises TokenizerError for texts without a tokenizer, InputError for one of no tokens."""
    if settings.prompts is None and tokenizer is None:
        return random_prompts(vocab_size, 2 if settings.quick else 4, RANDOM)
    texts, longest = settings.prompts, LONGEST_PROMPT
    if texts is None:
        texts, longest = tuple(listed[0] for listed in kinds().values()), BUILT_IN
        texts = texts[:2] if settings.quick else texts
    encode = require_tokenizer(tokenizer, "a text prompt").encode
    room = min(longest, max_len - settings.new_tokens)
    prompts = [encode(text)[-max(1, room) :] for text in texts]
    if not all(prompts):
        raise InputError("prompts: expected at least one token in each, found none")
    return prompts
