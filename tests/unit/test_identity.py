"""The identity battery: it passes where tokens are plain decoding's, and fails where one drafter's are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import identity
from surefoot.bench.run import load_model
from surefoot.bench.settings import Settings
from surefoot.loading.tiny import byte_tokenizer, tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors
from tests.fakes import keep_drafts_unseen

CONFIG = tiny_config(layer_types=("linear_attention", "full_attention"))
OPTIONS = ("--prompts", 5, "--context", 20, "--tokens", 6, "--depths", 1, 3, "--batches", 1, 4, "--dtypes", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_checkpoint(folder, CONFIG, random_tensors(CONFIG, seed=1), tokenizer=byte_tokenizer())


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["identity.py", *map(str, arguments)])
    identity.main()


def test_all_are_counted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "x.json"
    call(monkeypatch, "--model", model, *OPTIONS, "--json", saved)
    report = json.loads(saved.read_text())
    assert report["identical"] == report["outputs"] == 5 * 2 * 2 * 7
    ways = [(count["batch"], count["sampling"], count["drafter"], count["depth"]) for count in report["counts"]]
    assert len(set(ways)) == len(ways) == 28
    assert all(count["kept"] == 0 for count in report["counts"] if count["drafter"] == "none")
    assert sum(count["kept"] for count in report["counts"]) > 0
    assert "140 of 140 outputs identical" in capsys.readouterr().out


def test_a_draft_that_is_kept_unseen_is_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_drafts_unseen(monkeypatch)
    saved = tmp_path / "x.json"
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, "--model", model, *OPTIONS, "--drafters", "none", "mtp", "--json", saved)
    assert end.value.code == 1
    report = json.loads(saved.read_text())
    assert report["identical"] < report["outputs"]
    assert all((count["differing"] == []) == (count["drafter"] == "none") for count in report["counts"])
    assert "not prompts" in capsys.readouterr().out


def test_prompts_differ_in_length_and_text(model: Path) -> None:
    settings = Settings(model=str(model), context=40, dtype="float32")
    prompts = identity.make_prompts(load_model(settings, lambda done, total: None), 64, 40)
    assert {len(prompt) for prompt in prompts} <= set(range(20, 41))
    assert len({tuple(prompt) for prompt in prompts}) == 64


def test_bad_input_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, "--model", model, "--depths", 99)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: draft_length")
