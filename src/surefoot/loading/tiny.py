"""Small checkpoints on disk, in every style that exports of this family come in: for tests, examples and training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from surefoot.config import ModelConfig, MoEConfig
from surefoot.kernels.quantise import FLOAT8, GROUP, LARGEST
from surefoot.loading.files import INDEX, SINGLE
from surefoot.loading.names import is_mtp
from surefoot.model.tensors import NARROW

if TYPE_CHECKING:
    from tokenizers import AddedToken

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Style:
    """How a checkpoint is laid out.

    `prefix`: "text" names the decoder `model.`, "multimodal" `model.language_model.` with a vision tower beside it and
    the config nested, "swapped" `language_model.model.`. `shard_bytes` starts a new shard (with an index) rather than
    exceed it; None writes one file. `mtp`: with the other tensors, in a file of its own outside the index, or left out
    while the config still announces it. `squeezed` stores conv1d as [C, W] and the shared expert's gate as [H].
    `weights`: those of linear layers "whole", or in 8 bits with scales: for "squares" of 128 x 128, as the family's own
    FP8 exports have them, for "rows" or whole "tensors", as compressed-tensors has them.
    """

    prefix: Literal["text", "multimodal", "swapped"] = "text"
    shard_bytes: int | None = None
    experts: Literal["fused", "separate"] = "fused"
    mtp: Literal["index", "sidecar", "missing"] = "index"
    squeezed: bool = False
    weights: Literal["whole", "squares", "rows", "tensors"] = "whole"


def tiny_config(moe: bool = False, **overrides: Any) -> ModelConfig:
    """A four-layer model (three DeltaNet, one attention) whose sizes all differ, so that a swapped axis shows.

    Two value heads per key head, attention wider than the hidden size, a quarter of each head rotated, one MTP layer,
    260 tokens (those of `byte_tokenizer`, and one padding row). `overrides` are fields of ModelConfig.
    """
    config = ModelConfig(
        vocab_size=260,
        hidden_size=48,
        layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention"),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rotary_dim=4,
        rope_theta=10_000.0,
        linear_key_heads=2,
        linear_value_heads=4,
        linear_key_dim=8,
        linear_value_dim=12,
        ffn_width=None if moe else 40,
        moe=MoEConfig(num_experts=4, experts_per_token=2, expert_width=20, shared_width=28) if moe else None,
        mtp_layers=1,
        max_positions=512,
    )
    return replace(config, **overrides)


def hf_config_dict(config: ModelConfig) -> dict[str, Any]:
    """The text-only `config.json` of this model, also the arguments of transformers' Qwen3_5(Moe)TextConfig."""
    c = config
    pairs = c.rotary_dim // 2
    raw: dict[str, Any] = {
        "model_type": "qwen3_5_text" if c.moe is None else "qwen3_5_moe_text",
        "architectures": ["Qwen3_5ForCausalLM" if c.moe is None else "Qwen3_5MoeForCausalLM"],
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "layer_types": list(c.layer_types),
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "linear_num_key_heads": c.linear_key_heads,
        "linear_num_value_heads": c.linear_value_heads,
        "linear_key_head_dim": c.linear_key_dim,
        "linear_value_head_dim": c.linear_value_dim,
        "linear_conv_kernel_dim": c.conv_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "max_position_embeddings": c.max_positions,
        "eos_token_id": list(c.eos_token_ids) or None,
        "mtp_num_hidden_layers": c.mtp_layers,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": c.rope_theta,
            "partial_rotary_factor": c.rotary_dim / c.head_dim,
            "mrope_section": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3],
            "mrope_interleaved": True,
        },
    }
    if c.moe is None:
        return raw | {"intermediate_size": c.ffn_width}
    return raw | {
        "num_experts": c.moe.num_experts,
        "num_experts_per_tok": c.moe.experts_per_token,
        "moe_intermediate_size": c.moe.expert_width,
        "shared_expert_intermediate_size": c.moe.shared_width,
    }


def byte_tokenizer() -> Backend:
    """A tokenizer with one token per byte (ids 0 to 255) and the tokens of `SPECIALS` after them."""
    # The byte-level alphabet names each byte by a printable character; its decoder maps them back.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    backend = Backend(models.BPE(vocab={char: _byte_of(char) for char in alphabet}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials: list[str | AddedToken] = list(SPECIALS)
    backend.add_special_tokens(specials)
    return backend


