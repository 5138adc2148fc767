"""The published shapes, for measurements with random weights: speed does not depend on their values."""

from __future__ import annotations

from surefoot.config import LayerType, ModelConfig, MoEConfig

_KINDS: tuple[LayerType, ...] = ("linear_attention", "linear_attention", "linear_attention", "full_attention")


def _qwen(hidden: int, layers: int, heads: tuple[int, int], value_heads: int, *, tied: bool, ffn: int | None = None,
          moe: MoEConfig | None = None) -> ModelConfig:  # fmt: skip
    return ModelConfig(
        vocab_size=248320, hidden_size=hidden, layer_types=_KINDS * (layers // 4), num_heads=heads[0],
        num_kv_heads=heads[1], head_dim=256, rotary_dim=64, rope_theta=1e7, linear_key_heads=16,
        linear_value_heads=value_heads, linear_key_dim=128, linear_value_dim=128, ffn_width=ffn, moe=moe, tied=tied,
        mtp_layers=1, max_positions=262144,
    )  # fmt: skip


SHAPES = {
    "qwen3.5-0.8b": _qwen(1024, 24, (8, 2), 16, tied=True, ffn=3584),
    "qwen3.5-2b": _qwen(2048, 24, (8, 2), 16, tied=True, ffn=6144),
    "qwen3.5-4b": _qwen(2560, 32, (16, 4), 32, tied=True, ffn=9216),
    "qwen3.5-9b": _qwen(4096, 32, (16, 4), 32, tied=False, ffn=12288),
    "qwen3.5-27b": _qwen(5120, 64, (24, 4), 48, tied=False, ffn=17408),
    "qwen3.5-35b-a3b": _qwen(2048, 40, (16, 2), 32, tied=False, moe=MoEConfig(256, 8, 512, 512)),
}
"""By the names of the published models; sizes as in their configs (vocabulary padded, one MTP layer)."""
