"""The names and shapes of a checkpoint's tensors, and random ones of the same shape.

Names are those of a text-only Hugging Face export (`model.layers.0...`, `mtp...`); experts are fused. Loading maps
every other spelling to these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from surefoot.config import ModelConfig
from surefoot.kernels.quantise import Weight

Shapes = dict[str, tuple[int, ...]]

# The weights of linear layers that come in 8 bits as well as whole. The router, the rows that decide a DeltaNet's decay
# and the embedding's table are not among them.
NARROW = (
    "_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", ".gate_up_proj", ".down_proj", "fc.weight",
    "lm_head.weight",
)  # fmt: skip


class Weights(Protocol):
    """A model's tensors by name, as a dict has them: what layers are built of, and let go of."""

    def __getitem__(self, name: str, /) -> Weight:
        """The tensor of this name."""

    def __iter__(self) -> Iterator[str]:
        """All names."""

    def pop(self, name: str, /) -> Weight:
        """The tensor of this name, no longer here."""


def whole(tensors: Weights | Mapping[str, Weight], name: str) -> Tensor:
    """A tensor that is none of `NARROW`."""
    tensor = tensors[name]
    assert isinstance(tensor, Tensor), name
    return tensor


def target_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of the decoder and its head, without the MTP head."""
    c = config
    shapes: Shapes = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for index, kind in enumerate(c.layer_types):
        prefix = f"model.layers.{index}."
        mixer = _attention_shapes(c) if kind == "full_attention" else _deltanet_shapes(c)
        shapes |= {prefix + name: shape for name, shape in (_block_norm_shapes(c) | mixer | _ffn_shapes(c)).items()}
    return shapes


def mtp_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of the MTP head (empty if the config has none); embedding and LM head are the target's."""
    c = config
    if not c.mtp_layers:
        return {}
    shapes: Shapes = {
        "mtp.fc.weight": (c.hidden_size, 2 * c.hidden_size),
        "mtp.pre_fc_norm_embedding.weight": (c.hidden_size,),
        "mtp.pre_fc_norm_hidden.weight": (c.hidden_size,),
        "mtp.norm.weight": (c.hidden_size,),
    }
    for index in range(c.mtp_layers):
        block = _block_norm_shapes(c) | _attention_shapes(c) | _ffn_shapes(c)
        shapes |= {f"mtp.layers.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def random_tensors(
    config: ModelConfig, seed: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Weights of the config's shape that keep activations of order one (norms near their neutral value)."""
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = {}
    for name, shape in (target_shapes(config) | mtp_shapes(config)).items():
        noise = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        if name.endswith("A_log"):
            tensors[name] = noise.abs().add_(0.1).log_()
        elif name.endswith("linear_attn.norm.weight"):
            tensors[name] = 1 + 0.1 * noise
        elif len(shape) == 1:
            tensors[name] = 0.1 * noise
        elif "embed_tokens" in name:
            tensors[name] = noise
        else:
            fan_in = shape[-1] if not name.endswith("conv1d.weight") else 1
            tensors[name] = noise.mul_(fan_in**-0.5)
    return tensors


def let_go(tensors: Weights, prefix: str) -> None:
    """Forget the tensors `prefix + ...`, from which a layer has been built. A GPU gets their memory back: what the next
    layer is built into has other sizes and would not use it."""
    taken = [tensors.pop(name) for name in list(tensors) if name.startswith(prefix)]
    cuda = any(tensor.is_cuda for tensor in taken)
    taken.clear()
    if cuda:
        torch.cuda.empty_cache()


def _block_norm_shapes(c: ModelConfig) -> Shapes:
    return {"input_layernorm.weight": (c.hidden_size,), "post_attention_layernorm.weight": (c.hidden_size,)}


def _attention_shapes(c: ModelConfig) -> Shapes:
    return {
        "self_attn.q_proj.weight": (c.num_heads * 2 * c.head_dim, c.hidden_size),
        "self_attn.k_proj.weight": (c.num_kv_heads * c.head_dim, c.hidden_size),
        "self_attn.v_proj.weight": (c.num_kv_heads * c.head_dim, c.hidden_size),
        "self_attn.o_proj.weight": (c.hidden_size, c.num_heads * c.head_dim),
        "self_attn.q_norm.weight": (c.head_dim,),
        "self_attn.k_norm.weight": (c.head_dim,),
    }


def _deltanet_shapes(c: ModelConfig) -> Shapes:
    return {
        "linear_attn.in_proj_qkv.weight": (c.conv_channels, c.hidden_size),
        "linear_attn.in_proj_z.weight": (c.value_width, c.hidden_size),
        "linear_attn.in_proj_b.weight": (c.linear_value_heads, c.hidden_size),
        "linear_attn.in_proj_a.weight": (c.linear_value_heads, c.hidden_size),
        "linear_attn.conv1d.weight": (c.conv_channels, 1, c.conv_width),
        "linear_attn.A_log": (c.linear_value_heads,),
        "linear_attn.dt_bias": (c.linear_value_heads,),
        "linear_attn.norm.weight": (c.linear_value_dim,),
        "linear_attn.out_proj.weight": (c.hidden_size, c.value_width),
    }


def _ffn_shapes(c: ModelConfig) -> Shapes:
    if c.moe is None:
        assert c.ffn_width is not None
        return {
            "mlp.gate_proj.weight": (c.ffn_width, c.hidden_size),
            "mlp.up_proj.weight": (c.ffn_width, c.hidden_size),
            "mlp.down_proj.weight": (c.hidden_size, c.ffn_width),
        }
    m = c.moe
    return {
        "mlp.gate.weight": (m.num_experts, c.hidden_size),
        "mlp.experts.gate_up_proj": (m.num_experts, 2 * m.expert_width, c.hidden_size),
        "mlp.experts.down_proj": (m.num_experts, c.hidden_size, m.expert_width),
        "mlp.shared_expert.gate_proj.weight": (m.shared_width, c.hidden_size),
        "mlp.shared_expert.up_proj.weight": (m.shared_width, c.hidden_size),
        "mlp.shared_expert.down_proj.weight": (c.hidden_size, m.shared_width),
        "mlp.shared_expert_gate.weight": (1, c.hidden_size),
    }
