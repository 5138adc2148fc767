"""Hugging Face `config.json` to `ModelConfig`.

Strict where a wrong guess would give wrong text: what the model needs must be there with the right type, and what this
engine does not do (scaled RoPE, weights of 4 bits, ungated attention) is refused here, before any tensor is looked at.
Keys that do not concern the text decoder are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import get_args

from surefoot.config import LayerType, ModelConfig, MoEConfig
from surefoot.errors import CheckpointError, shown
from surefoot.kernels.quantise import GROUP

Json = Mapping[str, object]

DENSE_TYPES = ("qwen3_5", "qwen3_5_text")
MOE_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
QUANT_METHODS = ("fp8", "compressed-tensors")
DEFAULT_ROTARY_FACTOR = 0.25  # the family's; configs written before rope_parameters existed leave it out
# Far above any real model: a damaged config must not make us build tables of a billion names.
MOST_LAYERS = 10_000
MOST_EXPERTS = 100_000


def parse_config(raw: Json) -> ModelConfig:
    """The text decoder that a `config.json` describes, nested under `text_config` or at the top level.

    `mtp_layers` is what the config announces; only the files can say whether the layers are there.
    `eos_token_ids` holds those of both levels. Raises CheckpointError naming the field, what was expected and found.
    """
    nested = raw.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise _wrong("text_config", "an object", nested)
    text: Json = raw if nested is None else nested
    is_moe = _is_moe(text.get("model_type", raw.get("model_type")))
    _refuse_unsupported(raw)
    if text is not raw:
        _refuse_unsupported(text)
    head_dim = _size(text, "head_dim")
    rope_theta, rotary_dim = _rope(text, head_dim)
    config = ModelConfig(
        vocab_size=_size(text, "vocab_size"),
        hidden_size=_size(text, "hidden_size"),
        layer_types=_layer_types(text),
        num_heads=_size(text, "num_attention_heads"),
        num_kv_heads=_size(text, "num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        linear_key_heads=_size(text, "linear_num_key_heads"),
        linear_value_heads=_size(text, "linear_num_value_heads"),
        linear_key_dim=_size(text, "linear_key_head_dim"),
        linear_value_dim=_size(text, "linear_value_head_dim"),
        conv_width=_size(text, "linear_conv_kernel_dim", default=4),
        ffn_width=None if is_moe else _size(text, "intermediate_size"),
        moe=_moe(text) if is_moe else None,
        norm_eps=_positive(text, "rms_norm_eps", default=1e-6),
        tied=_flag(text, "tie_word_embeddings", default=_flag(raw, "tie_word_embeddings", default=False)),
        mtp_layers=_size(text, "mtp_num_hidden_layers", default=0, low=0, high=MOST_LAYERS),
        max_positions=_size(text, "max_position_embeddings", default=32768),
        eos_token_ids=merge_ids(token_ids(raw, "config.json"), token_ids(text, "config.json")),
    )
    _check_multiples(config)
    return config


def token_ids(raw: Json, where: str, key: str = "eos_token_id") -> tuple[int, ...]:
    """The ids under `key`: an integer, a list of them, or nothing. `where` names the file in the error."""
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise CheckpointError(f"{where}: {key}: expected a token id or a list of them, found {shown(value)}")
    return tuple(ids)


def merge_ids(*groups: Iterable[int]) -> tuple[int, ...]:
    """All ids once, in the order of first appearance."""
    return tuple(dict.fromkeys(token for group in groups for token in group))


def _is_moe(model_type: object) -> bool:
    if model_type in DENSE_TYPES:
        return False
    if model_type in MOE_TYPES:
        return True
    known = ", ".join(DENSE_TYPES + MOE_TYPES)
    raise _wrong("model_type", f"one of {known} (other families run through surefoot.TransformersTarget)", model_type)


def _refuse_unsupported(raw: Json) -> None:
    """Settings under which the tensors would load and the text would be wrong."""
    if raw.get("quantization_config") is not None:
        _check_quantisation(raw["quantization_config"])
    refused: list[tuple[str, tuple[object, ...], str]] = [
        ("attn_output_gate", (None, True), "true: attention without its output gate is not supported"),
        ("output_gate_type", (None, "swish", "silu"), "swish or silu: no other DeltaNet gate is supported"),
        ("hidden_act", (None, "silu", "swish"), "silu: no other activation is supported"),
        ("attention_bias", (None, False), "false: projections with a bias are not supported"),
        ("norm_topk_prob", (None, True), "true: the weights of the chosen experts are always renormalised"),
        ("mtp_use_dedicated_embeddings", (None, False), "false: the MTP head shares the model's embedding and LM head"),
    ]
    for key, accepted, expected in refused:
        value = raw.get(key)
        # `1 in (None, True)` holds in Python; compare types too
        if not any(value is one or (isinstance(value, str) and value == one) for one in accepted):
            raise _wrong(key, expected, value)


def _check_quantisation(raw: object) -> None:
    """Weights of 8 bits (e4m3) that scales multiply are read. What is quantised in which way shows in the tensors; the
    settings are asked whether that is all there is to it. Activations keep their type whatever they say."""
    if not isinstance(raw, Mapping):
        raise _wrong("quantization_config", "an object", raw)
    method = raw.get("quant_method")
    if method == "fp8":
        _settle(raw, "quantization_config", {"fmt": (None, "e4m3"), "weight_block_size": (None, [GROUP, GROUP])})
        return
    if method != "compressed-tensors":
        expected = f"{' or '.join(QUANT_METHODS)} (weights of 8 bits, e4m3)"
        raise _wrong("quantization_config.quant_method", expected, method)
    _settle(raw, "quantization_config", {"transform_config": (None, {}), "sparsity_config": (None, {})})
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping):
        raise _wrong("quantization_config.config_groups", "an object", groups)
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else group
        if weights is None:
            continue
        where = f"quantization_config.config_groups.{shown(name)}.weights"
        if not isinstance(weights, Mapping):
            raise _wrong(where, "an object", weights)
        block = (None, [GROUP, GROUP]) if weights.get("strategy") == "block" else (None,)
        _settle(weights, where, {"num_bits": (8,), "type": ("float",), "strategy": ("channel", "tensor", "block"),
                                 "symmetric": (None, True), "block_structure": block})  # fmt: skip


def _settle(raw: Json, where: str, accepted: Mapping[str, tuple[object, ...]]) -> None:
    """Raise for a key whose value is none of the accepted ones (None: the key may be missing)."""
    for key, values in accepted.items():
        value = raw.get(key)
        if not any(type(value) is type(one) and value == one for one in values):
            expected = " or ".join("nothing" if one is None else str(one) for one in values)
            raise _wrong(f"{where}.{key}", expected, value)


def _layer_types(text: Json) -> tuple[LayerType, ...]:
    count = _size(text, "num_hidden_layers", high=MOST_LAYERS)
    listed = text.get("layer_types")
    if listed is None:
        every = _size(text, "full_attention_interval", default=4)
        return tuple("linear_attention" if (index + 1) % every else "full_attention" for index in range(count))
    kinds = get_args(LayerType)
    if not isinstance(listed, list) or any(kind not in kinds for kind in listed):
        raise _wrong("layer_types", f"a list of {' and '.join(kinds)}", listed)
    if len(listed) != count:
        raise _wrong("layer_types", f"{count} entries (num_hidden_layers)", len(listed))
    return tuple(listed)


def _rope(text: Json, head_dim: int) -> tuple[float, int]:
    """(theta, rotary dims), from `rope_parameters`, else `rope_scaling`, else the level above them."""
    sources: list[Json] = []
    for key in ("rope_parameters", "rope_scaling"):
        block = text.get(key)
        if block is None:
            continue
        if not isinstance(block, Mapping):
            raise _wrong(key, "an object", block)
        kind = block.get("rope_type", block.get("type", "default"))
        if kind not in ("default", "mrope"):  # "mrope" is the older spelling of default with three equal axes
            raise _wrong(f"{key}.rope_type", "default (RoPE scaling is not supported)", kind)
        sources.append(block)
    sources.append(text)
    theta = next((block for block in sources if block.get("rope_theta") is not None), text)
    factor = next((block for block in sources if block.get("partial_rotary_factor") is not None), text)
    share = _positive(factor, "partial_rotary_factor", default=DEFAULT_ROTARY_FACTOR)
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise _wrong("partial_rotary_factor", f"an even number of dims out of head_dim = {head_dim}", share)
    return _positive(theta, "rope_theta"), rotary_dim


def _moe(text: Json) -> MoEConfig:
    moe = MoEConfig(
        num_experts=_size(text, "num_experts", high=MOST_EXPERTS),
        experts_per_token=_size(text, "num_experts_per_tok"),
        expert_width=_size(text, "moe_intermediate_size"),
        shared_width=_size(text, "shared_expert_intermediate_size"),
    )
    if moe.experts_per_token > moe.num_experts:
        raise _wrong("num_experts_per_tok", f"at most num_experts = {moe.num_experts}", moe.experts_per_token)
    return moe


def _check_multiples(c: ModelConfig) -> None:
    if c.num_heads % c.num_kv_heads:
        raise _wrong("num_attention_heads", f"a multiple of num_key_value_heads = {c.num_kv_heads}", c.num_heads)
    if c.linear_value_heads % c.linear_key_heads:
        expected = f"a multiple of linear_num_key_heads = {c.linear_key_heads}"
        raise _wrong("linear_num_value_heads", expected, c.linear_value_heads)


def _size(raw: Json, key: str, default: int | None = None, low: int = 1, high: int = 2**40) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(key, f"an integer from {low} to {high}", value)
    return value


def _positive(raw: Json, key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise _wrong(key, "a number above 0", value)
    return float(value)


def _flag(raw: Json, key: str, default: bool) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(key, "true or false", value)
    return value


def _wrong(key: str, expected: str, found: object) -> CheckpointError:
    return CheckpointError(
        f"config.json: {key}: expected {expected}, found {'nothing' if found is None else shown(found)}"
    )
