"""One layer of the decoder: a mixer and a feed-forward block, each behind its norm and added to the stream."""

from __future__ import annotations

from torch import Tensor

from surefoot.cache import KVCache, RecurrentCache
from surefoot.config import ModelConfig
from surefoot.kernels.linear import LinearFactory
from surefoot.kernels.norm import RMSNorm
from surefoot.model.attention import Attention, Rope
from surefoot.model.deltanet import DeltaNet, PrefillState
from surefoot.model.ffn import build_ffn
from surefoot.model.spans import Layout
from surefoot.model.tensors import Weights, whole


class Block:
    """x + mixer(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, tensors: Weights, prefix: str, kind: str,
                 linear: LinearFactory) -> None:  # fmt: skip
        self.mixer_norm, self.ffn_norm = (
            RMSNorm(1 + whole(tensors, prefix + f"{n}_layernorm.weight").float(), config.norm_eps)
            for n in ("input", "post_attention")
        )
        self.mixer: Attention | DeltaNet
        if kind == "full_attention":
            self.mixer = Attention(config, tensors, prefix + "self_attn.", linear)
        else:
            self.mixer = DeltaNet(config, tensors, prefix + "linear_attn.", linear)
        self.ffn = build_ffn(config, tensors, prefix + "mlp.", linear)

    def decode(self, x: Tensor, rope: Rope, cache: KVCache | RecurrentCache, layout: Layout) -> Tensor:
        """x [rows, H] float32, updated in place and returned."""
        normed = self.mixer_norm(x)
        if isinstance(self.mixer, Attention):
            assert isinstance(cache, KVCache)
            x += self.mixer.decode(normed, rope, cache, layout)
        else:
            assert isinstance(cache, RecurrentCache)
            x += self.mixer.decode(normed, cache, layout)
        x += self.ffn.decode(self.ffn_norm(x))
        return x

    def prefill(self, x: Tensor, rope: Rope, cache: KVCache | PrefillState, slot: int, position: int) -> Tensor:
        """x [T, H] float32, updated in place and returned."""
        normed = self.mixer_norm(x)
        if isinstance(self.mixer, Attention):
            assert isinstance(cache, KVCache)
            x += self.mixer.prefill(normed, rope, cache, slot, position)
        else:
            assert not isinstance(cache, KVCache)
            x += self.mixer.prefill(normed, cache, slot)
        x += self.ffn.prefill(self.ffn_norm(x))
        return x
