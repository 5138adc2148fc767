"""`surefoot prove`: its statistics, its reference, its report, its options; that it finds faults is
`tests/lossless/test_prove_sabotage.py`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.cli.main import run
from surefoot.errors import InputError
from surefoot.loading.tiny import Style, byte_tokenizer, tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors
from surefoot.prove.reference import Reference
from surefoot.prove.report import Check, Report, Section
from surefoot.prove.run import prove
from surefoot.prove.settings import Settings
from surefoot.prove.show import write_page
from surefoot.prove.statistics import goodness_of_fit, holm, same_law
from surefoot.prove.weights import stored_weights
from tests.fakes import keep_drafts_unseen
from tests.model.test_parity import make_config, reference_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


def checkpoint(folder: Path, style: Style | None = None, **more: Any) -> Path:
    config = tiny_config(layer_types=("linear_attention", "full_attention"), **more)
    tokenizer = byte_tokenizer() if config.vocab_size > 256 else None
    tensors = random_tensors(config, seed=1)
    tensors["lm_head.weight"] *= 3  # so that some tokens are likely
    return write_checkpoint(folder, config, tensors, style=style, tokenizer=tokenizer)


def command(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["surefoot", "prove", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        run()
    assert isinstance(ended.value.code, int)
    return ended.value.code


# ---------------------------------------------------------------- statistics


def draws(weights: list[float], count: int, seed: int) -> Counter[int]:
    generator = torch.Generator().manual_seed(seed)
    return Counter(torch.multinomial(torch.tensor(weights), count, replacement=True, generator=generator).tolist())


def test_p_values_are_even_for_equal_laws_and_small_for_others() -> None:
    law, other = [0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]
    named = dict(enumerate(law))
    fits = [goodness_of_fit(draws(law, 400, seed), named) for seed in range(300)]
    pairs = [same_law(draws(law, 400, seed), draws(law, 250, 1000 + seed)) for seed in range(300)]
    for chances in (fits, pairs):
        assert 0.02 < sum(p < 0.1 for p in chances) / 300 < 0.18
        assert 0.4 < sum(p < 0.5 for p in chances) / 300 < 0.6
    assert goodness_of_fit(draws(other, 2000, 1), named) < 1e-6
    assert same_law(draws(law, 2000, 1), draws(other, 2000, 2)) < 1e-6


def test_a_draw_of_no_chance_is_no_chance() -> None:
    assert goodness_of_fit({0: 5, 1: 1}, {0: 1.0, 1: 0.0}) == 0.0
    assert goodness_of_fit({0: 5}, {0: 1.0}) == 1.0
    assert same_law({7: 3}, {7: 4}) == 1.0


def test_a_known_chi_square() -> None:
    """Ten heads in ten tosses twice over: chi-square 20 of one degree."""
    assert goodness_of_fit({"h": 20, "t": 0}, {"h": 0.5, "t": 0.5}) == pytest.approx(7.7442e-6, rel=1e-3)
    assert same_law({"h": 20}, {"t": 20}) == pytest.approx(2.5396e-10, rel=1e-3)  # 40 of one degree


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert holm([], 0.05) == []


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.2))
@settings(max_examples=60, deadline=None)
def test_holm_lies_between_bonferroni_and_no_correction(chances: list[float], level: float) -> None:
    for chance, told in zip(chances, holm(chances, level), strict=True):
        assert told or chance >= level / len(chances)
        assert not told or chance < level


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("ratio", [1, 3])
@torch.inference_mode()
def test_the_reference_is_the_published_model(ratio: int, moe: bool) -> None:
    config = make_config(ratio, moe, tied=False)
    tensors = random_tensors(config, seed=ratio)
    tokens = torch.randint(config.vocab_size, (40,), generator=torch.Generator().manual_seed(ratio)).tolist()
    expected = reference_model(config, tensors)(torch.tensor([tokens])).logits[0]
    book = Reference(config, tensors.__getitem__)
    torch.testing.assert_close(book.logits(book.hidden(tokens)), expected, atol=1e-4, rtol=0)
    wrong = Reference(config, tensors.__getitem__, scale_of=lambda w: w)
    assert (wrong.logits(wrong.hidden(tokens)) - expected).abs().max() > 0.1


STYLES = {
    "plain": Style(),
    "multimodal, shards": Style(prefix="multimodal", shard_bytes=20_000),
    "experts apart": Style(experts="separate"),
    "squeezed, sidecar": Style(squeezed=True, mtp="sidecar"),
    "8 bits": Style(weights="rows"),
}


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_every_style_of_checkpoint_has_a_reference(style: Style, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, style, moe=True)
    (section,) = prove(Settings(model=folder, quick=True, tokens=4, drafters=("ngram",)), parts=["parity"]).sections
    assert section.passed, section
    direct = "past" in section.notes[-1]
    assert direct == (style.experts == "fused" and style.weights == "whole")


def test_weights_come_from_the_files(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config, seed=1)
    folder = write_checkpoint(tmp_path, config, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    with ExitStack() as stack:
        read, _ = stored_weights(folder, stack)
        for name, tensor in tensors.items():
            assert torch.equal(read(name), tensor.bfloat16().float())


# ---------------------------------------------------------------- what it says


def test_a_divergence_is_explained(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_drafts_unseen(monkeypatch)
    settings = Settings(model=model, quick=True, tokens=12, drafters=("mtp",))
    (section,) = prove(settings, parts=["identity"]).sections
    wrong = next(check for check in section.checks if check.name == "greedy, MTP, K = 3")
    assert not wrong.passed
    row = wrong.table[0]
    assert row["gap"] == pytest.approx(row["plain logit"] - row["drafted logit"])
    assert row["gap"] == pytest.approx(row["reference gap"], abs=1e-3)
    assert row["gap"] > 0
    assert row["reason"] == "no near-tie: the state or the rule is wrong"


@pytest.mark.parametrize("more", [{"mtp_layers": 0}, {"vocab_size": 50}], ids=["no head", "no tokenizer"])
def test_other_checkpoints(more: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, **more)
    found = prove(Settings(model=folder, quick=True, tokens=4), parts=["identity", "caches", "parity"])
    assert found.passed, found.failures
    with_head = any("MTP" in check.name for section in found.sections for check in section.checks)
    assert with_head == ("mtp_layers" not in more)
    json.dumps(found.as_dict())


def test_a_section_that_raises_or_has_no_checks_has_failed() -> None:
    section = Section("title", "claim")
    assert not section.passed
    section.check("broken", lambda: 1 / 0)  # type: ignore[arg-type, return-value]  # never returns
    assert section.checks == [Check("broken", False, "ZeroDivisionError: division by zero")]


def test_the_page_escapes_and_is_whole(tmp_path: Path) -> None:
    check = Check("a <b>", False, "1 < 2", [{"plain": "5 '<script>'", "gap": 0.25}])
    config = {"dtype": "float32", "threads": 1, "prompts": 1, "tokens": 4, "drafters": ["ngram"], "max_k": 3, "seed": 0}
    report = Report("<m>", "a device", config, {"torch": "2"}, [Section("laws", "a & b", [check], ["note <n>"])], ["x"])
    write_page(report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert not {"script", "m", "n", "link", "img"} & set(tags)
    for part in ("a &lt;b&gt;", "a &amp; b", "5 &#39;&lt;script&gt;&#39;, gap 0.25", "laws: a &lt;b&gt;"):
        assert part in text


# ---------------------------------------------------------------- the command


def test_command(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(Settings, "sample_count", 60)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('First one\n\n{"text": "second one", "kind": "other"}\n', encoding="utf-8")
    args = ("--model", model, "--quick", "--prompts", prompts, "-d", "suffix,auto", "-k", 2, "-n", 6, "--seed", 3,
            "--json", tmp_path / "r.json", "--html", tmp_path / "r.html")  # fmt: skip
    assert command(monkeypatch, *args) == 0
    out = capsys.readouterr().out
    assert out.count("passed (") == 5
    assert "proved: all" in out
    saved = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert saved["passed"]
    assert saved["config"]["prompts"] == 2
    assert [section["title"] for section in saved["sections"]] == [
        "token identity", "exact law", "two samples", "cache states", "textbook reference"
    ]  # fmt: skip
    assert str(tmp_path) not in json.dumps(saved)
    assert "Yes: every check of all 5 sections holds" in (tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "args, message",
    [
        (("-d", "best"), "drafters: expected some of ngram"),
        (("-d", "none"), "drafters: expected some of ngram"),
        (("-k", 0), "draft_length: expected an integer from 1"),
        (("-n", 1), "tokens: expected"),
        (("--seed", -1), "seed: expected"),
        (("--device", "tpu"), "device: expected"),
        (("--dtype", "int3"), "dtype: expected"),
        (("--prompts", "nowhere.txt"), "--prompts: nowhere.txt: expected a readable text"),
        (("--json", "nowhere/r.json"), "--json: expected a file in a folder that is there"),
        (("--model", "no such"), "no such: expected a folder"),
    ],
)
def test_bad_usage(args: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert command(monkeypatch, *args) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_drafter_that_needs_a_head_that_is_not_there(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, mtp_layers=0)
    with pytest.raises(
        InputError,
        match=r"drafters: expected some of ngram, suffix, auto \(the checkpoint has no MTP head\), found mtp",
    ):
        prove(Settings(model=folder, drafters=("mtp",)))


def test_too_few_samples_have_no_power(model: Path) -> None:
    settings = replace(Settings(model=model, quick=True, drafters=("ngram",)), samples=50, level=1e-12)
    (section,) = prove(settings, parts=["samples"]).sections
    assert not section.passed
    assert "no power" in section.checks[-1].seen
