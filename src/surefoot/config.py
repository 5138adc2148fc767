"""What a model is made of: sizes and switches, parsed once and never changed.

The Hugging Face JSON is turned into a `ModelConfig` by `surefoot.loading.config`; nothing else reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerType = Literal["linear_attention", "full_attention"]


@dataclass(frozen=True)
class MoEConfig:
    """A mixture-of-experts feed-forward block: routed experts plus one gated shared expert."""

    num_experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int


@dataclass(frozen=True)
class ModelConfig:
    """A Qwen3.5/3.6 text decoder. One of `ffn_width` (dense) and `moe` is set; the other is None."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[LayerType, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_width: int = 4
    ffn_width: int | None = None
    moe: MoEConfig | None = None
    norm_eps: float = 1e-6
    tied: bool = False
    mtp_layers: int = 0
    max_positions: int = 32768
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Decoder layers, the MTP head not counted."""
        return len(self.layer_types)

    @property
    def value_ratio(self) -> int:
        """DeltaNet value heads per key head; value head h reads key head h // value_ratio."""
        return self.linear_value_heads // self.linear_key_heads

    @property
    def key_width(self) -> int:
        """Channels of all DeltaNet keys (queries have as many)."""
        return self.linear_key_heads * self.linear_key_dim

    @property
    def value_width(self) -> int:
        """Channels of all DeltaNet values."""
        return self.linear_value_heads * self.linear_value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width
