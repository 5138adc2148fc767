"""A model of another family on trial, run by `transformers` behind a `TransformersTarget`."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import Tensor

from surefoot.adapters import InexactWarning, TransformersTarget
from surefoot.bench.library import require_transformers
from surefoot.engine.drafting import build_drafter
from surefoot.engine.engine import Engine
from surefoot.errors import CheckpointError, shown
from surefoot.loading.files import is_there
from surefoot.loading.tokenizer import Tokenizer
from surefoot.prove.settings import Settings
from surefoot.prove.source import Source
from surefoot.prove.subject import LONGEST_PROMPT, SPARE, Subject

DRAFTERS = ("ngram", "suffix")  # that need nothing but tokens
SLOTS = 16  # they cost nothing until they are used
CHEAPER = 2  # its slots are read one after the other, so as many samples would take very long


def load_guest(source: Source) -> tuple[Any, Tokenizer | None]:
    """The library's model in float32, and its tokenizer if it has a fast one. Raises CheckpointError for files that the
    library does not load whole, InputError without the library."""
    transformers = require_transformers(source.folder.name)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # of its own, about file formats, and bars
        warnings.simplefilter("ignore")
        try:
            model, told = transformers.AutoModelForCausalLM.from_pretrained(
                **source.options, dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:  # as many kinds as it has models
            raise CheckpointError(f"{source.folder.name}: expected a model of Qwen3.5's family, or one that "
                                  f"transformers loads, found: {shown(str(error))}") from error  # fmt: skip
        if told["missing_keys"]:
            missing = ", ".join(sorted(told["missing_keys"])[:3])
            raise CheckpointError(f"{source.folder.name}: expected weights for all of the model, found none for "
                                  f"{missing}")  # fmt: skip
        return model.eval(), _tokenizer(transformers, source)


def _tokenizer(transformers: Any, source: Source) -> Tokenizer | None:
    if source.gguf is None and is_there(source.folder / "tokenizer.json"):
        return Tokenizer.from_folder(source.folder)
    try:
        backend = transformers.AutoTokenizer.from_pretrained(**source.options).backend_tokenizer
    except Exception:  # no tokenizer, or a slow one, which has no backend
        return None
    return Tokenizer(backend)


class GuestSubject(Subject):
    """A model that `transformers` runs. Its reference is the library's own pass over the whole text, in float32."""

    def __init__(self, settings: Settings, source: Source, device: torch.device, dtype: torch.dtype) -> None:
        self.drafters = settings.drafters_among(DRAFTERS, "of a model that transformers runs")
        self._book, tokenizer = load_guest(source)
        self.samples = settings.samples or settings.sample_count // CHEAPER
        positions = getattr(self._book.config.get_text_config(decoder=True), "max_position_embeddings", None)
        max_len = min(positions or LONGEST_PROMPT, LONGEST_PROMPT) + settings.new_tokens + SPARE
        max_len = min(max_len, positions or max_len)
        model = self._book if dtype == torch.float32 else copy.deepcopy(self._book).to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InexactWarning)  # it is in the report
            self._target = TransformersTarget(model.to(device), max_len=max_len, slots=SLOTS)
        super().__init__(settings, tokenizer, self._target.vocab_size, max_len, dtype)
        self.notes = [f"{type(model).__name__}, run by transformers; drafters that need an MTP head, and auto, are for "
                      "checkpoints of Qwen3.5's family"]  # fmt: skip
        if not self._target.exact:
            self.notes.append("its windows do not give the bits of single tokens, so near-ties may turn: nothing is "
                              "promised of its tokens")  # fmt: skip

    def target(self, slots: int) -> TransformersTarget:
        """One for all."""
        return self._target

    def engine(self, drafter: str, depth: int, slots: int = 1, prefix_cache_bytes: int = 0) -> Engine:
        """An engine with all of the target's slots, which keeps nothing of prompts."""
        return Engine(self._target, build_drafter(drafter, None, SLOTS), depth, tokenizer=self.tokenizer)

    @torch.inference_mode()
    def expected(self, tokens: list[int], start: int = 0) -> Tensor:
        """By the library."""
        logits: Tensor = self._book(torch.tensor([tokens], device=self._book.device), use_cache=False).logits[0]
        return logits[start:].float().cpu()

    def length(self, slot: int) -> int:
        """By the cache."""
        return self._target.length(slot)

    def state(self, slot: int) -> Iterator[tuple[str, Tensor]]:
        """Keys and values."""
        for number, held in enumerate(self._target.state(slot)):
            for tensor in held:
                yield f"layer {number}", tensor
