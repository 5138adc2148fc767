"""Checkpoints with weights in 8 bits: what they load to, made plain and as they are, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surefoot import Engine, SamplingParams
from surefoot.config import ModelConfig, MoEConfig
from surefoot.errors import CheckpointError, InputError
from surefoot.kernels.quantise import FLOAT8, GROUP, Quantised, dense_of
from surefoot.loading.checkpoint import inspect, load_checkpoint
from surefoot.loading.files import SINGLE
from surefoot.loading.tiny import Style, tiny_config, write_checkpoint
from surefoot.model.tensors import NARROW, random_tensors

STYLES = [
    Style(weights="squares", experts="separate", prefix="multimodal", mtp="sidecar"),  # the family's own exports
    Style(weights="squares"),
    Style(weights="rows", experts="separate", shard_bytes=60_000),
    Style(weights="rows"),
    Style(weights="tensors", experts="separate"),
    Style(weights="tensors", prefix="swapped"),
]
each_style = pytest.mark.parametrize("style", STYLES, ids=lambda s: f"{s.weights}, {s.experts}")
either = pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
UP = "model.layers.0.mlp.up_proj.weight"


def wide(moe: bool) -> ModelConfig:
    """Sizes beyond one square, and no multiple of its side."""
    kinds = ("linear_attention", "full_attention")
    config = tiny_config(moe, hidden_size=150, layer_types=kinds, vocab_size=140)
    return replace(config, moe=MoEConfig(3, 2, 70, 140)) if moe else replace(config, ffn_width=140)


def write(path: Path, moe: bool = False, style: Style = STYLES[1]) -> Path:
    return write_checkpoint(path, wide(moe), random_tensors(wide(moe), seed=1), style=style)


def rewrite(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def times(weight: Tensor, scale: Tensor) -> Tensor:
    """What the numbers stand for."""
    scale = scale.float()
    for dim in (-2, -1) if scale.dim() else ():
        size, count = weight.shape[dim], scale.shape[dim]
        if count != size:
            scale = scale.index_select(dim, torch.arange(size) // (size if count == 1 else GROUP))
    return weight.float() * scale


def make_plain(folder: Path, to: Path) -> Path:
    """The checkpoint once more, every weight multiplied out."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (to / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name in [name for name in tensors if "_scale" in name]:
        weight = name.rpartition("_scale")[0]
        assert tensors[weight].dtype == FLOAT8
        tensors[weight] = times(tensors[weight], tensors.pop(name))
    assert not any(tensor.dtype == FLOAT8 for tensor in tensors.values())
    save_file(tensors, to / SINGLE, metadata={"format": "pt"})
    return to


@each_style
@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_numbers_stand_for(tmp_path: Path, style: Style, moe: bool, dtype: torch.dtype) -> None:
    folder = write(tmp_path / "8", moe, style)
    loaded = load_checkpoint(folder, mtp="require", dtype=dtype)
    plain = load_checkpoint(make_plain(folder, tmp_path / "plain"), mtp="require", dtype=dtype)
    assert plain.notes == ()
    assert loaded.notes == (f"weights that the files have in 8 bits are turned into {str(dtype)[6:]}",)
    assert loaded.config == plain.config == wide(moe)
    assert loaded.tensors.keys() == plain.tensors.keys()
    for name, tensor in plain.tensors.items():
        found = loaded.tensors[name]
        assert isinstance(found, Tensor)
        assert isinstance(tensor, Tensor)
        assert torch.equal(found, tensor), name


