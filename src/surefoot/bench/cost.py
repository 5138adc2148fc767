"""What a decode step must read and write: at batch 1 nothing else bounds its speed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from surefoot.bench.turns import Action
from surefoot.cache.memory import room_for
from surefoot.config import ModelConfig
from surefoot.model.tensors import Shapes, mtp_shapes, target_shapes

STATE_BYTES = 4  # recurrent states are float32
READ_BYTES = {"cpu": 2**30, "cuda": 2**33}  # far more than any cache


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one step: `weights` read without the embedding table (a tied one is the LM head, and read), `state`
    recurrent state read and written, `kv` keys and values read; `draft`: one step of the MTP head, 0 without one."""

    weights: int
    state: int
    kv: int
    draft: int

    @property
    def total(self) -> int:
        """Of a step of the target."""
        return self.weights + self.state + self.kv

    @property
    def draft_share(self) -> float:
        """A draft step's bytes / a step's."""
        return self.draft / self.total


@dataclass(frozen=True)
class Ceiling:
    """What the device's read bandwidth (bytes/s) allows for a step of so many bytes that gives `tokens` tokens."""

    bandwidth: float
    step_ms: float
    tokens_per_second: float

    @classmethod
    def of(cls, step: StepBytes, bandwidth: float, tokens: int) -> Ceiling:
        """Plain decoding of `tokens` sequences."""
        seconds = step.total / bandwidth
        return cls(bandwidth, 1000 * seconds, tokens / seconds)


def step_bytes(
    config: ModelConfig,
    context: int,
    batch: int,
    dtype: torch.dtype,
    *,
    head_dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    window: int = 1,
    draft_vocab: int | None = None,
) -> StepBytes:
    """Bytes of a step over `batch` sequences of `context` tokens each, `window` tokens read of each.

    Rows of a mixture of experts are taken to choose their experts independently and evenly. `head_dtype` and
    `kv_dtype`: of the LM head and of the caches, if they are not the weights'; `draft_vocab`: tokens whose rows of the
    LM head a draft step reads, if not all.
    """
    c = config
    rows = batch * window
    kv = 2 * c.num_kv_heads * c.head_dim * context * batch * (kv_dtype or dtype).itemsize  # of one layer
    attention = c.layer_types.count("full_attention")
    state = (c.num_layers - attention) * c.linear_value_heads * c.linear_key_dim * c.linear_value_dim
    head = "model.embed_tokens.weight" if c.tied else "lm_head.weight"
    target, mtp = target_shapes(c), mtp_shapes(c)
    head_bytes = c.vocab_size * c.hidden_size * (head_dtype or dtype).itemsize
    drafted = head_bytes * (draft_vocab or c.vocab_size) // c.vocab_size
    draft = elements(mtp, c, batch) * dtype.itemsize + drafted + kv if mtp else 0
    body = {name: shape for name, shape in target.items() if name not in (head, "model.embed_tokens.weight")}
    weights = elements(body, c, rows) * dtype.itemsize + head_bytes
    return StepBytes(weights, 2 * state * STATE_BYTES * batch, attention * kv, draft)


def elements(shapes: Shapes, config: ModelConfig, rows: int) -> int:
    """Elements of the tensors that rows read: of the routed experts the expected number that any row chooses."""
    total = 0.0
    for name, shape in shapes.items():
        share = 1.0
        if config.moe is not None and ".experts." in name:
            share = 1 - (1 - config.moe.experts_per_token / config.moe.num_experts) ** rows
        total += share * math.prod(shape)
    return round(total)


def reader(device: torch.device) -> tuple[Action, int]:
    """An action that reads a large tensor once, and its bytes. Raises InputError if memory has no room for it."""
    size = READ_BYTES[device.type]
    with room_for("read bandwidth: a tensor to read", size, device):
        read: Callable[[], object] = torch.ones(size // 4, device=device).sum
    return read, size
