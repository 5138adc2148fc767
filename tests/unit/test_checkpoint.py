"""Loading: every export style gives the same tensors, and every kind of damage is a CheckpointError that says what.

One long file: every case starts from the same small checkpoint on disk and damages it.
"""

import contextlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from surefoot.cache import memory
from surefoot.config import ModelConfig
from surefoot.errors import CheckpointError, InputError
from surefoot.kernels.quantise import dense_of
from surefoot.loading import files
from surefoot.loading.checkpoint import Checkpoint, find_model, inspect, load_checkpoint
from surefoot.loading.files import INDEX, SINGLE
from surefoot.loading.generation import sampling_defaults
from surefoot.loading.tiny import Style, byte_tokenizer, tiny_config, write_checkpoint
from surefoot.model.tensors import mtp_shapes, random_tensors, target_shapes

damage = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SMALL = tiny_config(
    vocab_size=11, hidden_size=8, layer_types=("linear_attention", "full_attention"), ffn_width=12, mtp_layers=1
)


def write(path: Path, config: ModelConfig = SMALL, **options: Any) -> Path:
    return write_checkpoint(path, config, random_tensors(config, seed=1), **options)


def rewrite(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def entry(shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def assert_holds(loaded: Checkpoint, config: ModelConfig) -> None:
    expected = random_tensors(config, seed=1)
    wanted = {name: expected[name] for name in target_shapes(loaded.config) | mtp_shapes(loaded.config)}
    assert loaded.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(dense_of(loaded.tensors[name]), tensor), name


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize(
    "style",
    [
        Style(),
        Style(shard_bytes=20_000),
        Style(prefix="multimodal", shard_bytes=20_000, mtp="sidecar"),
        Style(prefix="swapped", squeezed=True),
        Style(experts="separate", squeezed=True, mtp="sidecar"),
        Style(experts="separate", shard_bytes=5_000),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_style_gives_the_same_tensors(tmp_path: Path, moe: bool, style: Style, tied: bool) -> None:
    config = tiny_config(moe=moe, tied=tied, mtp_layers=2)
    loaded = load_checkpoint(write(tmp_path, config, style=style), mtp="require")
    assert loaded.config == config
    assert loaded.notes == ()
    assert ("lm_head.weight" in loaded.tensors) is not tied
    assert_holds(loaded, config)


def test_the_files_of_transformers_load(tmp_path: Path) -> None:
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    from surefoot.loading.tiny import hf_config_dict

    config = tiny_config(moe=True)
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**hf_config_dict(config)))
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)  # transformers drops mtp.*, and keeps what the config says of it
    assert loaded.config == replace(config, mtp_layers=0)
    assert "no mtp" in loaded.notes[0]
    assert torch.equal(dense_of(loaded.tensors["lm_head.weight"]), model.lm_head.weight)


def test_dtypes(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(SMALL, seed=1).items()}
    loaded = load_checkpoint(write_checkpoint(tmp_path, SMALL, tensors), dtype=torch.float16)
    for name, tensor in loaded.tensors.items():
        kept = name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))
        assert tensor.dtype == (torch.float32 if kept else torch.float16), name
        assert torch.equal(dense_of(tensor), tensors[name].to(tensor.dtype)), name


def test_the_loaded_tensors_do_not_change_with_the_file(tmp_path: Path) -> None:
    loaded = load_checkpoint(write(tmp_path))
    file = tmp_path / SINGLE
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    assert_holds(loaded, SMALL)


def test_progress_counts_up_to_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    loaded = load_checkpoint(write(tmp_path), progress=lambda done, total: calls.append((done, total)))
    size = sum(tensor.shape.numel() for tensor in loaded.tensors.values())
    assert calls[-1] == (size, size)
    assert calls == sorted(calls)


