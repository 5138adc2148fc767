"""`surefoot tune`: what it measures, what it foretells, and what it leaves for `auto`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefoot.bench.prompts import YOURS, read_prompts
from surefoot.bench.settings import Method
from surefoot.bench.tune import _foretold_s, some_kinds
from surefoot.cli.main import app
from surefoot.engine.profile import load_profile
from surefoot.engine.stats import Stats
from surefoot.errors import InputError
from tests.unit.test_auto import costs


def call(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["tune", *map(str, words)])
    return result.exit_code, result.stdout, result.stderr


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    saved, picture = tmp_path / "x.json", tmp_path / "x.svg"
    code, out, err = call("--kinds", "code", "-k", "2", "-n", "12", "--rounds", "1", "--max-len", "512",
                          "--json", saved, "--plot", picture)  # fmt: skip
    assert code == 0, err
    assert "lossless" in out
    data = json.loads(saved.read_text())
    assert [cell["name"] for cell in data["cells"]] == [
        "plain", "n-gram, K = 4", "n-gram, K = 8", "MTP, K = 2", "auto, K = 8",
    ]  # fmt: skip
    plain, *others = data["cells"]
    assert plain["to_plain"] == 1
    assert plain["foretold"] == pytest.approx(1)
    assert all(cell["kind"] == "code" and cell["foretold"] > 0 for cell in others)
    assert str(tmp_path) not in saved.read_text()
    assert picture.read_text().lstrip().startswith("<?xml")
    (file,) = (tmp_path / ".cache" / "surefoot").iterdir()
    profile = load_profile(file)
    assert profile is not None
    assert "mtp" in profile.priors
    assert profile.costs.batches == (1,)


def test_the_model_counts_every_step_by_what_it_drafted() -> None:
    """Four steps: none drafted, one token, and twice two."""
    stats = Stats(steps=4, tokens=7, proposed_by_position=[3, 2], accepted_by_position=[2, 1])
    rows, drafted = 1 + 1.05 + 2 * 1.1, 0.1 + 2 * 0.2
    assert _foretold_s(stats, Method("ngram", 2), costs(), 0) == pytest.approx(rows)
    assert _foretold_s(stats, Method("mtp", 2), costs(), 0) == pytest.approx(rows + drafted)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('plain words\n\n{"text": "a", "kind": "b"}\n{"text": "c"}\n')
    assert read_prompts(file) == {YOURS: ["plain words", "c"], "b": ["a"]}


@pytest.mark.parametrize(
    "text, words", [("", "at least one"), ("{", "JSON"), ('{"kind": "x"}', "JSON"), ('{"text": 3}', "text")]
)
def test_prompts_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        read_prompts(file)


def test_kinds() -> None:
    assert list(some_kinds(["edit", "code"])) == ["edit", "code"]
    assert len(some_kinds([])) == 7


@pytest.mark.parametrize(
    "words, said",
    [
        (("--kinds", "poems"), "--kinds: expected some of chat"),
        (("--kinds", "chat", "--prompts", "x"), "--kinds: expected without --prompts"),
        (("--prompts", "nowhere"), "expected a readable text"),
        (("--depths", "0"), "draft_length"),
        (("--tokens", "1"), "tokens"),
        (("--rounds", "0"), "rounds"),
        (("--json", "nowhere/x.json"), "--json"),
        (("--model", "nowhere"), "nowhere"),
    ],
)
def test_bad_input(words: tuple[str, ...], said: str) -> None:
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert said in err
