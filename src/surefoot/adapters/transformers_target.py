"""Any `transformers` causal language model whose cache can be cropped, as a `Target`.

`transformers` is imported here and in `exact` only; `pip install 'surefoot[transformers]'` brings it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from surefoot.adapters.exact import Pass, exact_copy, fixed_cache
from surefoot.errors import InputError, shown
from surefoot.sampling import require_int
from surefoot.types import Scores, Window

ROW_STEPS = (2, 4, 8, 16)  # passes are padded to a multiple of the first of these that makes them exact
PROBE_PROMPT = 58  # so that the probe's windows cross a block boundary of the cache
PROBE_WINDOWS = (2, 3, 5, 9, 17)
TOLERANCE = {True: 1e-2, False: 0.2}  # root mean square, relative: float32, and the half precisions


class InexactWarning(UserWarning):
    """A model may give other tokens with speculation than without."""


class TransformersTarget:
    """Runs a `transformers` model behind the `Target` Protocol, each slot with a cache of its own.

    With `exact` (the default) a copy of the model is used whose rows do not depend on the number of tokens read at once
    (see `exact`), so that speculative and plain decoding agree token for token in float32 and bfloat16. That is checked
    here, bit for bit, on random tokens; a model that cannot be made exact runs as it is, after an `InexactWarning`.
    Plain decoding through this class and the model's own `generate` may differ in near-ties, as two kernels do.

    `max_len` is the longest sequence (default: the positions its config names). Raises InputError before anything runs
    if the model keeps recurrent state or its cache cannot be cropped.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_len: int | None = None,
        slots: int = 1,
        exact: bool = True,
        prefill_chunk: int = 512,
    ) -> None:
        require_int("slots", slots, low=1)
        require_int("prefill_chunk", prefill_chunk, low=1)
        refuse_uncroppable(model)
        config = model.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None) or 2**20
        self.max_len = positions if max_len is None else max_len
        require_int("max_len", self.max_len, low=1, high=positions)
        self.slots = slots
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.eos_token_ids = eos_token_ids(model)
        self._config = config
        self._chunk = prefill_chunk
        self._caches: dict[int, Cache] = {}
        self._read: dict[int, tuple[int, int]] = {}  # slot -> (tokens in its window, rows with the padding)
        self._marks: dict[int, int] = {}
        self._model = model.eval()
        self._pass: Pass | None = None
        self._row_step = 1
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        obstacle = self._make_exact() if exact else "not asked for"
        self.exact = obstacle is None
        if exact and obstacle is not None:
            warnings.warn(
                f"{type(model).__name__} runs as it is: tokens may differ between speculative and plain decoding, most "
                f"likely in bfloat16 ({obstacle})",
                InexactWarning,
                stacklevel=2,
            )

    def prefill(self, slot: int, tokens: Seq[int]) -> Iterator[tuple[int, Tensor | None]]:
        """Empty the slot and read the tokens in chunks; yields (position, None) after each."""
        if not 0 <= slot < self.slots:
            raise InputError(f"slot: expected 0 to {self.slots - 1}, found {slot}")
        self._caches[slot] = self._new_cache()
        self._read.pop(slot, None)
        for start in range(0, len(tokens), self._chunk):
            chunk = list(tokens[start : start + self._chunk])
            self._forward(slot, chunk, range(start, start + len(chunk)), window=False)
            yield start, None

    def verify(self, windows: Seq[Window]) -> list[Scores]:
        """Logits [W, V] float32 of each window; the slots are read one after the other."""
        return [Scores(self._window(window.slot, window.tokens)) for window in windows]

    def commit(self, slot: int, keep: int) -> None:
        """Crop the slot's cache to the window's first `keep` tokens."""
        count, rows = self._read.pop(slot)
        if not 1 <= keep <= count:
            raise InputError(f"keep: expected 1 to {count} (the window), found {keep}")
        self._caches[slot].crop(keep - rows)

    def release(self, slot: int) -> None:
        """Drop the slot's cache."""
        self._caches.pop(slot, None)
        self._read.pop(slot, None)

    def mark(self, slot: int) -> None:
        """Remember the slot's length (so that this model can be a draft model)."""
        self._marks[slot] = self._caches[slot].get_seq_length()

    def rewind(self, slot: int) -> None:
        """Crop the slot's cache to the mark."""
        self._caches[slot].crop(self._marks[slot] - self._caches[slot].get_seq_length())

    def length(self, slot: int) -> int:
        """Tokens that the slot holds, those of an open window and its padding among them."""
        return int(self._caches[slot].get_seq_length())

    def state(self, slot: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [Hkv, T, D] of what the slot holds, layer by layer."""
        length = self.length(slot)
        for layer in self._caches[slot].layers:
            yield layer.keys[0, :, :length], layer.values[0, :, :length]

    def _window(self, slot: int, tokens: Seq[int]) -> Tensor:
        if slot in self._read:
            raise InputError(f"slot {slot}: expected its last window to be committed before the next")
        start = self._caches[slot].get_seq_length()
        count = len(tokens)
        padding = -count % self._row_step
        # Rows past the window repeat its last token, at its position: no embedding is asked for one it does not have.
        positions = [*range(start, start + count), *[start + count - 1] * padding]
        logits = self._forward(slot, [*tokens, *[tokens[-1]] * padding], positions, window=True)
        self._read[slot] = (count, count + padding)
        return logits[:count].float()

    @torch.inference_mode()
    def _forward(self, slot: int, tokens: Seq[int], positions: Seq[int], window: bool) -> Tensor:
        device = self._model.device
        if self._pass is not None:
            self._pass.begin(self._caches[slot].get_seq_length(), window)
        answer = self._model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=True,
            **{self._cache_name: self._caches[slot]},
            **({} if window else self._last_only),
        )
        logits: Tensor = answer.logits[0]
        return logits

    def _new_cache(self) -> Cache:
        if self._pass is not None:
            return fixed_cache(self._config.num_hidden_layers)
        return DynamicCache()  # without a config: layers with a sliding window, too, keep all tokens and can be cropped

    def _make_exact(self) -> str | None:
        """Switch to an exact copy of the model, or leave everything as it was and say what stands in the way."""
        model = self._model
        try:
            self._model, self._pass = exact_copy(model)
            for self._row_step in ROW_STEPS:
                obstacle = self._probe(model)
                if obstacle is None:
                    return None
        except Exception as error:  # the library has hundreds of models, and each may break a copy in its own way
            obstacle = str(error)
        self._model, self._pass, self._row_step = model, None, 1
        self._caches.clear()
        self._read.clear()
        return obstacle

    def _probe(self, model: PreTrainedModel) -> str | None:
        """Try the copy on random tokens: windows must give the very bits of one token at a time, and the logits must be
        the model's but for rounding (an attention pattern that the copy does not know would show). None if all is well.
        """
        generator = torch.Generator().manual_seed(0)
        count = min(max(PROBE_WINDOWS), self.max_len)
        length = min(PROBE_PROMPT + count, self.max_len)
        tokens = torch.randint(self.vocab_size, (length,), generator=generator).tolist()
        prompt, rest = tokens[:-count], tokens[-count:]

        def read(width: int) -> Tensor:
            for _ in self.prefill(0, prompt):
                pass
            rows = []
            for at in range(0, count, width):
                rows.append(self._window(0, rest[at : at + width]))
                self.commit(0, keep=len(rows[-1]))
            return torch.cat(rows)

        singles = read(1)
        for width in PROBE_WINDOWS:
            if not torch.equal(read(width), singles):
                return f"windows of {width} tokens do not give the bits of single tokens"
        self.release(0)
        with torch.inference_mode():
            own = model(input_ids=torch.tensor([tokens], device=model.device)).logits[0, -count:].float()
        error = ((singles - own).square().mean() / own.square().mean()).sqrt().item()
        tolerance = TOLERANCE[model.dtype == torch.float32]
        return None if error <= tolerance else f"the copy's logits are {error:.2g} off, more than {tolerance}"


def refuse_uncroppable(model: PreTrainedModel) -> None:
    """Raise InputError if the model's state after a token cannot be taken back by cutting its cache."""
    name = type(model).__name__
    is_model = hasattr(model, "get_output_embeddings") and not isinstance(model, type)
    if not is_model or model.get_output_embeddings() is None:
        raise InputError(f"model: expected a transformers model with a language model head, found {shown(model, 60)}")
    if getattr(model, "_is_stateful", False):
        raise InputError(f"{name}: expected a model whose cache can be cropped, found one with recurrent state")
    if model.config.is_encoder_decoder:
        raise InputError(f"{name}: expected a decoder, found an encoder-decoder model")
    for index, layer in enumerate(DynamicCache(config=model.config.get_text_config(decoder=True)).layers):
        if not getattr(layer, "is_croppable", False):
            found = type(layer).__name__
            raise InputError(f"{name}: expected a cache that can be cropped, found {found} in layer {index}")


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The ids that end the model's output: those of its generation config, else of its config."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()
