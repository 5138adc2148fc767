"""The same model in `transformers`, for comparison."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from surefoot.config import ModelConfig
from surefoot.loading.tiny import hf_config_dict


def from_folder(folder: Path, dtype: torch.dtype) -> Any:
    """The checkpoint's decoder, set to run on past end-of-sequence tokens."""
    _quiet()
    return _endless(transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=dtype))


def from_tensors(config: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """The same weights under `transformers`, without the MTP head, which it has no code for."""
    _quiet()
    raw = {k: v for k, v in hf_config_dict(config).items() if k not in ("architectures", "model_type")}
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(
        None, config=transformers.Qwen3_5TextConfig(**raw), state_dict=weights, dtype=dtype
    )
    return _endless(model)


def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # The new name of the argument is not in every version that we support.
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)


def _endless(model: Any) -> Any:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def generate(model: Any, prompt: Seq[int], count: int) -> tuple[list[int], float]:
    """`count` greedy tokens, and the seconds of the whole call."""
    start = time.perf_counter()
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                         max_new_tokens=count, do_sample=False)  # fmt: skip
    seconds = time.perf_counter() - start
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens, seconds


def stepper(model: Any, prompt: Seq[int]) -> Callable[[], None]:
    """Reads the prompt; every call of what is returned is one more greedy token by a bare forward, which leaves out
    what `generate` adds around it."""
    state = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)

    def step() -> None:
        nonlocal state
        token = state.logits[:, -1:].argmax(-1)
        state = model(token, past_key_values=state.past_key_values, use_cache=True)

    return step
