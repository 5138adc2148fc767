"""The training model: Qwen3.5's dense text architecture and its MTP head in plain PyTorch.

Parameter names are the checkpoint's own, so ``export.py`` writes the state dict as it is. Weights
are fp32 masters; matrix products run in ``config.compute_dtype``; norms, the decay of the
recurrence and its state are fp32. There is no cache: sequences are read whole. One long file on
purpose: a training model is read from top to bottom, and nothing else uses its parts.

Symbols in shapes: B rows, T positions, H hidden size, V vocabulary, Hq/Hkv attention heads, D head
size, Hk/Hv key/value heads of the DeltaNet layers, dk/dv their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the defaults are those of the bundled checkpoint."""

    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 20
    full_attention_interval: int = 4
    intermediate_size: int = 704
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.5
    rope_theta: float = 1e6
    mrope_section: tuple[int, ...] = (6, 5, 5)
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 8
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192
    eos_token_id: int = 0
    compute_dtype: str = field(default="float32")

    @property
    def layer_types(self) -> list[str]:
        """Kind of each layer: every n-th one is full attention."""
        return [
            "full_attention" if (i + 1) % self.full_attention_interval == 0 else "linear_attention"
            for i in range(self.num_hidden_layers)
        ]

    @property
    def rotary_dim(self) -> int:
        """How many of the head's dimensions are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the matrix products."""
        found = getattr(torch, self.compute_dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"compute_dtype: expected the name of a torch dtype, found {self.compute_dtype!r}")
        return found

    def to_hf(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        values = asdict(self)
        for name in ("compute_dtype", "partial_rotary_factor", "rope_theta", "mrope_section"):
            values.pop(name)
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **values,
            "layer_types": self.layer_types,
            "attn_output_gate": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
                "mrope_section": list(self.mrope_section),
                "mrope_interleaved": True,
            },
            "partial_rotary_factor": self.partial_rotary_factor,
            "mamba_ssm_dtype": "float32",
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    """Zero-centred root-mean-square norm: x / rms(x) * (1 + w), in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] of any float type -> the same shape in fp32."""
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


class GatedNorm(nn.Module):
    """Per-head norm of the DeltaNet output with a plain weight, times silu(z)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z [B, T, Hv, dv] -> fp32 of that shape."""
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return x * F.silu(z.float())


class Projection(nn.Linear):
    """A bias-free linear map that computes in the given type and keeps an fp32 master weight."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.compute = dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs] in the compute type."""
        return F.linear(x.to(self.compute), self.weight.to(self.compute))


class ShortConv(nn.Module):
    """Weight of the causal depthwise convolution, [C, 1, taps]; tap 3 is the newest position."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps).uniform_(-1, 1) / math.sqrt(taps))

    def forward(self, u: Tensor) -> Tensor:
        """u [B, T, C] -> silu of the causal convolution, fp32. Written as shifted sums, which fuse."""
        taps = self.weight.shape[-1]
        padded = F.pad(u, (0, 0, taps - 1, 0))
        length = u.shape[1]
        total = padded[:, :length].float() * self.weight[:, 0, 0]
        for tap in range(1, taps):
            total = total + padded[:, tap : tap + length].float() * self.weight[:, 0, tap]
        return F.silu(total)


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule over whole sequences in chunks of 64, fp32, differentiable.

    q, k [B, T, Hk, dk] (normalised, q not scaled); v [B, T, Hv, dv]; g, beta [B, T, Hv] with g <= 0
    the log of the decay. Returns [B, T, Hv, dv] in v's type.
    """
    chunk = 64
    rows, length, key_heads, dk = q.shape
    heads, dv = v.shape[2], v.shape[3]
    padding = (-length) % chunk
    share = heads // key_heads

    def split(x: Tensor) -> Tensor:
        """[B, T, h, d] -> [B, h, chunks, 64, d], zero-padded at the end."""
        x = F.pad(x.float(), (0, 0, 0, 0, 0, padding))
        return x.view(rows, -1, chunk, x.shape[2], x.shape[3]).permute(0, 3, 1, 2, 4)

    queries = split(q).repeat_interleave(share, 1) * dk**-0.5
    keys = split(k).repeat_interleave(share, 1)
    values = split(v)
    decay = split(g.unsqueeze(-1)).squeeze(-1).cumsum(-1)
    weights = split(beta.unsqueeze(-1))
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    # Mask before exp: above the diagonal the difference is positive and could overflow.
    ratio = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    system = ((keys * weights) @ keys.transpose(-1, -2) * ratio).tril(-1)
    right = torch.cat([values * weights, keys * weights * decay.exp().unsqueeze(-1)], -1)
    identity = torch.eye(chunk, device=q.device)
    solved = torch.linalg.solve_triangular(identity + system, right, upper=False, unitriangular=True)
    new_values, old_keys = solved.split([dv, dk], -1)
    inner = queries @ keys.transpose(-1, -2) * ratio
    state = torch.zeros(rows, heads, dk, dv, device=q.device)
    outputs = []
    for i in range(queries.shape[2]):
        step = new_values[:, :, i] - old_keys[:, :, i] @ state
        outputs.append((queries[:, :, i] * decay[:, :, i].exp().unsqueeze(-1)) @ state + inner[:, :, i] @ step)
        last = decay[:, :, i, -1:]
        faded = keys[:, :, i] * (last - decay[:, :, i]).exp().unsqueeze(-1)
        state = state * last.exp().unsqueeze(-1) + faded.transpose(-1, -2) @ step
    merged = torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).reshape(rows, -1, heads, dv)
    return merged[:, :length].to(v.dtype)


