"""Softmax attention against cached keys and values.

A verify window is attended one query at a time, each over exactly its own prefix: the very call that plain decoding
makes at that position, so the bits are the same and no query can see a later draft token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


def attend_each(query: Tensor, keys: Tensor, values: Tensor, lengths: range) -> list[Tensor]:
    """Queries [n, H, D], the i-th over the first `lengths[i]` of keys, values [Hkv, L, D] -> n times [1, H, 1, D] of
    the cache's type; query head j reads head j // (H / Hkv)."""
    each, keys, values = query.to(keys.dtype)[:, None, :, None].unbind(), keys[None], values[None]
    return [
        F.scaled_dot_product_attention(one, keys.narrow(2, 0, length), values.narrow(2, 0, length), enable_gqa=True)
        for one, length in zip(each, lengths, strict=True)
    ]


def attend_chunk(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """A prefill chunk [T, H, D] whose last token is the last of keys, values [Hkv, L, D] -> [T, H, D] of the cache's
    type; causal."""
    count, length = query.shape[0], keys.shape[1]
    mask: Tensor
    if keys.is_cuda and keys.element_size() == 2:
        mask = causal_lower_right(count, length)  # FlashAttention takes the rule; a mask in memory it would not
    else:
        mask = torch.ones(count, length, dtype=torch.bool, device=query.device).tril_(length - count)
    out = F.scaled_dot_product_attention(
        query.to(keys.dtype).transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)
