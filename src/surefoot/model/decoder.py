"""The decoder: embedding, blocks, final norm, head. Layers read and write the caches they are handed.

Two ways through it. `decode` is the exact one: a few tokens of each of several sequences, every row computed as if it
were alone; plain decoding and verification are both this. `prefill` reads many tokens of one sequence with whatever is
fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.cache import HybridCache, KVCache, RecurrentCache
from surefoot.cache.memory import allocate, room_for
from surefoot.config import ModelConfig
from surefoot.kernels.linear import LinearFactory
from surefoot.kernels.norm import RMSNorm
from surefoot.kernels.rope import RopeTable
from surefoot.model.block import Block
from surefoot.model.deltanet import PrefillState
from surefoot.model.spans import Layout
from surefoot.model.tensors import Weights, let_go, whole


class PrefillLayers(Protocol):
    """What `Decoder.prefill` needs of the caches; see `cache.hybrid.HybridCache`."""

    @property
    def layers(self) -> Seq[KVCache | PrefillState]:
        """One per block."""

    @property
    def length(self) -> Seq[int]:
        """Tokens read so far, per slot."""

    def extend(self, slot: int, tokens: int) -> None:
        """Tokens were read for good."""


class Decoder:
    """A Qwen3.5/3.6 text decoder from tensors of the canonical names (`model.tensors`), all of one dtype and device.

    `tensors` is emptied as layers are built, so that weights laid out anew do not stand in memory twice.
    """

    def __init__(
        self, config: ModelConfig, tensors: Weights, max_len: int, linear: LinearFactory | None = None
    ) -> None:
        self.config = config
        self.max_len = max_len
        self.linear = linear or LinearFactory()
        self.embedding = whole(tensors, "model.embed_tokens.weight")
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        with room_for(f"max_len: rotary angles of {max_len} positions", 8 * max_len * config.rotary_dim, self.device):
            self.rope = RopeTable(config.rotary_dim, config.rope_theta, max_len, self.device)
        self.blocks = []
        for index, kind in enumerate(config.layer_types):
            prefix = f"model.layers.{index}."
            self.blocks.append(Block(config, tensors, prefix, kind, self.linear))
            let_go(tensors, prefix)
        self.norm = RMSNorm(1 + whole(tensors, "model.norm.weight").float(), config.norm_eps)
        self.head = self.linear(self.embedding if config.tied else tensors.pop("lm_head.weight"))

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [n] -> [n, H] float32."""
        return F.embedding(tokens, self.embedding).float()

    def embed_padded(self, tokens: Seq[int], rows: int) -> Tensor:
        """Token ids -> [rows, H] float32; padding rows repeat token 0."""
        return self.embed(torch.tensor([*tokens, *[0] * (rows - len(tokens))], device=self.device))

    def logits(self, hidden: Tensor) -> Tensor:
        """Post-norm hidden [n, H], n >= 2 -> [n, V] float32; rows do not depend on n."""
        return self.head(hidden)

    def bulk_logits(self, hidden: Tensor) -> Tensor:
        """The same for many rows, without the promise."""
        return self.head.bulk(hidden)

    def decode(self, tokens: Seq[int], cache: HybridCache, layout: Layout) -> Tensor:
        """Read the spans' tokens (one list, span after span) into their open windows; post-norm hidden [rows, H]."""
        x = self.embed_padded(tokens, layout.rows)
        rope = self.rope.at(layout.positions(self.device))
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block.decode(x, rope, layer, layout)
        return self.norm(x)

    def prefill(self, tokens: Seq[int], cache: PrefillLayers, slot: int) -> Tensor:
        """Read a chunk of T tokens after what the slot holds, for good; post-norm hidden [T, H]."""
        position = cache.length[slot]
        x = self.embed(torch.tensor(tokens, device=self.device))
        self.read(self.blocks, cache.layers, x, slot, position)
        cache.extend(slot, len(tokens))
        return self.norm(x)

    def read(
        self, blocks: Seq[Block], layers: Seq[KVCache | PrefillState], x: Tensor, slot: int, position: int
    ) -> None:
        """Run the blocks over x [T, H] float32, in place: T tokens of one sequence behind `position` others."""
        if x.is_cuda:
            from surefoot.model.bulk import read_blocks  # needs Triton, which a CPU does without

            read_blocks(blocks, layers, x, self.rope, slot, position)
            return
        rope = self.rope.at(torch.arange(position, position + x.shape[0], device=self.device))
        for block, layer in zip(blocks, layers, strict=True):
            block.prefill(x, rope, layer, slot, position)


def build_cache(config: ModelConfig, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> HybridCache:
    """Empty caches for `slots` sequences of at most `max_len` tokens. Raises InputError if memory has no room."""
    return allocate(cache_builder(config, max_len, dtype, device), slots, device)


def cache_builder(
    config: ModelConfig, max_len: int, dtype: torch.dtype, device: torch.device
) -> Callable[[int, torch.device], HybridCache]:
    """Builds the caches of a model on `device`, for so many slots, there or without memory on "meta"."""
    state = (config.linear_key_heads, config.linear_key_dim, config.value_ratio * config.linear_value_dim)
    kv_dtype = _kv_dtype(dtype, device)

    def build(slots: int, device: torch.device) -> HybridCache:
        return HybridCache(
            [
                KVCache(slots, config.num_kv_heads, max_len, config.head_dim, kv_dtype, device)
                if kind == "full_attention"
                else RecurrentCache(slots, state, config.conv_channels, config.conv_width, device)
                for kind in config.layer_types
            ],
            slots,
        )

    return build


def build_kv(config: ModelConfig, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """One attention layer's lane. Raises InputError if memory has no room."""
    kv_dtype = _kv_dtype(dtype, device)
    return allocate(
        lambda slots, device: KVCache(slots, config.num_kv_heads, max_len, config.head_dim, kv_dtype, device),
        slots,
        device,
    )


def _kv_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """On the CPU float32 whatever the weights are: attention over a 16-bit cache converts every element at every step
    there, which costs several times the reading."""
    return torch.float32 if device.type == "cpu" else dtype