class TestMtp:
    def test_missing_is_said_and_falls_back(self, tmp_path: Path) -> None:
        loaded = load_checkpoint(write(tmp_path, style=Style(mtp="missing")))
        assert loaded.config.mtp_layers == 0
        assert "announces an MTP head" in loaded.notes[0]
        assert_holds(loaded, SMALL)

    def test_missing_and_required(self, tmp_path: Path) -> None:
        write(tmp_path, style=Style(mtp="missing"))
        with pytest.raises(CheckpointError, match=r"mtp\.\*: expected .*found none.*announces 1"):
            load_checkpoint(tmp_path, mtp="require")

    def test_neither_announced_nor_there(self, tmp_path: Path) -> None:
        write(tmp_path, tiny_config(mtp_layers=0))
        assert load_checkpoint(tmp_path).notes == ()
        with pytest.raises(CheckpointError, match="announces none either"):
            load_checkpoint(tmp_path, mtp="require")

    def test_there_but_not_announced(self, tmp_path: Path) -> None:
        write(tmp_path)
        edit_json(tmp_path / "config.json", mtp_num_hidden_layers=None)
        loaded = load_checkpoint(tmp_path, mtp="require")
        assert loaded.config.mtp_layers == 1
        assert "announces no MTP" in loaded.notes[0]
        assert_holds(loaded, SMALL)

    @pytest.mark.parametrize("name", sorted(mtp_shapes(SMALL)))
    @pytest.mark.parametrize("mtp", ["require", "if-present"])
    def test_one_missing_tensor_is_named(self, tmp_path: Path, name: str, mtp: Any) -> None:
        write(tmp_path)
        rewrite(tmp_path / SINGLE, lambda tensors: tensors.pop(name))
        with pytest.raises(CheckpointError, match=f"{name}: expected .* found no such tensor"):
            load_checkpoint(tmp_path, mtp=mtp)

    def test_skip_asks_nothing_of_it(self, tmp_path: Path) -> None:
        write(tmp_path)
        rewrite(tmp_path / SINGLE, lambda tensors: tensors.pop("mtp.fc.weight"))
        loaded = load_checkpoint(tmp_path, mtp="skip")
        assert loaded.config.mtp_layers == 0
        assert not any(name.startswith("mtp.") for name in loaded.tensors)

    def test_a_side_file_of_any_name_but_only_with_mtp_in_it(self, tmp_path: Path) -> None:
        write(tmp_path, style=Style(mtp="sidecar"))
        (tmp_path / "mtp.safetensors").rename(tmp_path / "extra_weights.safetensors")
        save_file({"adapter.weight": torch.zeros(2)}, tmp_path / "adapter.safetensors")
        assert load_checkpoint(tmp_path, mtp="require").config.mtp_layers == 1

    def test_in_the_index_and_in_a_side_file(self, tmp_path: Path) -> None:
        write(tmp_path)
        head = {name: t for name, t in random_tensors(SMALL, seed=2).items() if name.startswith("mtp.")}
        save_file(head, tmp_path / "model-mtp.safetensors")
        with pytest.raises(CheckpointError, match=r"expected one tensor, found two: .* in model-mtp\.safetensors"):
            load_checkpoint(tmp_path)

    def test_named_under_the_model(self, tmp_path: Path) -> None:
        write(tmp_path)
        rename = lambda tensors: [tensors.update({"model." + n: tensors.pop(n)}) for n in mtp_shapes(SMALL)]  # noqa: E731
        rewrite(tmp_path / SINGLE, rename)
        assert_holds(load_checkpoint(tmp_path, mtp="require"), SMALL)


class TestTiedHead:
    config = replace(SMALL, tied=True)

    def write_with_head(self, path: Path, head: Tensor) -> Path:
        tensors = random_tensors(self.config, seed=1)
        return write_checkpoint(path, self.config, tensors | {"lm_head.weight": head})

    def test_a_repeated_embedding_is_left_out(self, tmp_path: Path) -> None:
        embedding = random_tensors(self.config, seed=1)["model.embed_tokens.weight"]
        assert_holds(load_checkpoint(self.write_with_head(tmp_path, embedding.clone())), self.config)

    def test_another_shape(self, tmp_path: Path) -> None:
        self.write_with_head(tmp_path, torch.zeros(3, 8))
        with pytest.raises(CheckpointError, match=r"lm_head.weight: expected \[11, 8\].*found \[3, 8\].*tied"):
            inspect(tmp_path)

    def test_other_values(self, tmp_path: Path) -> None:
        self.write_with_head(tmp_path, torch.zeros(11, 8))
        with pytest.raises(CheckpointError, match=r"lm_head.weight: expected the embedding's values"):
            load_checkpoint(tmp_path)


