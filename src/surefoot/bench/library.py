"""The same model in `transformers`, for comparison."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.config import ModelConfig
from surefoot.errors import InputError
from surefoot.loading.tiny import hf_config_dict


def require_transformers(wanted: str = "against") -> Any:
    """The package, for what is `wanted`. Raises InputError naming the extra that brings it."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"{wanted}: expected transformers to be installed (pip install 'surefoot[transformers]'), "
                         f"found: {error}") from error  # fmt: skip
    return transformers


class Library:
    """A `transformers` model set to run on past end-of-sequence tokens."""

    def __init__(self, model: Any) -> None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        self._model = model.eval()

    @classmethod
    def from_folder(cls, folder: Path, moe: bool, dtype: torch.dtype, device: str = "cpu") -> Library:
        """A checkpoint's decoder."""
        model, _ = _classes(moe)
        return cls(model.from_pretrained(folder, dtype=dtype, device_map=device))

    @classmethod
    def from_tensors(
        cls, config: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: str = "cpu"
    ) -> Library:
        """The given weights, without the MTP head, which it has no code for."""
        model, text_config = _classes(config.moe is not None)
        raw = {k: v for k, v in hf_config_dict(config).items() if k not in ("architectures", "model_type")}
        weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        return cls(
            model.from_pretrained(None, config=text_config(**raw), state_dict=weights, dtype=dtype, device_map=device)
        )

    def generate(self, prompts: Seq[Seq[int]], count: int) -> tuple[list[list[int]], float]:
        """`count` greedy tokens of each prompt (all equally long), and the seconds of the whole call."""
        ids = torch.tensor(prompts, device=self._model.device)
        start = time.perf_counter()
        out = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()  # waits for the device
        return tokens, time.perf_counter() - start

    def stepper(self, prompt: Seq[int]) -> Callable[[], None]:
        """Reads the prompt; every call of what is returned is one more greedy token by a bare forward, which leaves out
        what `generate` adds around it."""
        state = self._model(torch.tensor([prompt], device=self._model.device), use_cache=True, logits_to_keep=1)

        def step() -> None:
            nonlocal state
            token = state.logits[:, -1:].argmax(-1)
            state = self._model(token, past_key_values=state.past_key_values, use_cache=True)

        return step


def _classes(moe: bool) -> tuple[Any, Any]:
    """Model and config, silenced."""
    transformers = require_transformers()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # The new name of the argument is not in every version that we support.
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
    if moe:
        return transformers.Qwen3_5MoeForCausalLM, transformers.Qwen3_5MoeTextConfig
    return transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig
