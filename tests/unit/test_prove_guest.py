"""`surefoot prove` of models that `transformers` runs: the same sections, and the same faults noticed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from surefoot.adapters import TransformersTarget
from surefoot.errors import CheckpointError, InputError
from surefoot.loading.tiny import byte_tokenizer, tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors
from surefoot.prove.report import Report
from surefoot.prove.run import PARTS, prove
from surefoot.prove.settings import Settings
from surefoot.prove.show import renderables, write_page
from surefoot.prove.source import Source, find_source
from tests.fakes import keep_drafts_unseen
from tests.unit.test_adapters import tiny

pytest.importorskip("transformers")
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and a byte tokenizer, as the library saves it."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = byte_tokenizer()
    llama = tiny("Llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=128)
    with torch.no_grad():
        llama.lm_head.weight.mul_(4)  # so that some tokens are likely
        for layer in llama.model.layers:  # and a text goes round in circles, which can be copied
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
    llama.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def report(model: Path, *parts: str, **more: Any) -> Report:
    return prove(Settings(model=model, quick=True, tokens=8, samples=60, **more), parts=parts or tuple(PARTS))


def test_every_section_holds(model: Path) -> None:
    found = report(model, "identity", "samples", "caches", "parity")  # "law" is the same for every model
    assert found.passed, found.failures
    assert found.config["drafters"] == ["ngram", "suffix"]
    identity, samples, caches, reference = found.sections
    assert {"greedy, n-gram, K = 3", "sampled, suffix, K = 3"} < {check.name for check in identity.checks}
    assert [check.name for check in samples.checks] == [
        "plain, coupled", "n-gram, K = 3", "suffix, K = 3", "control: another temperature"
    ]  # fmt: skip
    assert {f"{n} of 3 drafts accepted" for n in range(4)} < {check.name for check in caches.checks}
    assert caches.notes[-1].startswith("not applicable: putting back what was kept")
    assert reference.title == "library reference"
    assert reference.notes[-1].startswith("not applicable: the textbook")
    assert "LlamaForCausalLM, run by transformers" in found.notes[0]


def test_the_half_precisions(model: Path) -> None:
    found = report(model, "identity", "caches", "parity", dtype="bfloat16")
    assert found.passed, found.failures


def test_what_does_not_apply_is_said(model: Path, tmp_path: Path) -> None:
    found = report(model, "caches", "parity")
    write_page(found, tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8").count("not applicable: ") == 2
    console = Console(file=io.StringIO(), width=200)
    for part in renderables(found):
        console.print(part)
    assert console.file.getvalue().count("note: not applicable: ") == 2  # type: ignore[attr-defined]  # a StringIO


def crop_to(change: Callable[[int, int], int]) -> Callable[[Patch], None]:
    """Keeps another number of a window's tokens than was asked for."""

    def sabotage(patch: Patch) -> None:
        own = TransformersTarget.commit
        patch.setattr(
            TransformersTarget, "commit", lambda self, slot, keep: own(self, slot, change(keep, self._read[slot][0]))
        )

    return sabotage


def positions_of_the_window(patch: Patch) -> None:
    """Every window is read one position late."""
    own = TransformersTarget._forward

    def late(self: TransformersTarget, slot: int, tokens: Any, positions: Any, window: bool) -> torch.Tensor:
        return own(self, slot, tokens, [place + window for place in positions], window)

    patch.setattr(TransformersTarget, "_forward", late)


FAULTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "one fewer": (crop_to(lambda keep, window: max(1, keep - 1)), "caches"),
    "one more": (crop_to(lambda keep, window: min(window, keep + 1)), "caches"),
    "a draft stays": (crop_to(lambda keep, window: window), "caches"),
    "late": (positions_of_the_window, "parity"),
    "drafts unseen": (lambda patch: keep_drafts_unseen(patch, TransformersTarget), "identity"),
}


@pytest.mark.parametrize("sabotage, part", FAULTS.values(), ids=FAULTS)
def test_a_broken_engine_does_not_pass(
    sabotage: Callable[[Patch], None], part: str, model: Path, monkeypatch: Patch
) -> None:
    assert report(model, part).passed
    sabotage(monkeypatch)
    assert not report(model, part).passed


def test_an_inexact_model_is_named(model: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(TransformersTarget, "_make_exact", lambda self: "no reason")
    assert any("near-ties may turn" in note for note in report(model, "parity").notes)


def test_what_cannot_be_asked_for(model: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    with pytest.raises(InputError, match=r"drafters: expected some of ngram, suffix \(.*\), found mtp"):
        report(model, drafters=("ngram", "mtp"))
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(CheckpointError, match=r"expected a model of Qwen3.5's family, or one that transformers loads"):
        report(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(InputError, match="expected transformers to be installed"):
        report(model)


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    llama = tiny("Llama")
    state = {name: tensor for name, tensor in llama.state_dict().items() if "layers.1.mlp.up" not in name}
    llama.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(CheckpointError, match=r"found none for model.layers.1.mlp.up_proj.weight"):
        report(tmp_path)


def test_who_runs_what(model: Path, tmp_path: Path) -> None:
    assert find_source(model) == Source(model)
    own = tmp_path / "own"
    own.mkdir()
    config = tiny_config()
    write_checkpoint(own, config, random_tensors(config, seed=1))
    assert find_source(own) == own
    assert find_source(tmp_path) == tmp_path  # nothing in it: loading says so
    (tmp_path / "a.gguf").touch()
    assert find_source(tmp_path) == find_source(tmp_path / "a.gguf") == Source(tmp_path, "a.gguf")
    (tmp_path / "b.gguf").touch()
    assert find_source(tmp_path) == tmp_path  # which of the two?
    assert find_source(tmp_path / "b.gguf") == Source(tmp_path, "b.gguf")
    with pytest.raises(CheckpointError, match="no such: expected a folder"):
        find_source("no such")