class TestEndIds:
    def test_all_three_places(self, tmp_path: Path) -> None:
        write(tmp_path, tiny_config(eos_token_ids=(5,)), tokenizer=byte_tokenizer())
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258, 5, 999999]}')
        loaded = load_checkpoint(tmp_path)
        assert loaded.eos_token_ids == loaded.config.eos_token_ids == (5, 258, 256)
        assert loaded.tokenizer is not None

    def test_none_at_all(self, tmp_path: Path) -> None:
        loaded = load_checkpoint(write(tmp_path))
        assert loaded.eos_token_ids == ()
        assert loaded.tokenizer is None

    def test_a_damaged_generation_config(self, tmp_path: Path) -> None:
        write(tmp_path)
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
        with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id.*</s>"):
            load_checkpoint(tmp_path)

    def test_suggested_sampling(self, tmp_path: Path) -> None:
        assert sampling_defaults(tmp_path) == {}
        file = tmp_path / "generation_config.json"
        file.write_text('{"temperature": 0.7, "top_k": 20, "top_p": null, "do_sample": false, "eos_token_id": 3}')
        assert sampling_defaults(tmp_path) == {"temperature": 0.7, "top_k": 20}
        file.write_text('{"top_p": 2}')
        with pytest.raises(CheckpointError, match=r"generation_config.json: top_p: expected a number .*found 2"):
            sampling_defaults(tmp_path)

    @pytest.mark.parametrize(
        "raw", [b"[]", b"3", b"\xff\xfe\x00", b"", b"1" * 6000, b'{"eos_token_id": [[1]]}', None], ids=repr
    )
    def test_a_generation_config_of_another_kind(self, tmp_path: Path, raw: bytes | None) -> None:
        file = write(tmp_path) / "generation_config.json"
        file.mkdir() if raw is None else file.write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"generation_config.json"):
            load_checkpoint(tmp_path)

    def test_a_tokenizer_larger_than_the_model(self, tmp_path: Path) -> None:
        write(tmp_path, tokenizer=byte_tokenizer())
        with pytest.raises(
            CheckpointError, match=r"tokenizer.json: expected token ids below vocab_size = 11, found 258"
        ):
            load_checkpoint(tmp_path)


