"""`surefoot doctor`: the bundled checkpoint is healthy, and copies of it that were damaged on purpose are found out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from surefoot.cli.main import app
from surefoot.doctor.checks import bits_of
from surefoot.doctor.examine import Report, Settings, examine
from surefoot.doctor.findings import SEVERITIES, Finding
from surefoot.doctor.norms import Norm, is_centred, suspects
from surefoot.doctor.probe import PRE_NORM, SWAPPED, Control, Share, chain
from surefoot.errors import InputError
from surefoot.loading.checkpoint import find_model
from surefoot.loading.files import INDEX, SINGLE
from surefoot.loading.tiny import Style, byte_tokenizer, tiny_config, write_checkpoint
from surefoot.model import Decoder, MTPHead
from surefoot.model.tensors import random_tensors

CPU = torch.device("cpu")
FC = "mtp.fc.weight"
MINI = tiny_config(layer_types=("linear_attention", "full_attention"))

Change = Callable[[dict[str, Tensor]], object]


def look(folder: Path, probe: bool = False, **changes: Any) -> Report:
    """A report without a measurement; of 512 tokens if there is a probe."""
    options = Settings(probe=probe, bandwidth=False, **({"tokens": 512, "depth": 2} | changes))
    return examine(folder, options, CPU, torch.bfloat16)


def found(report: Report, code: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.code == code]
    return finding


def serious(report: Report) -> list[str]:
    return [finding.code for finding in report.findings if finding.severity != "note"]


def edit_json(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(folder: Path, change: Change) -> None:
    """Change the tensors of every file; the index follows."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, file.name)
    (folder / INDEX).write_text(json.dumps(index))


def drop(chosen: Callable[[str], bool]) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if chosen(name)]:
            del tensors[name]

    return change


def shift(chosen: Callable[[str], bool], by: float) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in filter(chosen, tensors):
            tensors[name] = (tensors[name].float() + by).bfloat16()

    return change


def swap(tensors: dict[str, Tensor]) -> None:
    if FC in tensors:
        tensors[FC] = torch.cat(tensors[FC].chunk(2, dim=1)[::-1], dim=1).contiguous()


def is_mtp_norm(name: str) -> bool:
    return name.startswith("mtp.") and is_centred(name)


def is_decoder_norm(name: str) -> bool:
    return not name.startswith("mtp.") and is_centred(name)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The bundled checkpoint, to be damaged."""
    return Path(shutil.copytree(find_model("surefoot-demo"), tmp_path / "copy"))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny", MINI, random_tensors(MINI, seed=1), tokenizer=byte_tokenizer())


class TestHealthy:
    def test_nothing_is_wrong_with_the_bundled_checkpoint(self) -> None:
        report = look(find_model("surefoot-demo"), probe=True, depth=3)
        assert serious(report) == []
        assert report.sound
        assert report.mtp.state == "present"
        assert report.parameters is not None
        assert report.config is not None
        assert report.parameters.total + report.parameters.mtp == sum(of.elements for of in report.stored.values())
        probe = report.probe
        assert probe is not None
        rates = [share.rate for share in probe.acceptance]
        assert rates[0] > 0.5
        assert rates == sorted(rates, reverse=True)
        controls = {control.name: control.share.rate for control in probe.controls}
        assert controls[SWAPPED] < 0.05
        assert max(rate for name, rate in controls.items() if name.startswith("target")) < 0.1
        assert controls[PRE_NORM] <= rates[0]

    def test_what_a_token_reads_is_what_is_stored(self) -> None:
        """In bfloat16 every weight once, the embedding's table with the head."""
        report = look(find_model("surefoot-demo"))
        assert report.speed is not None
        assert report.parameters is not None
        per_weight = {"bfloat16": 2, "float32": 4}[report.speed.held]
        assert report.speed.step.weights == per_weight * report.parameters.total
        assert report.speed.slot.kv == 4096 * 5 * 2 * 2 * 64 * 4  # layers, keys and values, heads, width, float32

    @pytest.mark.parametrize("moe", [False, True])
    def test_every_style_is_read(self, tmp_path: Path, moe: bool) -> None:
        config = tiny_config(moe=moe)
        style = Style(prefix="multimodal", shard_bytes=20_000, experts="separate", squeezed=True)
        write_checkpoint(tmp_path, config, random_tensors(config, seed=1), style=style, tokenizer=byte_tokenizer())
        report = look(tmp_path)
        assert [code for code in serious(report) if code != "end-ids-none"] == ["end-of-turn"]
        assert report.parameters is not None
        assert (report.parameters.active < report.parameters.total) == moe


