"""Gated grouped-query attention with q/k norms and partial RoPE."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surefoot.cache import KVCache
from surefoot.config import ModelConfig
from surefoot.kernels.attention import attend_chunk, attend_each
from surefoot.kernels.linear import Linear, LinearFactory
from surefoot.kernels.norm import RMSNorm
from surefoot.kernels.quantise import on_rows
from surefoot.kernels.rope import apply_rope_
from surefoot.kernels.rows import by_row
from surefoot.model.spans import Layout
from surefoot.model.tensors import Weights, whole

Rope = tuple[Tensor, Tensor]  # cosines and sines of a pass's rows


class Attention:
    """One full-attention mixer; its weights are `prefix + {q,k,v,o}_proj, {q,k}_norm`."""

    def __init__(self, config: ModelConfig, tensors: Weights, prefix: str, linear: LinearFactory) -> None:
        self.config = c = config
        # Each head's rows of q_proj are its query, then its gate; here all queries stand first and all gates last.
        query, gate = (on_rows(partial(self._half, which), tensors[prefix + "q_proj.weight"]) for which in (0, 1))
        self.in_proj: Linear = linear.beside(
            query, tensors[prefix + "k_proj.weight"], tensors[prefix + "v_proj.weight"], gate
        )
        self.out_proj: Linear = linear(tensors[prefix + "o_proj.weight"])
        self.q_scale, self.k_scale = (1 + whole(tensors, prefix + f"{n}_norm.weight").float() for n in "qk")
        scale = torch.cat([self.q_scale.expand(c.num_heads, -1), self.k_scale.expand(c.num_kv_heads, -1)])
        self._norm = RMSNorm(scale, c.norm_eps)

    def decode(self, x: Tensor, rope: Rope, cache: KVCache, layout: Layout) -> Tensor:
        """x [rows, H] float32, normalised -> [rows, H]. Writes the rows' keys and values at their positions."""
        query, keys, values, gate = self._project(self.in_proj(x), rope)
        mixed = []
        for span in layout.spans:
            cache.write(span.slot, span.position, keys[span.rows], values[span.rows])
            lengths = range(span.position + 1, span.position + 1 + span.count)
            mixed += attend_each(query[span.rows], *cache.read(span.slot, lengths[-1]), lengths)
        joined = layout.join(mixed).float().view(x.shape[0], -1)
        return self.out_proj(by_row(torch.sigmoid, gate).mul_(joined))

    def prefill(self, x: Tensor, rope: Rope, cache: KVCache, slot: int, position: int) -> Tensor:
        """x [T, H]: consecutive tokens of one sequence, after `position` cached ones."""
        query, keys, values, gate = self._project(self.in_proj.bulk(x), rope)
        cache.write(slot, position, keys, values)
        mixed = attend_chunk(query, *cache.read(slot, position + x.shape[0])).float()
        return self.out_proj.bulk(torch.sigmoid(gate).mul_(mixed.flatten(1)))

    def _half(self, which: int, q_proj: Tensor) -> Tensor:
        """The rows of q_proj that give every head's query (0) or gate (1)."""
        heads = q_proj.view(self.config.num_heads, 2, self.config.head_dim, -1)
        return heads[:, which].flatten(0, 1).contiguous()

    def _project(self, merged: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The merged projection -> query [n, Hq, D], keys and values [n, Hkv, D], gate [n, Hq * D]."""
        c = self.config
        rows, turned = merged.shape[0], c.num_heads + c.num_kv_heads
        heads = merged[:, : (turned + c.num_kv_heads) * c.head_dim].view(rows, -1, c.head_dim)
        query_keys = apply_rope_(self._norm(heads[:, :turned]), *rope)
        gate = merged[:, (turned + c.num_kv_heads) * c.head_dim :]
        return query_keys[:, : c.num_heads], query_keys[:, c.num_heads :], heads[:, turned:], gate
