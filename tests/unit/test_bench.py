"""`surefoot bench`: what a step must move, what is refused, and that a run that is not lossless gives no number.

One long file: the parts of the benchmark are tried on the same small models and settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from surefoot.bench.cost import Ceiling, StepBytes, step_bytes
from surefoot.bench.lossless import NotLosslessError, check_outputs
from surefoot.bench.measure import LIBRARY, Batch, Sample, make_row, measure
from surefoot.bench.prompts import held_out, kinds, random_prompts, text_prompts
from surefoot.bench.settings import PLAIN, Method, Settings
from surefoot.cli.main import app
from surefoot.drafters.mtp import MTPDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.engine.engine import Engine
from surefoot.engine.loaded import LoadedModel
from surefoot.engine.stats import Seconds, Stats
from surefoot.engine.target import DecoderTarget
from surefoot.errors import InputError
from surefoot.loading.shapes import SHAPES
from surefoot.loading.tiny import byte_tokenizer, tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors
from surefoot.prove.table import TableTarget, hashed_rows
from surefoot.sampling import SamplingParams
from surefoot.types import Scores, Window
from tests.fakes import keep_drafts_unseen

CONFIG = tiny_config(layer_types=("linear_attention", "full_attention"))
SMALL = ("--context", 9, "--tokens", 6, "--rounds", 2, "--prompts", 2, "--depths", "1,2", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_checkpoint(folder, CONFIG, random_tensors(CONFIG, seed=1), tokenizer=byte_tokenizer())


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.bench.cost.READ_BYTES", {"cpu": 2**20})


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


class TestCost:
    @pytest.mark.parametrize(
        "size, ms, draft",
        [("0.8b", 0.33, 35), ("2b", 0.81, 30), ("4b", 1.82, 18), ("9b", 3.41, 16), ("27b", 11.0, 7),
         ("35b-a3b", 1.29, 19)],
    )  # fmt: skip
    def test_the_floor_of_the_published_shapes(self, size: str, ms: float, draft: int) -> None:
        step = step_bytes(SHAPES[f"qwen3.5-{size}"], 1024, 1, torch.bfloat16)
        ceiling = Ceiling.of(step, 4.70e12, 1)
        assert ceiling.step_ms == pytest.approx(ms, abs=0.005 if ms < 10 else 0.05)
        assert ceiling.tokens_per_second == pytest.approx(1000 / ceiling.step_ms)
        assert round(100 * step.draft_share) == draft

    def test_weights_alone(self) -> None:
        sizes = [step_bytes(SHAPES[f"qwen3.5-{n}"], 0, 1, torch.bfloat16).weights / 2e9 for n in ("0.8b", "2b", "4b")]
        assert [round(size, 3) for size in sizes] == [0.752, 1.882, 4.206]

    def test_windows_of_experts_read_more(self) -> None:
        base = step_bytes(SHAPES["qwen3.5-35b-a3b"], 1024, 1, torch.bfloat16).total
        ratios = [
            step_bytes(SHAPES["qwen3.5-35b-a3b"], 1024, 1, torch.bfloat16, window=n).total / base for n in (2, 4, 8)
        ]
        assert ratios == pytest.approx([1.32, 1.94, 3.06], abs=0.02)

    def test_a_head_of_another_type(self) -> None:
        config = SHAPES["qwen3.5-9b"]
        narrow, mixed, wide = (
            step_bytes(config, 100, 1, dtype, head_dtype=head, kv_dtype=torch.bfloat16)
            for dtype, head in (
                (torch.float8_e4m3fn, None), (torch.float8_e4m3fn, torch.bfloat16), (torch.bfloat16, None)
            )
        )  # fmt: skip
        head = config.vocab_size * config.hidden_size
        assert mixed.weights - narrow.weights == mixed.draft - narrow.draft == head
        assert wide.weights == 2 * narrow.weights
        assert wide.kv == narrow.kv

    def test_a_batch_shares_the_weights_alone(self) -> None:
        one, four = (step_bytes(CONFIG, 100, batch, torch.float32) for batch in (1, 4))
        assert four == StepBytes(one.weights, 4 * one.state, 4 * one.kv, four.draft)
        assert four.draft - one.draft == 3 * one.kv  # one attention layer, as the head has
        assert step_bytes(replace(CONFIG, mtp_layers=0), 100, 1, torch.float32).draft == 0


class TestPrompts:
    def test_texts_are_as_long_as_asked_and_differ(self) -> None:
        backend = byte_tokenizer()
        tokenizer: Any = type("Bytes", (), {"encode": lambda self, text: backend.encode(text).ids})()
        prompts = text_prompts(tokenizer, 2 * len(held_out()) + 1, 300)
        assert {len(prompt) for prompt in prompts} == {300}
        assert len({tuple(prompt) for prompt in prompts}) == len(prompts)

    def test_built_in_kinds_are_a_few_different_short_prompts_each(self) -> None:
        prompts = kinds()
        assert list(prompts) == ["chat", "code", "edit", "summary", "extraction", "mathematics", "creative"]
        assert all(len(texts) >= 3 for texts in prompts.values())
        every = [text for texts in prompts.values() for text in texts]
        assert len(set(every)) == len(every)
        assert all(20 < len(text) < 1000 for text in every)

    def test_random_tokens_are_the_same_again(self) -> None:
        assert random_prompts(50, 3, 7) == random_prompts(50, 3, 7)
        assert len({tuple(prompt) for prompt in random_prompts(50, 3, 7)}) == 3


def sample(seconds: float, tokens: int = 4) -> Sample:
    stats = Stats(steps=2, tokens=tokens, proposed_by_position=[2], accepted_by_position=[1])
    return Sample([[1] * tokens], tokens, 2, Seconds(decode_s=seconds, verify_s=seconds / 2), [stats])


class TestRows:
    def test_a_row_says_what_the_samples_say(self) -> None:
        samples = {
            name: [sample(busy * seconds) for busy in (1, 30, 1)]
            for name, seconds in ((PLAIN, 2.0), (LIBRARY, 8.0), ("MTP, K = 1", 1.0))
        }
        row = make_row("MTP, K = 1", Method("mtp", 1), samples)
        assert (row.tokens_per_second.median, row.to_plain, row.to_library) == pytest.approx((4, 2, 8))
        assert (row.tokens_per_second.least, row.tokens_per_second.most) == pytest.approx((4 / 30, 4))
        assert row.step_ms == pytest.approx(500)
        assert (row.tokens_per_step, row.kept_by_position, row.seconds["verify_s"]) == (2.0, [0.5], 0.5)
        assert make_row(PLAIN, None, {PLAIN: samples[PLAIN]}).to_library is None

    def test_every_round_is_checked(self) -> None:
        rounds = iter([[[1, 2]], [[1, 3]]])

        def same(batch: Batch) -> Sample:
            return Sample([[1, 2]], 2, 1, Seconds())

        def changing(batch: Batch) -> Sample:
            return Sample(next(rounds), 2, 1, Seconds())

        def other(batch: Batch) -> Sample:
            return Sample([[7]], 1, 1, Seconds())

        with pytest.raises(NotLosslessError, match="x, prompt 0: token 1"):
            measure({PLAIN: same, "x": changing}, [[[5]]], 2)
        assert len(measure({PLAIN: same, "x": other}, [[[5]]], 2, free=["x"])["x"]) == 2

    def test_batches_come_one_after_the_other_and_are_joined(self) -> None:
        calls: list[tuple[str, int]] = []

        def action(name: str, batch: Batch) -> Sample:
            calls.append((name, batch[0][0]))
            return Sample([list(batch[0])], 1, 1, Seconds(decode_s=2.0), [Stats(steps=1)])

        samples = measure({name: partial(action, name) for name in (PLAIN, "x")}, [[[5]], [[6]]], 2)
        assert calls == [(name, token) for token in (5, 6) for _ in range(2) for name in (PLAIN, "x")]
        assert [sample.outputs for sample in samples["x"]] == [[[5], [6]]] * 2
        last = samples["x"][1]
        assert (last.counted, last.steps, last.seconds.decode_s, len(last.stats)) == (2, 2, 4.0, 2)


def test_all_that_differs_is_named() -> None:
    check_outputs({PLAIN: [[1, 2]], "a": [[1, 2]]})
    with pytest.raises(NotLosslessError, match=r"a, prompt 1: token 0; b, prompt 0: token 1"):
        check_outputs({PLAIN: [[1, 2], [3]], "a": [[1, 2], [4]], "b": [[1], [3]]})


def test_settings_spell_their_command() -> None:
    settings = Settings(shape="qwen3.5-0.8b", depths=(1, 2), rounds=5)
    assert settings.command == "surefoot bench --shape qwen3.5-0.8b --depths 1,2 --rounds 5"
    assert [method.name for method in settings.methods(with_head=False)] == [PLAIN, "n-gram, K = 1", "n-gram, K = 2"]


def test_by_default_the_head_drafts_at_every_depth_and_copies_at_one() -> None:
    settings = Settings(shape="qwen3.5-0.8b")
    names = [method.name for method in settings.methods(with_head=True)]
    assert names == [PLAIN, "n-gram, K = 4", *(f"MTP, K = {k}" for k in range(1, 7)), "MTP + n-gram, K = 4"]
    assert settings.resolved(settings.methods(True))["depths"] == [1, 2, 3, 4, 5, 6]
    assert (settings.batches, Settings(model="x").batches) == (1, 3)


class TestRun:
    def test_every_figure_is_saved(self, model: Path, tmp_path: Path) -> None:
        saved, drawn = tmp_path / "x.json", tmp_path / "x.svg"
        result = call("-m", model, *SMALL, "--json", saved, "--plot", drawn, "--batch", 2)
        assert result.exit_code == 0, result.stderr
        assert "lossless: 7 ways to decode" in result.stdout
        assert "× plain" in result.stdout
        text = saved.read_text()
        assert str(model.parent) not in text
        assert "<svg" in drawn.read_text()
        report = json.loads(text)
        lossless = report["lossless"]
        assert lossless["identical"] is True
        assert (lossless["prompts"], lossless["tokens"], lossless["window_sizes"]) == (4, 6, list(range(2, 9)))
        assert report["model"] == model.name
        assert report["config"]["drafters"] == ["none", "ngram", "mtp", "mtp+ngram"]
        assert {"Python", "torch", "surefoot"} <= set(report["machine"]["versions"])
        assert set(report["passes"]) == {*(f"verify {n}" for n in range(1, 9)), "draft"}
        assert len(report["machine"]["load"]) == 2
        step = report["step_bytes"]
        assert step["total"] == step["weights"] + step["state"] + step["kv"]
        assert report["ceiling"]["bandwidth"] > 0
        assert [row["name"] for row in report["rows"]][:3] == [PLAIN, "n-gram, K = 1", "n-gram, K = 2"]
        for row in report["rows"]:
            speed = row["tokens_per_second"]
            assert 0 < speed["least"] <= speed["median"] <= speed["most"]
            assert 0 < row["seconds"]["verify_s"] < row["seconds"]["decode_s"]

    def test_a_draft_vocabulary(self, model: Path, tmp_path: Path) -> None:
        saved, ids = tmp_path / "x.json", tmp_path / "ids.json"
        ids.write_text("[5, 6, 7]")
        reports = []
        for wanted in (2, ids):
            result = call("-m", model, *SMALL, "--draft-vocab", wanted, "--json", saved)
            assert result.exit_code == 0, result.stderr
            reports.append(json.loads(saved.read_text()))
        assert [report["config"]["draft_vocab"] for report in reports] == [2, "ids.json"]
        assert "draft vocabulary: ids 0 to 1" in reports[0]["notes"][0]
        assert str(tmp_path) not in json.dumps(reports)
        assert "--draft-vocab 2" in reports[0]["machine"]["command"]
        assert reports[0]["step_bytes"]["draft"] < reports[1]["step_bytes"]["draft"]

    def test_cells_share_weights_and_have_a_report_each(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loads: list[int] = []
        load = LoadedModel.from_checkpoint

        def counted(*arguments: Any, **options: Any) -> LoadedModel:
            loads.append(options["max_len"])
            return load(*arguments, **options)

        monkeypatch.setattr(LoadedModel, "from_checkpoint", counted)
        saved = tmp_path / "x.json"
        result = call("-m", model, *SMALL, "--context", "9,20", "--batch", "1,2", "-d", "ngram", "--json", saved)
        assert result.exit_code == 0, result.stderr
        assert loads == [20 + 128]
        reports = json.loads(saved.read_text())
        cells = [(report["config"]["context"], report["config"]["batch"]) for report in reports]
        assert cells == [(9, 1), (9, 2), (20, 1), (20, 2)]
        for report in reports:
            batch, context = report["config"]["batch"], report["config"]["context"]
            assert report["lossless"]["prompts"] == 2 * batch
            assert report["config"]["max_len"] == context + 128
            assert f"--context {context}" in report["machine"]["command"]
            assert report["memory"]["kv"] == batch * reports[0]["memory"]["kv"] * (context + 128) // 137
        assert "of the ceiling" in result.stdout  # the summary
        assert result.stdout.count("lossless: 3 ways") == 4

    def test_start_up_memory_and_stages_are_told(self, model: Path, tmp_path: Path) -> None:
        saved = tmp_path / "x.json"
        result = call("-m", model, *SMALL, "-d", "mtp", "--json", saved)
        assert result.exit_code == 0, result.stderr
        assert "start to first token" in result.stdout
        assert "keys and values" in result.stdout
        report = json.loads(saved.read_text())
        start, memory = report["start_up"], report["memory"]
        assert start["recording_s"] == {}  # nothing is recorded on a CPU
        assert start["total_s"] == pytest.approx(start["loading_s"] + start["first_token_s"])
        assert memory["graphs"] == 0
        assert memory["total"] == sum(size for name, size in memory.items() if name != "total")
        assert next(iter(report["seconds"])) == "loading"
        assert "measuring" in report["seconds"]

    def test_a_method_takes_only_so_long(self, model: Path, tmp_path: Path) -> None:
        saved = tmp_path / "x.json"
        result = call("-m", model, *SMALL, "-d", "ngram", "--seconds", "1e-9", "--json", saved)
        assert result.exit_code == 0, result.stderr
        assert "1 rounds in place of 2" in result.stdout
        assert json.loads(saved.read_text())["config"]["rounds"] == 1

    def test_acceptance_can_be_set(self, model: Path, tmp_path: Path) -> None:
        saved = tmp_path / "x.json"
        result = call("-m", model, *SMALL, "-d", "ngram,mtp", "--synthetic-acceptance", "1,.5", "--json", saved)
        assert result.exit_code == 0, result.stderr
        assert "acceptance set to 1 0.5: the MTP head drafts" in result.stdout
        assert "MTP, K = 2, set" in result.stdout
        report = json.loads(saved.read_text())
        assert report["config"]["synthetic_acceptance"] == [1.0, 0.5]
        rows = {row["name"]: row for row in report["rows"]}
        assert [name for name, row in rows.items() if row["acceptance_set"]] == ["MTP, K = 1", "MTP, K = 2"]
        assert rows["MTP, K = 1"]["tokens_per_step"] == 2
        assert rows["MTP, K = 1"]["kept_by_position"] == [1.0]

    def test_against_transformers(self, model: Path, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        saved = tmp_path / "x.json"
        result = call("-m", model, *SMALL, "-d", "mtp", "--against", "transformers", "--json", saved)
        assert result.exit_code == 0, result.stderr
        report = json.loads(saved.read_text())
        assert report["rows"][0]["name"] == LIBRARY
        assert report["library_equal"] == 2
        assert all(row["to_library"] > 0 for row in report["rows"])

    @pytest.mark.parametrize("moe", [False, True])
    def test_random_weights_of_a_shape(self, moe: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setitem(SHAPES, "small", tiny_config(moe))
        saved = tmp_path / "x.json"
        result = call("--shape", "small", *SMALL, "--against", "transformers", "--json", saved)
        assert result.exit_code == 0, result.stderr
        assert "random weights" in result.stdout
        report = json.loads(saved.read_text())
        assert report["random_weights"] is True
        assert report["library_equal"] == 2


def refused(result: Result, code: int, saved: Path) -> str:
    assert (result.exit_code, result.stdout) == (code, "")
    assert not saved.exists()
    (line,) = result.stderr.splitlines()
    return line


class TestNotLossless:
    def test_a_target_whose_windows_differ(self, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        honest = DecoderTarget.verify

        def verify(self: DecoderTarget, windows: Seq[Window]) -> list[Scores]:
            scores = honest(self, windows)
            for score in scores:  # one bit, which changes no token
                score.logits[2:3] = score.logits[2:3].nextafter(torch.tensor(torch.inf))
            return scores

        monkeypatch.setattr(DecoderTarget, "verify", verify)
        saved = tmp_path / "x.json"
        line = refused(call("-m", model, *SMALL, "--json", saved), 1, saved)
        assert "logits of a window of 3" in line

    def test_a_drafter_whose_tokens_are_kept_unseen(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        keep_drafts_unseen(monkeypatch)
        saved = tmp_path / "x.json"
        line = refused(call("-m", model, *SMALL, "--json", saved), 1, saved)
        assert "MTP, K = 1, prompt 0: token" in line


class TestBadInput:
    @pytest.mark.parametrize(
        "arguments, named",
        [
            (("--shape", "qwen3.5-9b"), "model"),
            (("--dtype", "int8"), "dtype"),
            (("--device", "toaster"), "device"),
            (("--weights", "fp8"), "weights"),
            (("--rounds", "0"), "rounds"),
            (("--tokens", "1"), "tokens"),
            (("--context", "600"), "context"),
            (("--context", "9,600"), "context"),
            (("--context", ","), "--context"),
            (("--batch", "1,x"), "--batch"),
            (("--batch", "1,2", "--plot", "x.png"), "--plot"),
            (("--seconds", "0"), "seconds"),
            (("--drafters", "magic"), "drafters"),
            (("--depths", "1,x"), "--depths"),
            (("--depths", "0"), "draft_length"),
            (("--against", "all"), "against"),
            (("--draft-vocab", "0"), "draft_vocab"),
            (("--draft-vocab", "nowhere.json"), "nowhere.json"),
            (("--draft-vocab", "5", "--drafters", "ngram"), "draft_vocab"),
            (("--synthetic-acceptance", ".5,.6"), "synthetic_acceptance"),
            (("--synthetic-acceptance", ".5", "--drafters", "ngram"), "synthetic_acceptance"),
            (("--json", "/nowhere/x.json"), "--json"),
        ],
    )
    def test_options(self, model: Path, tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
        assert named in refused(call("-m", model, *SMALL, *arguments), 2, tmp_path / "none")

    def test_a_shape_that_is_none(self, tmp_path: Path) -> None:
        assert "qwen3.5-9b" in refused(call("--shape", "gpt"), 2, tmp_path / "none")

    def test_extras_are_named(self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        saved = tmp_path / "x.png"
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert "surefoot[plot]" in refused(call("-m", model, *SMALL, "--plot", saved), 2, saved)
        monkeypatch.setitem(sys.modules, "transformers", None)
        line = refused(call("-m", model, *SMALL, "--against", "transformers"), 2, saved)
        assert "surefoot[transformers]" in line


class TestOneModelManyEngines:
    def test_sizes_are_checked(self) -> None:
        with pytest.raises(InputError, match="max_len: expected an integer of at least 1, found 0"):
            LoadedModel.from_tensors(CONFIG, random_tensors(CONFIG, 1), 0)
        loaded = LoadedModel.from_tensors(CONFIG, random_tensors(CONFIG, 1), 40)
        for slots in (0, -1, "2", 1.5, True):
            with pytest.raises(InputError, match="slots: expected an integer"):
                Engine.over(loaded, drafter="none", draft_length=0, slots=slots)  # type: ignore[arg-type]  # the point

    def test_weights_and_caches_are_shared(self) -> None:
        loaded = LoadedModel.from_tensors(CONFIG, random_tensors(CONFIG, 1), 40)
        plain, mtp, deeper = (
            Engine.over(loaded, drafter=name, draft_length=depth)
            for name, depth in (("none", 0), ("mtp", 1), ("mtp", 3))
        )
        assert plain.target is mtp.target is deeper.target
        assert mtp.drafter is deeper.drafter
        assert isinstance(mtp.drafter, MTPDrafter)
        params = SamplingParams(max_new_tokens=12)
        expected = plain.generate([5, 6, 7], params).token_ids
        for engine in (mtp, deeper, plain, mtp):
            assert engine.generate([5, 6, 7], params).token_ids == expected

    def test_caches_can_be_dropped_for_shorter_ones(self) -> None:
        loaded = LoadedModel.from_tensors(CONFIG, random_tensors(CONFIG, 1), 40)
        long = Engine.over(loaded, drafter="mtp")
        expected = long.generate([5, 6, 7], SamplingParams(max_new_tokens=12)).token_ids
        loaded.clear(20)
        short = Engine.over(loaded, drafter="mtp")
        assert (long.target.max_len, short.target.max_len) == (40, 20)
        assert short.target is not long.target
        assert short.memory().kv == long.memory().kv // 2
        assert short.memory().weights == long.memory().weights
        assert short.generate([5, 6, 7], SamplingParams(max_new_tokens=12)).token_ids == expected
        loaded.clear(100)
        assert Engine.over(loaded, drafter="none", draft_length=0).target.max_len == 40
        with pytest.raises(InputError, match="max_len"):
            loaded.clear(0)

    def test_memory_is_that_of_the_tensors(self) -> None:
        tensors = random_tensors(CONFIG, 1)
        stored = sum(tensor.nbytes for tensor in tensors.values())
        loaded = LoadedModel.from_tensors(CONFIG, tensors, 40)
        plain = Engine.over(loaded, drafter="none", draft_length=0).memory()
        target = loaded.target(1)
        kv, recurrent = (
            sum(layer.bytes_per_slot for layer in target.cache.layers if hasattr(layer, "conv_past") == own)
            for own in (False, True)
        )
        assert (plain.kv, plain.recurrent, plain.graphs) == (kv, recurrent, 0)
        drafting = Engine.over(loaded, drafter="mtp").memory()
        assert drafting.kv == 2 * kv  # the head's lane is as long
        assert drafting.weights > plain.weights  # the head's own
        assert stored <= drafting.weights < 2.2 * stored  # packed, with the head beside the embedding
        assert drafting.total == sum((drafting.weights, drafting.kv, drafting.recurrent, drafting.work))
        with pytest.raises(InputError, match="memory: expected a checkpoint's target, found TableTarget"):
            Engine(TableTarget(hashed_rows(5), 5), NoDrafter(), 0).memory()

    def test_a_draft_model_has_to_be_built_first(self) -> None:
        loaded = LoadedModel.from_tensors(CONFIG, random_tensors(CONFIG, 1), 40)
        with pytest.raises(InputError, match="drafter: expected one of none"):
            Engine.over(loaded, drafter="draft-model")