class TestHead:
    def test_a_missing_tensor_is_named(self, copy: Path) -> None:
        edit_tensors(copy, drop(lambda name: name == "mtp.layers.0.self_attn.k_norm.weight"))
        report = look(copy, probe=True)
        finding = found(report, "mtp-partial")
        assert finding.severity == "error"
        assert "mtp.layers.0.self_attn.k_norm.weight" in finding.sentence
        assert report.mtp.missing == ["mtp.layers.0.self_attn.k_norm.weight"]
        assert report.probe is not None  # of the target alone
        assert report.probe.acceptance == []

    def test_no_head_at_all(self, copy: Path) -> None:
        edit_tensors(copy, drop(lambda name: name.startswith("mtp.")))
        assert found(look(copy), "mtp-absent").severity == "warning"
        edit_json(copy / "config.json", mtp_num_hidden_layers=0)
        report = look(copy)
        assert found(report, "mtp-none").severity == "note"
        assert serious(report) == []

    def test_a_head_in_a_sidecar(self, copy: Path) -> None:
        head: dict[str, Tensor] = {}

        def move(tensors: dict[str, Tensor]) -> None:
            head.update({name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")})

        edit_tensors(copy, move)
        save_file(head, copy / "head.safetensors")
        report = look(copy)
        assert "head.safetensors" in found(report, "mtp-sidecar").sentence
        assert report.mtp.state == "present"
        assert report.mtp.sidecar
        assert serious(report) == []

    def test_a_head_where_nobody_looks(self, tiny: Path) -> None:
        (tiny / "mtp").mkdir()
        head = {name: tensor for name, tensor in load_file(tiny / SINGLE).items() if name.startswith("mtp.")}
        save_file(head, tiny / "mtp" / "head.safetensors")
        save_file({name.removeprefix("mtp."): part for name, part in head.items()}, tiny / "other.safetensors")
        report = look(tiny)
        assert "head.safetensors" in found(report, "mtp-elsewhere").sentence
        assert "other.safetensors" in found(report, "mtp-unnamed").sentence

    def test_swapped_halves(self, copy: Path) -> None:
        edit_tensors(copy, swap)
        report = look(copy, probe=True)
        assert found(report, "mtp-fc-swapped").severity == "error"
        assert not report.sound
        assert serious(report) == ["mtp-fc-swapped"]

    def test_a_head_of_other_weights(self, copy: Path) -> None:
        def scramble(tensors: dict[str, Tensor]) -> None:
            if FC in tensors:
                tensors[FC] = torch.randn(tensors[FC].shape, generator=torch.Generator().manual_seed(0)).bfloat16()

        edit_tensors(copy, scramble)
        assert found(look(copy, probe=True), "mtp-drafts-nothing").severity == "error"


class TestNorms:
    @pytest.mark.parametrize(
        ("chosen", "by", "named"),
        [
            (is_mtp_norm, 1, "all norms of the MTP head"),
            (is_mtp_norm, -1, "all norms of the MTP head"),
            (is_decoder_norm, 1, "model.layers.0.input_layernorm.weight"),
            (is_decoder_norm, -1, "model.layers.0.input_layernorm.weight"),
            (lambda name: name == "mtp.pre_fc_norm_hidden.weight", 1, "mtp.pre_fc_norm_hidden.weight"),
            (
                lambda name: name == "model.layers.5.linear_attn.norm.weight",
                1,
                "model.layers.5.linear_attn.norm.weight",
            ),
        ],
        ids=["head", "head, not shifted", "decoder", "decoder, not shifted", "one of the head", "one DeltaNet"],
    )
    def test_a_shift_is_found_by_what_it_does(
        self, copy: Path, chosen: Callable[[str], bool], by: int, named: str
    ) -> None:
        edit_tensors(copy, shift(chosen, by))
        report = look(copy, probe=True)
        finding = found(report, "norm-shifted-twice" if by == 1 else "norm-not-shifted")
        assert finding.severity == "error"
        assert named in finding.sentence
        assert ("subtract" if by == 1 else "add") in finding.advice.lower()
        assert serious(report) == [finding.code]

    @pytest.mark.parametrize("by", [1, -1])
    @pytest.mark.parametrize("chosen", [is_mtp_norm, is_decoder_norm])
    def test_means_alone_make_suspects(self, copy: Path, chosen: Callable[[str], bool], by: int) -> None:
        edit_tensors(copy, shift(chosen, by))
        finding = found(look(copy), "norm-shifted-twice" if by == 1 else "norm-not-shifted")
        assert finding.severity == "warning"

    def test_a_sharp_final_norm_is_a_warning(self, copy: Path) -> None:
        edit_tensors(copy, shift(lambda name: name == "model.norm.weight", 1))
        assert found(look(copy, probe=True), "norm-shifted-twice").severity == "warning"

    def test_a_norm_that_is_merely_unusual_is_cleared(self, copy: Path) -> None:
        """The same mean as a shifted one, but right: the layer behind it was trained with it."""
        scale = 2.6
        prefix = "model.layers.6."

        def grow(tensors: dict[str, Tensor]) -> None:
            for name in tensors:
                if name == prefix + "post_attention_layernorm.weight":
                    tensors[name] = ((1 + tensors[name].float()) * scale - 1).bfloat16()
                elif name in (prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"):
                    tensors[name] = (tensors[name].float() / scale).bfloat16()

        edit_tensors(copy, grow)
        assert found(look(copy), "norm-shifted-twice").severity == "warning"
        report = look(copy, probe=True)
        assert found(report, "norm-unusual").severity == "note"

    @given(st.lists(st.floats(-0.6, 0.45), min_size=1, max_size=20))
    def test_zero_centred_means_are_no_suspects(self, means: list[float]) -> None:
        norms = [Norm(f"model.layers.{i}.input_layernorm.weight", mean, 0.5, 0.0) for i, mean in enumerate(means)]
        assert suspects(norms) == [] or max(means) - min(means) > 0.6


class TestVocabularyAndEnds:
    def test_padding_rows_are_counted(self, copy: Path) -> None:
        def pad(tensors: dict[str, Tensor]) -> None:
            name = "model.embed_tokens.weight"
            if name in tensors:
                tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, 64))

        edit_tensors(copy, pad)
        edit_json(copy / "config.json", vocab_size=8256)
        report = look(copy, probe=True)
        assert "64 padding rows" in found(report, "vocabulary-padded").sentence
        assert report.vocabulary is not None
        assert report.vocabulary.padding == 64
        assert serious(report) == []

    def test_an_embedding_that_is_too_small(self, copy: Path) -> None:
        def cut(tensors: dict[str, Tensor]) -> None:
            name = "model.embed_tokens.weight"
            if name in tensors:
                tensors[name] = tensors[name][:8000].clone()

        edit_tensors(copy, cut)
        edit_json(copy / "config.json", vocab_size=8000)
        assert found(look(copy), "tokenizer-too-large").severity == "error"

    def test_end_ids_that_contradict_one_another(self, copy: Path) -> None:
        edit_json(copy / "config.json", eos_token_id=5)
        finding = found(look(copy), "end-ids-differ")
        assert finding.severity == "warning"
        assert "config.json: 5" in finding.sentence
        assert finding.advice

    def test_end_ids_of_which_one_place_has_all(self, copy: Path) -> None:
        report = look(copy)
        assert found(report, "end-ids-differ").severity == "note"
        assert report.end_ids["generation_config.json"] == [0, 2]

    def test_the_same_id_everywhere_is_no_finding(self, copy: Path) -> None:
        edit_json(copy / "generation_config.json", eos_token_id=0)
        codes = [finding.code for finding in look(copy).findings]
        assert codes == ["end-of-turn"]  # what the template ends turns with no longer ends an answer

    def test_ids_that_cannot_be(self, copy: Path) -> None:
        edit_json(copy / "generation_config.json", eos_token_id=9000)
        assert found(look(copy), "end-ids-outside").severity == "warning"
        edit_json(copy / "generation_config.json", eos_token_id="two")
        assert found(look(copy), "end-ids-unreadable").severity == "error"

    def test_a_template_that_fails(self, copy: Path) -> None:
        edit_json(copy / "tokenizer_config.json", chat_template="{{ raise_exception('no') }}")
        assert found(look(copy), "chat-template-broken").severity == "warning"


class TestFiles:
    def test_a_truncated_file(self, copy: Path) -> None:
        file = copy / "model-00002-of-00004.safetensors"
        raw = file.read_bytes()
        file.write_bytes(raw[:-1000])
        report = look(copy, probe=True)
        sentence = found(report, "file-truncated").sentence
        assert f"{len(raw):,}" in sentence
        assert f"{len(raw) - 1000:,}" in sentence
        assert serious(report) == ["file-truncated"]  # its header still tells what is in it
        assert report.probe is None
        assert report.config is not None

    def test_a_file_of_nothing(self, copy: Path) -> None:
        (copy / "model-00002-of-00004.safetensors").write_bytes(b"junk")
        assert serious(look(copy)) == ["file-damaged"]

    def test_a_missing_shard(self, copy: Path) -> None:
        (copy / "model-00003-of-00004.safetensors").unlink()
        report = look(copy)
        assert "model-00003-of-00004.safetensors" in found(report, "shard-missing").sentence
        assert serious(report) == ["shard-missing"]  # not every tensor of it once more
        assert report.mtp.state == "partial"

    def test_an_unknown_architecture(self, copy: Path) -> None:
        edit_json(copy / "config.json", model_type="llama")
        report = look(copy, probe=True)
        assert "llama" in found(report, "architecture-unknown").sentence
        assert report.architecture == "llama"
        assert report.end_ids
        assert report.stored["BF16"].tensors == 282

    def test_sizes_that_cannot_be(self, copy: Path) -> None:
        edit_json(copy / "config.json", head_dim=2**40, num_attention_heads=2**20, num_key_value_heads=2**20)
        report = look(copy)
        assert found(report, "sizes-impossible").severity == "note"
        assert found(report, "tensor-wrong").severity == "error"

    def test_a_refused_setting(self, copy: Path) -> None:
        edit_json(copy / "config.json", attn_output_gate=False)
        assert "attn_output_gate" in found(look(copy), "config-refused").sentence

    def test_a_missing_and_a_misshapen_tensor(self, copy: Path) -> None:
        name = "model.layers.0.linear_attn.A_log"
        edit_tensors(copy, drop(lambda one: one == name))
        edit_json(copy / "config.json", intermediate_size=700)
        report = look(copy)
        assert name in found(report, "tensor-missing").sentence
        assert "704" in found(report, "tensor-wrong").sentence

    def test_mlx_has_shifted_norms(self, copy: Path) -> None:
        for file in copy.glob("*.safetensors"):
            save_file(load_file(file), file, metadata={"format": "mlx"})
        report = look(copy, probe=True)
        assert found(report, "layout-mlx").severity == "error"
        assert report.norms.convention.startswith("shifted")

    @pytest.mark.parametrize("weights", ["squares", "rows", "tensors"])
    def test_weights_in_8_bits(self, tmp_path: Path, weights: Any) -> None:
        write_checkpoint(tmp_path, MINI, random_tensors(MINI, seed=1), style=Style(weights=weights))
        report = look(tmp_path)
        assert found(report, "fp8").severity == "note"
        assert report.quantisation is not None
        assert report.quantisation.startswith("FP8")
        assert report.mtp.quantised
        assert report.stored["F8_E4M3"].bytes == report.stored["F8_E4M3"].elements

    def test_without_anything(self, tmp_path: Path) -> None:
        report = look(tmp_path, probe=True)
        assert {"config-unreadable", "files-missing"} <= set(serious(report))

    @pytest.mark.slow
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_no_damage_is_an_exception(self, tiny: Path, data: st.DataObject) -> None:
        file = tiny / data.draw(st.sampled_from(["config.json", SINGLE, "tokenizer_config.json", "tokenizer.json"]))
        kept = file.read_bytes()
        raw = bytearray(kept)
        near = min(len(raw), 3000)
        for at in data.draw(st.lists(st.integers(0, near - 1), min_size=1, max_size=4)):
            raw[at] = data.draw(st.integers(0, 255))
        file.write_bytes(raw[: data.draw(st.integers(near // 2, len(raw)))])
        try:
            look(tiny)
        finally:
            file.write_bytes(kept)


class TestProbe:
    @torch.inference_mode()
    def test_a_chain_is_what_the_drafter_would_run(self) -> None:
        """Its states do not depend on the chains beside it, nor on those that used the lane before."""
        tensors = random_tensors(MINI, seed=3)
        head = MTPHead(Decoder(MINI, tensors, max_len=64), tensors)
        tokens = [7 * i % 256 for i in range(40)]
        hidden = torch.randn(40, MINI.hidden_size, generator=torch.Generator().manual_seed(0))
        chained = chain(head, hidden, tokens, depth=3)
        assert [len(states) for states in chained] == [39, 37, 37]
        for begin in (0, 5, 17, 36):
            lane = head.build_lane(1)
            own = head.prefill(hidden[: begin + 1], tokens[1 : begin + 2], lane, 0, 0)[-1:]
            for step in (1, 2):
                at = begin + step
                own = head.prefill(own, tokens[at + 1 : at + 2], lane, 0, at)
                torch.testing.assert_close(chained[step][begin], own[0], atol=1e-4, rtol=1e-4)

    def test_a_control_wins_beyond_chance_only(self) -> None:
        share = Share(50, 1000)
        assert Control("", share, 40, 10).wins
        assert not Control("", share, 40, 30).wins
        assert not Control("", share, 12, 0).wins  # surely better, by hardly anything

    def test_a_text_of_ones_own(self, copy: Path) -> None:
        report = look(copy, probe=True, text="def add(a, b):\n    return a + b\n" * 20, tokens=100)
        assert report.probe is not None
        assert report.probe.tokens == 100
        with pytest.raises(InputError, match="text"):
            look(copy, probe=True, text="a")

    @pytest.mark.parametrize("wrong", [{"depth": 0}, {"tokens": 1}])
    def test_settings_are_checked(self, wrong: dict[str, int]) -> None:
        with pytest.raises(InputError):
            Settings(**wrong)  # type: ignore[arg-type]

    def test_numbers_that_are_none(self, copy: Path) -> None:
        edit_tensors(copy, shift(lambda name: name == "model.layers.2.mlp.down_proj.weight", float("nan")))
        report = look(copy, probe=True)
        assert serious(report) == ["not-finite"]
        json.dumps(report.as_json(), allow_nan=False)

    def test_random_weights_are_said_not_to_read(self, tiny: Path) -> None:
        report = look(tiny, probe=True)
        assert found(report, "text-not-read").severity == "warning"
        assert "norm-shifted-twice" not in serious(report)


class TestCommand:
    def call(self, *arguments: object) -> Any:
        return CliRunner().invoke(app, ["doctor", *map(str, arguments)])

    def test_prints_text_and_exits_with_0(self) -> None:
        result = self.call("surefoot-demo", "--no-probe")
        assert result.exit_code == 0, result.output
        for word in ("qwen3_5_text", "15 DeltaNet, 5 attention", "tokens/s at batch 1", "nothing is wrong"):
            assert word in result.stdout

    def test_json_and_exit_code_1(self, copy: Path) -> None:
        edit_tensors(copy, swap)
        result = self.call(copy, "--json", "-n", 256, "-k", 2)
        assert result.exit_code == 1, result.output
        told = json.loads(result.stdout)
        assert not told["sound"]
        assert told["findings"][0]["code"] == "mtp-fc-swapped"
        assert told["probe"]["controls"][SWAPPED] > told["probe"]["acceptance"][0]

    def test_what_cannot_be_read_at_all_exits_with_2(self, tmp_path: Path) -> None:
        for arguments in ([tmp_path / "none"], ["surefoot-demo", "--dtype", "int8"], [], ["surefoot-demo", "-k", 0]):
            assert self.call(*arguments).exit_code == 2

    def test_every_warning_says_what_to_do(self, copy: Path) -> None:
        edit_json(copy / "config.json", eos_token_id=5, model_type="llama")
        edit_tensors(copy, drop(lambda name: name.startswith("mtp.layers") or "layers.3." in name))
        findings = look(copy).findings
        assert [f.severity for f in findings] == sorted((f.severity for f in findings), key=SEVERITIES.index)
        assert all(finding.advice for finding in findings if finding.severity != "note")


@pytest.mark.parametrize(("kind", "bits"), [("BF16", 16), ("F8_E4M3", 8), ("F32", 32), ("I64", 64), ("BOOL", 8)])
def test_bits_of_types(kind: str, bits: int) -> None:
    assert bits_of(kind) == bits
