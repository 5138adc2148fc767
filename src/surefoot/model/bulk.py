"""Prefill on a GPU: the blocks of the plain model, read with library products and the kernels of `kernels.fused`.

Activations between the products have the weights' type; the residual stream is float32.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.cache import KVCache
from surefoot.kernels.attention import attend_chunk
from surefoot.kernels.fused.bulk import add_norm, conv_heads, gated_norm, place_heads, swiglu
from surefoot.kernels.fused.chunk import ChunkWorkspace, DeltaGates, delta_chunk
from surefoot.kernels.fused.grouped import mix_experts
from surefoot.kernels.linear import Linear, weights_of
from surefoot.kernels.norm import RMSNorm
from surefoot.kernels.quantise import dense_of
from surefoot.kernels.rope import RopeTable
from surefoot.model.attention import Attention
from surefoot.model.block import Block
from surefoot.model.deltanet import DeltaNet, PrefillState
from surefoot.model.ffn import FeedForward, SwiGLU


def read_blocks(
    blocks: Seq[Block], layers: Seq[KVCache | PrefillState], x: Tensor, rope: RopeTable, slot: int, position: int
) -> None:
    """x [T, H] float32 in place, T tokens of one sequence behind `position` others: what `Block.prefill` does."""
    added: Tensor | None = None
    for block, layer in zip(blocks, layers, strict=True):
        normed = _add_norm(x, added, block.mixer_norm, weights_of(block.mixer.in_proj)[0].dtype)
        if isinstance(block.mixer, Attention):
            assert isinstance(layer, KVCache)
            added = _attend(block.mixer, normed, layer, rope, slot, position)
        else:
            assert not isinstance(layer, KVCache)
            added = _delta(block.mixer, normed, layer, slot)
        added = _feed_forward(block.ffn, _add_norm(x, added, block.ffn_norm, normed.dtype))
    if added is not None:
        x += added


def _product(layer: Linear, x: Tensor) -> Tensor:
    parts = [F.linear(x, dense_of(weight)) for weight in weights_of(layer)]
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def _add_norm(x: Tensor, added: Tensor | None, norm: RMSNorm, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(x, dtype=dtype)
    add_norm(x, added, norm.scale, out, eps=norm.eps)
    return out


def _attend(layer: Attention, x: Tensor, cache: KVCache, rope: RopeTable, slot: int, position: int) -> Tensor:
    c, tokens = layer.config, x.shape[0]
    merged = _product(layer.in_proj, x)
    query = merged.new_empty(tokens, c.num_heads, c.head_dim)
    place_heads(merged, layer.q_scale, layer.k_scale, rope.cos.squeeze(1), rope.sin.squeeze(1),
                cache.keys[slot], cache.values[slot], query, position=position, eps=c.norm_eps)  # fmt: skip
    mixed = attend_chunk(query, *cache.read(slot, position + tokens)).flatten(1)
    gate = merged[:, -mixed.shape[1] :]
    return _product(layer.out_proj, torch.sigmoid(gate).mul_(mixed))


def _delta(layer: DeltaNet, x: Tensor, cache: PrefillState, slot: int) -> Tensor:
    c, tokens, heads = layer.config, x.shape[0], layer.config.linear_value_heads
    merged = _product(layer.in_proj, x)
    inputs, gate, logits = merged.split([c.conv_channels, c.value_width, 2 * layer.lanes], dim=1)
    past, state = cache.conv_past(slot), cache.read_state(slot)
    mixed = merged.new_empty(tokens, c.conv_channels)
    conv_heads(merged, past, layer.taps.squeeze(1), mixed, key_heads=c.linear_key_heads, dim=c.linear_key_dim)
    out, new_state = merged.new_empty(tokens, heads, c.linear_value_dim), torch.empty_like(state)
    work = ChunkWorkspace.allocate(tokens, heads, (c.linear_key_dim, c.linear_value_dim), merged)
    delta_chunk(mixed, DeltaGates(logits, layer.rate[:heads], layer.dt_bias[:heads]), state, work, out, new_state)
    cache.write_state(slot, new_state)
    cache.set_past(slot, torch.cat([past, inputs[1 - c.conv_width :].float()])[1 - c.conv_width :])
    gated_norm(out, gate, layer.norm.scale, out, eps=layer.norm.eps)
    return _product(layer.out_proj, out.flatten(1))


def _feed_forward(layer: FeedForward, x: Tensor) -> Tensor:
    if not isinstance(layer, SwiGLU):
        assert layer.packed is not None
        out = torch.empty_like(x)
        mix_experts(x, layer.packed.gate_up, layer.packed.down, *layer.choose(x), out)
        return out
    gate_up = _product(layer.gate_up, x)
    act = gate_up.new_empty(x.shape[0], gate_up.shape[1] // 2)
    swiglu(gate_up, act)
    return _product(layer.down, act)