def write_checkpoint(
    path: str | Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    style: Style | None = None,
    tokenizer: Backend | None = None,
) -> Path:
    """Write a Hugging Face folder of tensors under canonical names; returns it. Existing files of a name are replaced.

    With a tokenizer come `tokenizer.json` and a `tokenizer_config.json` with a chat template and `<|endoftext|>` as its
    end-of-sequence token.
    """
    style = style or Style()
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _nested(config, style))
    stored: dict[str, Tensor] = {}
    beside: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_mtp(name) and style.mtp == "missing":
            continue
        group = beside if is_mtp(name) and style.mtp == "sidecar" else stored
        for spelled, part in _spell(name, tensor, style):
            eight_bits = style.weights != "whole" and name.endswith(NARROW)
            group |= _cut(spelled, part, style) if eight_bits else {spelled: part.contiguous()}
    if style.prefix == "multimodal":
        stored["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 3)
    _write_shards(folder, stored, style.shard_bytes)
    if beside:
        save_file(beside, folder / "mtp.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", {"eos_token": SPECIALS[0], "chat_template": CHAT_TEMPLATE})
    return folder


def _nested(config: ModelConfig, style: Style) -> dict[str, Any]:
    text, quantised = hf_config_dict(config), _quantisation(style)
    if style.prefix == "text":
        return text | quantised
    family = "qwen3_5" if config.moe is None else "qwen3_5_moe"
    architecture = text.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    tied = text["tie_word_embeddings"]
    top = {"model_type": family, "architectures": [architecture], "tie_word_embeddings": tied}
    return {**top, "text_config": text, "vision_config": {"model_type": family}, **quantised}


def _spell(name: str, tensor: Tensor, style: Style) -> Iterator[tuple[str, Tensor]]:
    """The stored names and shapes of one canonical tensor in this style."""
    if style.prefix == "multimodal" and name.startswith("model."):
        name = "model.language_model." + name.removeprefix("model.")
    elif style.prefix == "swapped" and not is_mtp(name):
        name = "language_model." + name
    if style.squeezed and name.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    elif style.squeezed and name.endswith("shared_expert_gate.weight"):
        tensor = tensor.squeeze(0)
    block, _, last = name.rpartition(".")
    if style.experts == "fused" or not block.endswith(".experts"):
        yield name, tensor
        return
    for index, expert in enumerate(tensor):
        parts = {"down": expert} if last == "down_proj" else dict(zip(("gate", "up"), expert.chunk(2), strict=True))
        for part, value in parts.items():
            yield f"{block}.{index}.{part}_proj.weight", value


def _cut(name: str, weight: Tensor, style: Style) -> dict[str, Tensor]:
    """A weight [..., N, K] in 8 bits, and its scales."""
    *lead, rows, columns = weight.shape
    block = {"squares": (GROUP, GROUP), "rows": (1, columns)}.get(style.weights, (rows, columns))
    padded = F.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))  # [..., n, block, k, block]
    largest = tiles.abs().amax((-3, -1), keepdim=True)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0).bfloat16()
    numbers = (tiles / scale.float()).to(FLOAT8).flatten(-4, -3).flatten(-2)[..., :rows, :columns]
    scale = scale.squeeze(-1).squeeze(-2)
    if style.weights == "tensors" and not lead:
        scale = scale.reshape(())
    return {name: numbers.contiguous(), name + ("_scale_inv" if style.weights == "squares" else "_scale"): scale}


def _quantisation(style: Style) -> dict[str, Any]:
    """What the config says of weights in 8 bits."""
    if style.weights == "whole":
        return {}
    if style.weights == "squares":
        method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return {"quantization_config": method | {"weight_block_size": [GROUP, GROUP]}}
    strategy = {"rows": "channel", "tensors": "tensor"}[style.weights]
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "block_structure": None}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}


def _write_shards(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int | None) -> None:
    if shard_bytes is None:
        save_file(dict(tensors), folder / SINGLE, metadata={"format": "pt"})
        return
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _byte_of(char: str) -> int:
    """The byte that a character of the byte-level alphabet stands for: itself if printable, else in order from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return ord(char) if ord(char) < 256 else rest[ord(char) - 256]