@each_style
@either
def test_kept_in_8_bits(tmp_path: Path, style: Style, moe: bool) -> None:
    folder = write(tmp_path, moe, style)
    plain = load_checkpoint(folder)
    loaded = load_checkpoint(folder, narrow=True)
    assert loaded.notes == ()
    for name, tensor in loaded.tensors.items():
        assert torch.equal(dense_of(tensor), dense_of(plain.tensors[name])), name
        assert isinstance(tensor, Quantised) == name.endswith(NARROW)
        if isinstance(tensor, Quantised):
            assert tensor.weight.dtype == FLOAT8
            several = -(-tensor.shape[-1] // GROUP) if style.weights == "squares" else 1
            assert tensor.scale.shape == (*tensor.shape[:-1], several)


def test_the_numbers_are_nothing_without_their_scales(tmp_path: Path) -> None:
    """The negative control of the tests above: scales that are left out would show."""
    weight = load_checkpoint(write(tmp_path, style=Style(weights="rows")), narrow=True).tensors[UP]
    original = random_tensors(wide(False), seed=1)[UP]
    assert isinstance(weight, Quantised)
    assert (weight.dense() - original).norm() < 0.04 * original.norm()
    assert (weight.weight.float() - original).norm() > original.norm()


@either
def test_an_engine_decodes_with_them_and_says_so(tmp_path: Path, moe: bool) -> None:
    folder = write(tmp_path / "8", moe, STYLES[0])
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    engine = Engine.from_pretrained(folder, max_len=32)
    plain = Engine.from_pretrained(make_plain(folder, tmp_path / "plain"), max_len=32)
    assert engine.generate([1, 2, 3], params).token_ids == plain.generate([1, 2, 3], params).token_ids
    assert engine.notes == ("weights that the files have in 8 bits are turned into float32",)


@pytest.mark.parametrize("weights", ["fp8", "int8", 8])
def test_8_bits_cannot_be_asked_for_on_a_cpu(tmp_path: Path, weights: Any) -> None:
    with pytest.raises(InputError, match="weights: expected"):
        Engine.from_pretrained(write(tmp_path), weights=weights)


def test_what_is_whole_stays_so(tmp_path: Path) -> None:
    """Whatever the config says: one expert's gate that is whole makes the tensor of all of them plain."""
    style = Style(weights="rows", experts="separate")
    block = "model.layers.0.mlp.experts"
    gate = torch.randn(70, 150, generator=torch.Generator().manual_seed(5))

    def keep(tensors: dict[str, Tensor]) -> None:
        tensors[f"{block}.1.gate_proj.weight"] = gate
        del tensors[f"{block}.1.gate_proj.weight_scale"]

    rewrite(write(tmp_path, moe=True, style=style) / SINGLE, keep)
    loaded = load_checkpoint(tmp_path, narrow=True)
    gates = loaded.tensors[f"{block}.gate_up_proj"]
    assert isinstance(gates, Tensor)
    assert torch.equal(gates[1, :70], gate)
    assert isinstance(loaded.tensors[f"{block}.down_proj"], Quantised)


def test_8_bits_where_the_layers_take_none(tmp_path: Path) -> None:
    folder = write(tmp_path, moe=True)
    layer = "model.layers.0"
    names = ("model.embed_tokens.weight", f"{layer}.mlp.gate.weight", f"{layer}.linear_attn.in_proj_b.weight")
    wanted = {}

    def cut(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[name] = tensors[name].to(FLOAT8)
            tensors[name + "_scale"] = torch.full((1,), 0.375)
            wanted[name] = tensors[name].float() * 0.375

    rewrite(folder / SINGLE, cut)
    loaded = load_checkpoint(folder, narrow=True)
    for name in names:
        tensor = loaded.tensors[name]
        assert isinstance(tensor, Tensor)
        assert torch.equal(tensor, wanted[name])


def test_scales_of_activations_and_caches_are_passed_over(tmp_path: Path) -> None:
    folder = write(tmp_path)
    layer = "model.layers.1.self_attn"
    names = (f"{layer}.q_proj.input_scale", f"{layer}.q_proj.activation_scale", f"{layer}.k_scale", f"{layer}.v_scale")
    rewrite(folder / SINGLE, lambda tensors: tensors.update({name: torch.ones(1) for name in names}))
    inspect(folder)


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (
        lambda t: t.pop(f"{UP}_scale_inv"),
        rf"{UP}_scale\(_inv\): expected \[2, 2\] or \[140, 1\] or \[1, 1\] or \[1\] or \[\] "
        "beside a weight of F8_E4M3, found no such tensor",
    ),
    "too few": (lambda t: t.update({f"{UP}_scale_inv": torch.ones(2, 1)}), r"expected \[2, 2\].*found \[2, 1\] of F32"),
    "other side": (lambda t: t.update({f"{UP}_scale_inv": torch.ones(1, 150)}), r"found \[1, 150\]"),
    "no floats": (lambda t: t.update({f"{UP}_scale_inv": torch.ones(2, 2).int()}), r"of F64.*, found \[2, 2\] of I32"),
    "both": (lambda t: t.update({f"{UP}_scale": torch.ones(())}), rf"{UP}: expected one tensor, found two: .*_scale"),
    "beside a whole weight": (lambda t: t.update({UP: t[UP].float()}), rf"{UP}: .*found also {UP}_scale_inv"),
    "another type": (
        lambda t: t.update({UP: t[UP].float().to(torch.float8_e5m2)}),
        rf"{UP}: expected \[140, 150\] .*found \[140, 150\] of F8_E5M2",
    ),
    "of nothing": (lambda t: t.update({"model.norm.x.weight_scale": torch.ones(1)}), r"model.norm.x.weight: .*no such"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("narrow", [False, True])
def test_what_is_wrong_is_named(tmp_path: Path, case: str, narrow: bool) -> None:
    change, message = WRONG[case]
    rewrite(write(tmp_path) / SINGLE, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path, narrow=narrow)


def test_wrong_scales_of_one_expert(tmp_path: Path) -> None:
    folder = write(tmp_path, moe=True, style=Style(weights="squares", experts="separate"))
    name = "model.layers.1.mlp.experts.2.down_proj.weight_scale"
    rewrite(folder / SINGLE, lambda tensors: tensors.update({f"{name}_inv": torch.ones(2, 2)}))
    with pytest.raises(CheckpointError, match=rf"{name}\(_inv\): expected \[2, 1\] or \[150, 1\].*found \[2, 2\]"):
        inspect(folder)


def test_a_tied_head_in_8_bits(tmp_path: Path) -> None:
    file = write(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight: expected .*F8_E4M3.*embeddings are tied"):
        inspect(tmp_path)


def test_unknown_methods(tmp_path: Path) -> None:
    file = write(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(CheckpointError, match=r"quant_method: expected fp8 or compressed-tensors .*found 'gptq'"):
        inspect(tmp_path)