class TestWrongTensors:
    @given(name=st.sampled_from(sorted(target_shapes(SMALL) | mtp_shapes(SMALL))))
    @damage
    def test_renamed(self, tmp_path: Path, name: str) -> None:
        write(tmp_path)
        rewrite(tmp_path / SINGLE, lambda tensors: tensors.update({name + "x": tensors.pop(name)}))
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(tmp_path)
        assert f"{name}: expected" in str(caught.value)
        assert f"{name}x: expected no such tensor, found it in model.safetensors" in str(caught.value)

    @given(name=st.sampled_from(sorted(target_shapes(SMALL) | mtp_shapes(SMALL))), data=st.data())
    @damage
    def test_reshaped(self, tmp_path: Path, name: str, data: st.DataObject) -> None:
        write(tmp_path)
        shape = (target_shapes(SMALL) | mtp_shapes(SMALL))[name]
        wrong = data.draw(st.sampled_from([(*shape, 1), (*shape[:-1], shape[-1] + 1), (1, *shape), shape[:-1]]))
        rewrite(tmp_path / SINGLE, lambda tensors: tensors.update({name: torch.zeros(wrong)}))
        with pytest.raises(CheckpointError) as caught:
            inspect(tmp_path)
        assert f"{name}: expected {list(shape)}" in str(caught.value)
        assert f"found {list(wrong)} of F32 in model.safetensors" in str(caught.value)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.bool])
    def test_not_a_float(self, tmp_path: Path, dtype: torch.dtype) -> None:
        write(tmp_path)
        name = "model.norm.weight"
        rewrite(tmp_path / SINGLE, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
        with pytest.raises(CheckpointError, match=f"{name}: expected .* of F64, F32, F16, BF16, found .* of "):
            inspect(tmp_path)

    @pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "model.visual.blocks.0.x", "vision_tower.y"])
    def test_what_is_no_part_of_the_text_model_is_ignored(self, tmp_path: Path, name: str) -> None:
        write(tmp_path)
        rewrite(tmp_path / SINGLE, lambda tensors: tensors.update({name: torch.zeros(3)}))
        assert_holds(load_checkpoint(tmp_path), SMALL)

    def test_one_expert_missing_one_too_many(self, tmp_path: Path) -> None:
        write(tmp_path, tiny_config(moe=True), style=Style(experts="separate"))
        block = "model.layers.1.mlp.experts"
        rewrite(tmp_path / SINGLE, lambda tensors: tensors.pop(f"{block}.2.up_proj.weight"))
        with pytest.raises(
            CheckpointError, match=rf"{block}.2.up_proj.weight: expected \[20, 48\], found no such tensor"
        ):
            inspect(tmp_path)
        extra = {f"{block}.{e}.up_proj.weight": torch.zeros(20, 48) for e in (2, 4)}
        rewrite(tmp_path / SINGLE, lambda tensors: tensors.update(extra))
        with pytest.raises(CheckpointError, match=rf"{block}.gate_up_proj: .*found also {block}.4.up_proj.weight"):
            inspect(tmp_path)

    def test_long_lists_are_cut(self, tmp_path: Path) -> None:
        write(tmp_path)
        edit_json(tmp_path / "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3)
        with pytest.raises(CheckpointError, match=r"and [0-9]+ more of this kind") as caught:
            inspect(tmp_path)
        assert len(str(caught.value)) < 1500
        assert "\n" not in str(caught.value)


class TestDamagedFiles:
    @given(share=st.floats(0, 1, exclude_max=True))
    @damage
    def test_truncated_anywhere(self, tmp_path: Path, share: float) -> None:
        file = write(tmp_path) / SINGLE
        raw = file.read_bytes()
        file.write_bytes(raw[: int(len(raw) * share)])
        with pytest.raises(CheckpointError, match=SINGLE):
            load_checkpoint(tmp_path)

    @given(edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
    @damage
    def test_random_bytes_in_the_header(self, tmp_path: Path, edits: list[tuple[float, int]]) -> None:
        file = write(tmp_path) / SINGLE
        raw = bytearray(file.read_bytes())
        header = 8 + struct.unpack("<Q", raw[:8])[0]
        for share, value in edits:
            raw[int(header * share)] = value
        file.write_bytes(raw)
        with contextlib.suppress(CheckpointError):  # what the format allows (a metadata key, the same byte) may pass
            load_checkpoint(tmp_path)

    @pytest.mark.parametrize(
        "header",
        [
            {"a": entry([2], 0, 8), "b": entry([2], 4, 12)},
            {"a": entry([2**40, 2**40], 0, 12)},
            {"a": entry([9], 0, 12)},
            {"a": entry([3], 0, 12) | {"dtype": "WHAT"}},
            ["a"],
        ],
        ids=["overlap", "overflow", "too short", "unknown dtype", "no object"],
    )
    def test_headers_that_lie(self, tmp_path: Path, header: object) -> None:
        file = write(tmp_path) / SINGLE
        raw = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(12))
        with pytest.raises(CheckpointError, match=r"model.safetensors: expected a sound safetensors file, found: "):
            inspect(tmp_path)

    def test_a_folder_in_the_place_of_a_file(self, tmp_path: Path) -> None:
        file = write(tmp_path) / SINGLE
        file.unlink()
        file.mkdir()
        with pytest.raises(CheckpointError, match="expected a sound safetensors file, found a folder"):
            inspect(tmp_path)

    def test_mlx_files_are_refused_by_their_format(self, tmp_path: Path) -> None:
        file = write(tmp_path) / SINGLE
        save_file(load_file(file), file, metadata={"format": "mlx"})
        with pytest.raises(CheckpointError, match="MLX"):
            inspect(tmp_path)

    def test_a_folder_in_place_of_a_file(self, tmp_path: Path) -> None:
        (write(tmp_path) / SINGLE).unlink()
        (tmp_path / SINGLE).mkdir()
        with pytest.raises(CheckpointError, match=SINGLE):
            inspect(tmp_path)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"config.json: expected a JSON file, found nothing"):
            inspect(tmp_path)
        (write(tmp_path) / SINGLE).unlink()
        with pytest.raises(CheckpointError, match="found no safetensors file"):
            inspect(tmp_path)
        with pytest.raises(CheckpointError, match="no such folder"):
            inspect(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=r"expected a file's name, found: .*too long"):
            inspect("a" * 5000)

    def test_weights_that_the_memory_cannot_hold(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "memory_of", lambda device: 1000)
        with pytest.raises(
            InputError, match=r"weights: expected at most the 1,000 bytes of cpu's memory, found [\d,]+$"
        ):
            load_checkpoint(write(tmp_path))

    @given(raw=st.binary(max_size=40) | st.text(max_size=20).map(str.encode) | st.sampled_from([b"[]", b"[" * 99999]))
    @damage
    def test_any_config_file(self, tmp_path: Path, raw: bytes) -> None:
        (write(tmp_path) / "config.json").write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"config.json"):
            inspect(tmp_path)


