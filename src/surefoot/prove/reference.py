"""The model as a textbook has it: float32, one sequence, every formula written out, nothing shared with the engine.

Weights are read from the files themselves as Hugging Face stores them: in all norms but the DeltaNet's w stands for a
scale of 1 + w. Sources: the published Qwen3.5 configuration and its implementation in `transformers` (RMSNorm, gated
attention with partial RoPE, Gated DeltaNet of Yang et al. 2024, arXiv 2412.06464); docs/how-it-works.md for the MTP
head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.config import ModelConfig

Read = Callable[[str], Tensor]
"""From a canonical name to the tensor, float32 on the CPU."""


class Reference:
    """Logits by the book. `scale_of` turns a stored norm weight into its scale; another one is a wrong convention."""

    def __init__(self, config: ModelConfig, read: Read, scale_of: Callable[[Tensor], Tensor] = lambda w: 1 + w) -> None:
        self.config, self.read, self.scale_of = config, read, scale_of

    def hidden(self, tokens: list[int]) -> Tensor:
        """What the LM head reads after each token, [T, H]."""
        x = self.embed(tokens)
        for index, kind in enumerate(self.config.layer_types):
            x = self.block(x, f"model.layers.{index}.", kind)
        return self.norm(x, "model.norm.weight")

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T, V]."""
        return hidden @ self.read("model.embed_tokens.weight" if self.config.tied else "lm_head.weight").T

    def draft(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """The MTP head's rows [T, H] from the target's hidden states [T, H] and the tokens that follow each."""
        embedded = self.norm(self.embed(tokens), "mtp.pre_fc_norm_embedding.weight")
        joined = torch.cat([embedded, self.norm(hidden, "mtp.pre_fc_norm_hidden.weight")], dim=-1)
        x = self.block(joined @ self.read("mtp.fc.weight").T, "mtp.layers.0.", "full_attention")
        return self.norm(x, "mtp.norm.weight")

    def embed(self, tokens: list[int]) -> Tensor:
        """Rows of the embedding, [T, H]."""
        return self.read("model.embed_tokens.weight")[tokens]

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Root-mean-square norm over the last axis."""
        return x / (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * self.scale_of(self.read(name))

    def block(self, x: Tensor, prefix: str, kind: str) -> Tensor:
        """A decoder layer."""
        mixer = self.attention if kind == "full_attention" else self.delta_net
        x = x + mixer(self.norm(x, prefix + "input_layernorm.weight"), prefix)
        feed = self.swiglu if self.config.moe is None else self.experts
        return x + feed(self.norm(x, prefix + "post_attention_layernorm.weight"), prefix + "mlp.")

    def attention(self, x: Tensor, prefix: str) -> Tensor:
        """Softmax attention, query heads in groups, with a gate on its output."""
        c, count, prefix = self.config, len(x), prefix + "self_attn."
        query, gate = (x @ self.read(prefix + "q_proj.weight").T).view(count, c.num_heads, 2, c.head_dim).unbind(2)
        keys, values = ((x @ self.read(prefix + f"{n}_proj.weight").T).view(count, c.num_kv_heads, -1) for n in "kv")
        query, keys = self.norm(query, prefix + "q_norm.weight"), self.norm(keys, prefix + "k_norm.weight")
        query, keys = self.rope(query), self.rope(keys)
        group = c.num_heads // c.num_kv_heads
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) / c.head_dim**0.5
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values)
        return (mixed * gate.sigmoid()).flatten(1) @ self.read(prefix + "o_proj.weight").T

    def rope(self, x: Tensor) -> Tensor:
        """Turn the first `rotary_dim` dimensions of x [T, heads, D] by the position: dimension j with j + R / 2."""
        half = self.config.rotary_dim // 2
        speeds = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * speeds
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def delta_net(self, x: Tensor, prefix: str) -> Tensor:
        """The gated delta rule, token by token: S fades, gives up what it has at k, and takes v there instead."""
        c, count, prefix = self.config, len(x), prefix + "linear_attn."
        mixed, gate, b, a = (x @ self.read(prefix + f"in_proj_{n}.weight").T for n in ("qkv", "z", "b", "a"))
        taps = self.read(prefix + "conv1d.weight").view(c.conv_channels, c.conv_width)
        past = F.pad(mixed, (0, 0, c.conv_width - 1, 0))
        mixed = F.silu(sum((past[i : i + count] * taps[:, i] for i in range(c.conv_width)), torch.zeros(())))
        query, key, value = mixed.split([c.key_width, c.key_width, c.value_width], dim=-1)
        query, key = (self.unit(part.view(count, c.linear_key_heads, -1)) for part in (query, key))
        query, key = (part.repeat_interleave(c.value_ratio, dim=1) for part in (query / c.linear_key_dim**0.5, key))
        value = value.view(count, c.linear_value_heads, -1)
        fade = (-self.read(prefix + "A_log").exp() * F.softplus(a + self.read(prefix + "dt_bias"))).exp()
        state, out = torch.zeros(c.linear_value_heads, c.linear_key_dim, c.linear_value_dim), []
        for q, k, v, keep, beta in zip(query, key, value, fade, b.sigmoid(), strict=True):
            state = state * keep[:, None, None]
            held = torch.einsum("hk,hkv->hv", k, state)
            state = state + torch.einsum("hk,hv->hkv", k, beta[:, None] * (v - held))
            out.append(torch.einsum("hk,hkv->hv", q, state))
        read = torch.stack(out)  # [T, heads, Dv]
        read = read / (read.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * self.read(prefix + "norm.weight")
        return (read.flatten(1) * F.silu(gate)) @ self.read(prefix + "out_proj.weight").T

    @staticmethod
    def unit(x: Tensor) -> Tensor:
        """x / |x| over the last axis."""
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    def swiglu(self, x: Tensor, prefix: str) -> Tensor:
        """The dense feed-forward block."""
        gate, up, down = (self.read(prefix + f"{n}_proj.weight") for n in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def experts(self, x: Tensor, prefix: str) -> Tensor:
        """The mixture of experts: each token's best few by the router, and a gated one that all share."""
        assert self.config.moe is not None
        out = (x @ self.read(prefix + "shared_expert_gate.weight").view(1, -1).T).sigmoid()
        out = out * self.swiglu(x, prefix + "shared_expert.")
        gate_up, down = (self.read(prefix + f"experts.{n}_proj") for n in ("gate_up", "down"))
        weights, chosen = (x @ self.read(prefix + "gate.weight").T).softmax(-1).topk(self.config.moe.experts_per_token)
        weights = weights / weights.sum(-1, keepdim=True)
        for token, (row, experts) in enumerate(zip(x, chosen.tolist(), strict=True)):
            for weight, expert in zip(weights[token], experts, strict=True):
                gate, up = (gate_up[expert] @ row).chunk(2)
                out[token] += weight * (down[expert] @ (F.silu(gate) * up))
        return out