class GatedDeltaNet(nn.Module):
    """Linear-attention mixer, split around the delta rule so that both halves can be compiled."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.key_heads, self.heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.dk, self.dv = config.linear_key_head_dim, config.linear_value_head_dim
        self.sizes = [self.key_heads * self.dk, self.key_heads * self.dk, self.heads * self.dv]
        hidden, dtype = config.hidden_size, config.dtype
        self.in_proj_qkv = Projection(hidden, sum(self.sizes), dtype)
        self.in_proj_z = Projection(hidden, self.heads * self.dv, dtype)
        self.in_proj_b = Projection(hidden, self.heads, dtype)
        self.in_proj_a = Projection(hidden, self.heads, dtype)
        self.conv1d = ShortConv(sum(self.sizes), config.linear_conv_kernel_dim)
        # Time constants from one to a thousand positions, as is usual for such recurrences.
        step = torch.exp(torch.rand(self.heads) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.norm = GatedNorm(self.dv, config.rms_norm_eps)
        self.out_proj = Projection(self.heads * self.dv, hidden, dtype)
        self.compute = dtype

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, H] (normed) -> q, k [B, T, Hk, dk], v [B, T, Hv, dv], g, beta [B, T, Hv], z as v."""
        x = x.to(self.compute)
        rows, length = x.shape[:2]
        mixed = self.conv1d(self.in_proj_qkv(x))
        q, k, v = mixed.split(self.sizes, -1)
        q = l2_normalise(q.reshape(rows, length, self.key_heads, self.dk)).to(self.compute)
        k = l2_normalise(k.reshape(rows, length, self.key_heads, self.dk)).to(self.compute)
        v = v.reshape(rows, length, self.heads, self.dv).to(self.compute)
        z = self.in_proj_z(x).view(rows, length, self.heads, self.dv)
        beta = torch.sigmoid(self.in_proj_b(x).float())
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return q, k, v, g, beta, z

    def finish(self, o: Tensor, z: Tensor) -> Tensor:
        """o, z [B, T, Hv, dv] -> [B, T, H]."""
        result: Tensor = self.out_proj(self.norm(o, z).flatten(2))
        return result