class TestIndex:
    def shards(self, path: Path) -> list[Path]:
        write(path, style=Style(shard_bytes=3_000))
        found = sorted(path.glob("model-*.safetensors"))
        assert len(found) > 2
        return found

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        shard = self.shards(tmp_path)[1]
        shard.unlink()
        with pytest.raises(CheckpointError, match=f"expected the shard {shard.name}"):
            load_checkpoint(tmp_path)

    def test_a_truncated_shard(self, tmp_path: Path) -> None:
        shard = self.shards(tmp_path)[-1]
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match=shard.name):
            load_checkpoint(tmp_path)

    def test_a_tensor_in_another_shard_than_promised(self, tmp_path: Path) -> None:
        first, second, *_ = self.shards(tmp_path)
        weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        moved = next(name for name, file in weight_map.items() if file == first.name)
        edit_json(tmp_path / INDEX, weight_map=weight_map | {moved: second.name})
        with pytest.raises(CheckpointError, match=f"{moved}: expected in {second.name}"):
            load_checkpoint(tmp_path)

    @pytest.mark.parametrize(
        "shard",
        ["../model.safetensors", "/etc/passwd", "", 3, "a\0b", "..", "a" * 5000, "\ud800", None, ["x"], {}],
        ids=lambda shard: repr(shard)[:20],
    )
    def test_shards_outside_the_folder(self, tmp_path: Path, shard: object) -> None:
        self.shards(tmp_path)
        edit_json(tmp_path / INDEX, weight_map={"model.norm.weight": shard})
        with pytest.raises(CheckpointError, match=r"weight_map|shard|file's name") as caught:
            load_checkpoint(tmp_path)
        assert len(str(caught.value)) < 1000

    @pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
    def test_no_weight_map(self, tmp_path: Path, weight_map: object) -> None:
        self.shards(tmp_path)
        edit_json(tmp_path / INDEX, weight_map=weight_map)
        with pytest.raises(CheckpointError, match="weight_map"):
            load_checkpoint(tmp_path)


class TestFindModel:
    def test_a_folder(self, tmp_path: Path) -> None:
        assert find_model(str(tmp_path)) == tmp_path

    @pytest.mark.parametrize("name", ["no-such-model", "./a/b", "/nowhere/at/all", "a/b/c", "", "a b/c"])
    def test_no_such_thing(self, name: str) -> None:
        with pytest.raises(CheckpointError, match="expected a folder, a bundled model"):
            find_model(name if name else "-")

    def test_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "model.gguf"
        file.touch()
        with pytest.raises(CheckpointError, match=r"expected a folder .*found a file"):
            find_model(str(file))

    def test_the_hub_gives_a_folder_or_one_clear_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        asked: list[str] = []

        def answer(name: str, allow_patterns: list[str]) -> str:
            asked.append(name)
            if name == "some/where":
                return str(tmp_path)
            raise RuntimeError("404 Client Error\nmany more lines")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
        assert find_model("some/where") == tmp_path
        with pytest.raises(CheckpointError, match=r"no/where: .*found neither: 404 Client Error$"):
            find_model("no/where")
        assert asked == ["some/where", "no/where"]

    def test_bundled_names_are_looked_up_in_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "BUNDLED", ("not-shipped",))
        with pytest.raises(CheckpointError, match=r"not-shipped: expected this bundled model at .*models"):
            find_model("not-shipped")
