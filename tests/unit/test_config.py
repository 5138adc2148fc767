"""`parse_config`: every place a field may stand in, and a clear refusal of everything else."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import CheckpointError
from surefoot.loading.config import parse_config
from surefoot.loading.tiny import hf_config_dict, tiny_config

QWEN_08B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    },
    "vision_config": {"hidden_size": 768, "model_type": "qwen3_5_vision"},
}


def compressed(**weights: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors whose weights have 8 bits, but for what is given."""
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "block_structure": None}
    groups = {"group_0": {"targets": ["Linear"], "weights": fp8 | weights, "input_activations": {"dynamic": True}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def changed(**fields: Any) -> dict[str, Any]:
    """A valid text-only config with some fields set; a field given as None is taken out."""
    raw = hf_config_dict(tiny_config()) | fields
    return {key: value for key, value in raw.items() if value is not None}


def test_a_real_multimodal_config() -> None:
    config = parse_config(QWEN_08B)
    assert (config.num_layers, config.hidden_size, config.rotary_dim, config.rope_theta) == (24, 1024, 64, 1e7)
    assert config.layer_types[:4] == ("linear_attention",) * 3 + ("full_attention",)
    assert config.layer_types.count("full_attention") == 6
    assert config.tied
    assert config.mtp_layers == 1
    assert config.eos_token_ids == (248044,)


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("overrides", [{}, {"tied": True, "eos_token_ids": (3, 5)}, {"mtp_layers": 2}])
def test_round_trip(moe: bool, overrides: dict[str, Any]) -> None:
    config = tiny_config(moe=moe, **overrides)
    assert parse_config(hf_config_dict(config)) == config


@pytest.mark.parametrize("moe", [False, True])
def test_transformers_writes_what_we_read(moe: bool) -> None:
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    config = tiny_config(moe=moe, eos_token_ids=(7,))
    hf = (Qwen3_5MoeTextConfig if moe else Qwen3_5TextConfig)(**hf_config_dict(config))
    assert parse_config(hf.to_dict()) == config
    assert parse_config({"model_type": "qwen3_5_moe" if moe else "qwen3_5", "text_config": hf.to_dict()}) == config


def test_layer_types_win_over_the_interval() -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert parse_config(changed(layer_types=kinds, full_attention_interval=2)).layer_types == tuple(kinds)
    every_second = parse_config(changed(layer_types=None, full_attention_interval=2)).layer_types
    assert every_second == ("linear_attention", "full_attention") * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": None, "rope_scaling": {"type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "partial_rotary_factor": 0.5},
        {"rope_parameters": None, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, "rope_theta": 1e4},
    ],
)
def test_rope_is_found_wherever_it_stands(fields: dict[str, Any]) -> None:
    config = parse_config(changed(**fields))
    assert (config.rope_theta, config.rotary_dim) == (5e5, 8)


def test_tied_at_either_level_the_text_level_first() -> None:
    text = changed(tie_word_embeddings=None)
    assert parse_config({"text_config": text, "tie_word_embeddings": True}).tied
    assert not parse_config({"text_config": text}).tied
    assert not parse_config({"text_config": text | {"tie_word_embeddings": False}, "tie_word_embeddings": True}).tied


def test_end_ids_of_both_levels_once_each() -> None:
    raw = {"eos_token_id": [9, 4], "text_config": changed(eos_token_id=4)}
    assert parse_config(raw).eos_token_ids == (9, 4)


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"model_type": "qwen3_next"}, "model_type.*qwen3_next"),
        ({"model_type": None}, "model_type.*nothing"),
        ({"quantization_config": 8}, "quantization_config: .*found 8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method: expected fp8 or compr.*'awq'"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, "quant_method: expected fp8 or compr"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt: expected nothing or e4m3.*'e5m2'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}, r"block_size.*\[64, 128\]"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups: .*found nothing"),
        ({"quantization_config": compressed(num_bits=4)}, "group_0.*num_bits: expected 8, found 4"),
        ({"quantization_config": compressed(type="int")}, "type: expected float, found 'int'"),
        ({"quantization_config": compressed(strategy="group")}, "strategy: expected channel or tensor or block"),
        ({"quantization_config": compressed(symmetric=False)}, "symmetric"),
        ({"quantization_config": compressed(strategy="block", block_structure=[4, 8])}, "block_structure"),
        ({"quantization_config": compressed() | {"transform_config": {"R1": {}}}}, "transform_config"),
        ({"quantization_config": compressed() | {"config_groups": {"g": {"weights": 8}}}}, "g'.weights: .*found 8"),
        ({"attn_output_gate": False}, "attn_output_gate.*False"),
        ({"attn_output_gate": 1}, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type.*sigmoid"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings.*True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}}, "rope_type.*yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type.*linear"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta.*nothing"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention"]}, "layer_types.*4 entries.*1"),
        ({"layer_types": ["mamba"] * 4}, "layer_types.*mamba"),
        ({"hidden_size": None}, "hidden_size.*nothing"),
        ({"hidden_size": "48"}, "hidden_size.*'48'"),
        ({"hidden_size": True}, "hidden_size.*True"),
        ({"vocab_size": 0}, "vocab_size.*0"),
        ({"num_hidden_layers": 10**15, "layer_types": None}, "num_hidden_layers"),
        ({"num_attention_heads": 3}, "num_attention_heads.*multiple"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads.*multiple"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings.*yes"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"text_config": 3}, "text_config"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_config(changed(**fields))


def test_refused_at_the_top_level_too() -> None:
    with pytest.raises(CheckpointError, match="quantization_config"):
        parse_config({"text_config": changed(), "quantization_config": {"bits": 4}})


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["lm_head", "model.layers.0.linear_attn.in_proj_a"]},
        compressed(),
        compressed(strategy="tensor"),
        compressed(strategy="block", block_structure=[128, 128]),
        compressed() | {"config_groups": {"caches": {"weights": None}}, "kv_cache_scheme": {"num_bits": 8}},
    ],
)  # fmt: skip
def test_weights_of_8_bits_are_taken(settings: dict[str, Any]) -> None:
    assert parse_config(changed(quantization_config=settings)) == parse_config(changed())


def test_more_experts_per_token_than_experts() -> None:
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok.*at most num_experts = 4"):
        parse_config(hf_config_dict(tiny_config(moe=True)) | {"num_experts_per_tok": 5})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(key=st.sampled_from(sorted(hf_config_dict(tiny_config(moe=True)))), value=JSON, nested=st.booleans())
def test_no_value_of_any_field_gets_another_exception_out(key: str, value: object, nested: bool) -> None:
    raw = hf_config_dict(tiny_config(moe=True)) | {key: value}
    with contextlib.suppress(CheckpointError):
        parse_config({"text_config": raw} if nested else raw)