def rotary_tables(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of text positions [T] -> two [T, R] tables (three equal axes make M-RoPE plain)."""
    half = torch.arange(0, config.rotary_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float().unsqueeze(-1) * config.rope_theta ** (-half / config.rotary_dim)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dimensions of x [B, h, T, D]; the rest passes through. fp32."""
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    swapped = torch.cat([-turned[..., size // 2 :], turned[..., : size // 2]], -1)
    return torch.cat([turned * cos + swapped * sin, rest], -1)


class GatedAttention(nn.Module):
    """Grouped-query attention with normed, partly rotated queries and keys and a sigmoid output gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, dtype = config.hidden_size, config.dtype
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = Projection(hidden, self.heads * self.dim * 2, dtype)
        self.k_proj = Projection(hidden, self.kv_heads * self.dim, dtype)
        self.v_proj = Projection(hidden, self.kv_heads * self.dim, dtype)
        self.o_proj = Projection(self.heads * self.dim, hidden, dtype)
        self.q_norm = RMSNorm(self.dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.dim, config.rms_norm_eps)
        self.compute = dtype

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, H] (normed) -> q, k, v [B, Hq, T, D] (k and v repeated per group), gate [B, T, Hq*D]."""
        x = x.to(self.compute)
        rows, length = x.shape[:2]
        both = self.q_proj(x).view(rows, length, self.heads, 2, self.dim)
        gate = both[:, :, :, 1].reshape(rows, length, -1)
        share = self.heads // self.kv_heads
        q = rotate(self.q_norm(both[:, :, :, 0]).transpose(1, 2), cos, sin).to(self.compute)
        k = self.k_norm(self.k_proj(x).view(rows, length, self.kv_heads, self.dim)).transpose(1, 2)
        k = rotate(k, cos, sin).to(self.compute).repeat_interleave(share, 1)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.dim).transpose(1, 2).repeat_interleave(share, 1)
        return q, k, v, gate

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        """o [B, Hq, T, D], gate [B, T, Hq*D] -> [B, T, H]."""
        result: Tensor = self.o_proj(o.transpose(1, 2).flatten(2) * torch.sigmoid(gate))
        return result


class FeedForward(nn.Module):
    """(silu(x Wg) * (x Wu)) Wd."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size, config.dtype)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size, config.dtype)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size, config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class LinearLayer(nn.Module):
    """A decoder layer whose mixer is the gated delta rule. The residual stream is fp32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.linear_attn = GatedDeltaNet(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)


class AttentionLayer(nn.Module):
    """A decoder layer with full attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GatedAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)


# The pieces below are plain functions of a layer so that one compiled version serves all layers of
# a kind, while the delta rule itself (hand-written kernels) stays outside the compiled graphs.


def linear_before(layer: LinearLayer, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """h [B, T, H] -> the inputs of the delta rule and z."""
    return layer.linear_attn.project(layer.input_layernorm(h))


def linear_after(layer: LinearLayer, h: Tensor, o: Tensor, z: Tensor) -> Tensor:
    """Residual, output of the delta rule and z -> the layer's output [B, T, H]."""
    h = h + layer.linear_attn.finish(o, z)
    result: Tensor = h + layer.mlp(layer.post_attention_layernorm(h))
    return result


def attention_layer(layer: AttentionLayer, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal attention over the row and the feed-forward part, [B, T, H] -> [B, T, H]."""
    q, k, v, gate = layer.self_attn.project(layer.input_layernorm(h), cos, sin)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    h = h + layer.self_attn.finish(o, gate)
    result: Tensor = h + layer.mlp(layer.post_attention_layernorm(h))
    return result


def head_loss(weight: Tensor, hidden: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean cross entropy of the tied head: weight [V, H], hidden [B, T, H], targets [B, T]."""
    logits = F.linear(hidden.to(dtype), weight.to(dtype))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def distil_loss(
    weight: Tensor, hidden: Tensor, teacher: Tensor, dtype: torch.dtype, hard: float
) -> tuple[Tensor, Tensor]:
    """Cross entropy against a teacher's distribution and its argmax, and the share of equal argmaxes.

    weight [V, H], hidden [B, T, H], teacher [B, T, V] logits (no gradient flows into them).
    """
    logits = F.linear(hidden.to(dtype), weight.to(dtype)).flatten(0, 1).float()
    wanted = teacher.flatten(0, 1).float()
    log_p = F.log_softmax(logits, -1)
    soft = -(wanted.softmax(-1) * log_p).sum(-1).mean()
    best = wanted.argmax(-1)
    loss = soft + hard * F.nll_loss(log_p, best)
    return loss, (logits.argmax(-1) == best).float().mean()


@dataclass
class Parts:
    """The functions that a run may replace: compiled versions, another delta rule."""

    delta_rule: DeltaRule = delta_rule_reference
    linear_before: Callable[..., Any] = linear_before
    linear_after: Callable[..., Any] = linear_after
    attention_layer: Callable[..., Any] = attention_layer
    head_loss: Callable[..., Any] = head_loss
    distil_loss: Callable[..., Any] = distil_loss
    mtp_step: Callable[..., Any] | None = None

    def compiled(self) -> Parts:
        """The same parts, compiled region by region."""
        torch._dynamo.config.recompile_limit = 64
        names = ("linear_before", "linear_after", "attention_layer", "head_loss", "distil_loss")
        changed: dict[str, Any] = {name: torch.compile(getattr(self, name), dynamic=False) for name in names}
        return Parts(self.delta_rule, **changed, mtp_step=torch.compile(mtp_step, dynamic=False))


def mtp_step(
    head: MtpHead,
    e: Tensor,
    hidden: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor | None,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One draft step for every row at once.

    e [B, T, H] embeddings of the tokens fed; hidden [B, T, H] (post-norm, of the target or of the
    step before); keys, values: what earlier steps left, each [B, Hq, T, D]; mask [T, steps*T] for
    later steps (see :meth:`MtpHead.forward`). Returns the post-norm hidden and this step's K and V.
    """
    layer = head.layer
    joined = torch.cat([head.pre_fc_norm_embedding(e), head.pre_fc_norm_hidden(hidden)], -1)
    m = head.fc(joined).float()
    q, k, v, gate = layer.self_attn.project(layer.input_layernorm(m), cos, sin)
    if keys:
        o = F.scaled_dot_product_attention(q, torch.cat([*keys, k], 2), torch.cat([*values, v], 2), attn_mask=mask)
    else:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    m = m + layer.self_attn.finish(o, gate)
    m = m + layer.mlp(layer.post_attention_layernorm(m))
    return head.norm(m), k, v


class MtpHead(nn.Module):
    """The multi-token prediction head: one full-attention layer that drafts beyond the next token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Projection(2 * config.hidden_size, config.hidden_size, config.dtype)
        self.pre_fc_norm_embedding = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([AttentionLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def layer(self) -> AttentionLayer:
        """The head's only layer."""
        only = self.layers[0]
        assert isinstance(only, AttentionLayer)
        return only

    def forward(self, embedding: Tensor, hidden: Tensor, following: Tensor, depth: int, parts: Parts) -> list[Tensor]:
        """Draft ``depth`` tokens from every position as decoding would.

        embedding [V, H]; hidden [B, T, H], the target's post-norm hidden states h_p; following
        [B, T + depth - 1] with following[:, p] = x_{p+1}. Step k (from 1) at row p is fed x_{p+k}
        and, for k > 1, the step before's own post-norm hidden; its output predicts x_{p+k+1}.
        As in a cache, step k at row p sees the step-1 rows 0..p, which hold target hidden states,
        and of the later steps only those that started from p; row p of step k stands at p + k - 1.
        """
        step_function = parts.mtp_step or mtp_step
        length = hidden.shape[1]
        positions = torch.arange(length, device=hidden.device)
        causal = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()
        own = torch.eye(length, dtype=torch.bool, device=hidden.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for step in range(depth):
            cos, sin = rotary_tables(self.config, positions + step)
            mask = torch.cat([causal] + [own] * step, 1) if step else None
            e = F.embedding(following[:, step : step + length], embedding)
            hidden, k, v = step_function(self, e, hidden, keys, values, mask, cos, sin)
            keys.append(k)
            values.append(v)
            outputs.append(hidden)
        return outputs


class Trunk(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            AttentionLayer(config) if kind == "full_attention" else LinearLayer(config) for kind in config.layer_types
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class SurefootModel(nn.Module):
    """Target model and MTP head with a shared, tied output head."""

    def __init__(self, config: ModelConfig, parts: Parts | None = None) -> None:
        super().__init__()
        self.config = config
        self.parts = parts or Parts()
        self.model = Trunk(config)
        self.mtp = MtpHead(config)
        self.initialise()

    def initialise(self) -> None:
        """Normal weights of 0.02; maps back into the residual stream are scaled down with depth."""
        scale = 1 / math.sqrt(2 * self.config.num_hidden_layers)
        for name, module in self.named_modules():
            if isinstance(module, (Projection, nn.Embedding)):
                into_residual = name.endswith(("o_proj", "out_proj", "down_proj"))
                nn.init.normal_(module.weight, std=0.02 * scale if into_residual else 0.02)

    @property
    def embedding(self) -> Tensor:
        """The shared matrix [V, H]."""
        return self.model.embed_tokens.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> post-norm hidden states [B, T, H], fp32."""
        parts = self.parts
        cos, sin = rotary_tables(self.config, torch.arange(tokens.shape[1], device=tokens.device))
        h = F.embedding(tokens, self.embedding)
        for layer in self.model.layers:
            if isinstance(layer, LinearLayer):
                q, k, v, g, beta, z = parts.linear_before(layer, h)
                h = parts.linear_after(layer, h, parts.delta_rule(q, k, v, g, beta), z)
            else:
                h = parts.attention_layer(layer, h, cos, sin)
        normed: Tensor = self.model.norm(h)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> logits [..., V] in the compute type."""
        dtype = self.config.dtype
        return F.linear(hidden.to(dtype), self.embedding.to(dtype))

    def losses(self, window: Tensor, length: int, depth: int) -> tuple[Tensor, list[Tensor]]:
        """Main loss and one MTP loss per depth of token windows [B, length + depth + 1]."""
        dtype = self.config.dtype
        hidden = self.hidden(window[:, :length])
        main = self.parts.head_loss(self.embedding, hidden, window[:, 1 : length + 1], dtype)
        drafts = self.mtp(self.embedding, hidden, window[:, 1 : length + depth], depth, self.parts)
        ahead = [
            self.parts.head_loss(self.embedding, draft, window[:, k + 2 : k + 2 + length], dtype)
            for k, draft in enumerate(drafts)
        ]
        return main, ahead
