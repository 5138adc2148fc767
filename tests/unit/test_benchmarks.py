"""The parts of the benchmarks that decide what a number says."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.demo import LIBRARY, PLAIN, Bench, Prompt, Round, Sample, make_row, read_prompts
from benchmarks.edits import EDITS, passes
from benchmarks.report import Demo, Row, Shape, load, page, save, speedup_model, table
from benchmarks.shapes import SHAPES, draw
from benchmarks.trees import best_trees, branches, kept_of, ranks_along, rows_of
from surefoot.bench.lossless import NotLosslessError, check_windows
from surefoot.bench.machine import Machine
from surefoot.bench.measure import kept_shares
from surefoot.bench.passes import EagerPasses
from surefoot.bench.turns import BURST, Spread, median_ratio, take_turns
from surefoot.drafters.mtp import MTPDrafter
from surefoot.drafters.ngram import NgramDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.engine.stats import Stats
from surefoot.engine.target import DecoderTarget
from surefoot.loading.tiny import tiny_config
from surefoot.model import Decoder, MTPHead
from surefoot.model.tensors import random_tensors
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Scores, Window

MACHINE = Machine("python x", "cpu", 2, 1, {"torch": "2"}, [0.1, 1.0], 0.02)
STEPS = {"verify 1": 10.0, "verify 2": 11.0, "draft": 1.0}


def test_speedup_model() -> None:
    assert speedup_model([], 1.0, 0.1) == 1
    assert speedup_model([0.8, 0.5], 1.1, 0.1) == pytest.approx(2.3 / 1.3)
    assert speedup_model([0.0], 1.1, 0.1) < 1


def test_ratios_are_taken_pair_by_pair() -> None:
    ours, theirs = [20.0, 2.0, 10.0], [10.0, 1.0, 4.0]  # the second round on a busy machine
    assert median_ratio(ours, theirs) == 2
    with pytest.raises(ValueError, match="shorter"):
        median_ratio(ours, theirs[:2])


def test_table() -> None:
    assert table(["", "ms"], [["plain", "1.5"]]).split("\n") == [
        "|       |  ms |",
        "| ----- | --: |",
        "| plain | 1.5 |",
    ]


def test_everything_takes_its_turn() -> None:
    calls: list[str] = []
    names = ("a", "b")
    times = take_turns({name: lambda name=name: calls.append(name) for name in names}, 2, lambda: calls.append("|"))  # type: ignore[misc]
    turn = BURST + 1
    assert "".join(calls) == ("|" + "a" * turn + "|" + "b" * turn) * 2
    assert set(times) == set(names)
    assert all(0 <= time.least <= time.median <= time.most for time in times.values())


def sample(kind: str, seconds: float, stats: Stats | None = None) -> Sample:
    return Sample(kind, [1, 2], 2, seconds, stats or Stats())


def test_a_row_says_what_the_samples_say() -> None:
    stats = Stats(steps=2, tokens=3, proposed_by_position=[2], accepted_by_position=[1])
    results: list[Round] = [
        {
            PLAIN: [sample("code", 2.0 * busy), sample("docs", 2.0 * busy)],
            LIBRARY: [sample("code", 8.0 * busy), sample("docs", 8.0 * busy)],
            "MTP, K = 1": [sample("code", 0.5 * busy, stats), sample("docs", 1.5 * busy, stats)],
        }
        for busy in (1, 30, 1)
    ]
    row = make_row("MTP, K = 1", results, STEPS)
    assert (row.rate, row.to_plain, row.to_library) == pytest.approx((2, 2, 8))
    assert row.kinds == pytest.approx({"code": 4, "docs": 4 / 3})
    assert row.tokens_per_step == 1.5
    assert row.shares == [0.5]
    assert row.predicted == pytest.approx(1.5 / 1.2)
    assert make_row(PLAIN, results, STEPS).predicted is None


def test_a_round_ends_at_the_first_token_that_is_not_plains(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    engines = dict.fromkeys((PLAIN, "MTP, K = 1"), nothing)
    bench = Bench(nothing, engines, nothing, SamplingParams())
    prompts = [Prompt("code", [1]), Prompt("docs", [2])]
    monkeypatch.setattr(Bench, "theirs", lambda self, prompt: sample(prompt.kind, 1.0))
    monkeypatch.setattr(Bench, "ours", lambda self, name, prompt: sample(prompt.kind, 1.0))
    assert {name: len(samples) for name, samples in bench.round(prompts).items()} == dict.fromkeys(
        (LIBRARY, *engines), 2
    )

    def wrong(self: Bench, name: str, prompt: Prompt) -> Sample:
        tokens = [1, 3] if name != PLAIN and prompt.kind == "docs" else [1, 2]
        return Sample(prompt.kind, tokens, 2, 1.0, Stats())

    monkeypatch.setattr(Bench, "ours", wrong)
    with pytest.raises(SystemExit, match=r"not lossless: MTP, K = 1, prompt 1 \(docs\)"):
        bench.round(prompts)


def test_kept_shares_of_drafts_of_unequal_length() -> None:
    one = Stats(proposed_by_position=[4, 4], accepted_by_position=[3, 1])
    other = Stats(proposed_by_position=[4], accepted_by_position=[1])
    assert kept_shares([one, other, Stats()]) == [0.5, 0.25]
    assert kept_shares([]) == []


def sections() -> list[Demo | Shape]:
    rows = [Row(PLAIN, 100.0, 1.0, 4.0, {"code": 1.0}), Row("MTP", 200.0, 2.0, 8.0, {"code": 2.0}, 1.8, [0.8], 1.9)]
    steps = {**STEPS, "plain": 10.5, "transformers": 42.0}
    return [
        Demo("m", "float32", 3, 128, 5, 3, rows, STEPS, MACHINE),
        Shape("s", "bfloat16", 128, 5, 32, False, 10**9, 1e11, steps, MACHINE),
    ]


def test_the_page_has_every_number_and_survives_saving(tmp_path: Path) -> None:
    text = page(sections())
    for part in (
        "| MTP ",
        "2.00",
        "0.80",
        "1.90",
        "× plain, code",
        "1.100",
        "0.100",
        "4.00 × as fast",
        "10.00",
        "1.05",
    ):
        assert part in text
    assert "not in turns" in text  # this one's models did not fit together
    save(tmp_path / "x.json", sections())
    assert load(tmp_path / "x.json") == sections()


def test_prompts_are_spread_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    with pytest.raises(SystemExit, match=r"p\.jsonl.*found no file"):
        read_prompts(file, None)
    file.write_text("".join(f'{{"kind": "code", "text": "{i}"}}\n' for i in range(9)))
    assert [line["text"] for line in read_prompts(file, 3)] == ["0", "3", "6"]
    assert len(read_prompts(file, None)) == 9
    file.write_text("\n")
    with pytest.raises(SystemExit, match="found none"):
        read_prompts(file, None)


class Wrong(DecoderTarget):
    """Scores the third token of a window with an error of one bit."""

    def verify(self, windows: Seq[Window]) -> list[Scores]:
        scores = super().verify(windows)
        for score in scores:
            score.logits[2:3] = score.logits[2:3].nextafter(torch.tensor(torch.inf))
        return scores


@torch.inference_mode()
def test_the_lossless_check_sees_one_bit() -> None:
    config = SHAPES["tiny"]
    decoder = Decoder(config, draw(config, torch.float32), 64)
    sizes = range(2, 10)
    assert check_windows(EagerPasses(DecoderTarget(decoder, 1), None, 5), sizes) >= 24
    with pytest.raises(NotLosslessError, match="logits of a window of 3"):
        check_windows(EagerPasses(Wrong(decoder, 1), None, 5), sizes)


def test_the_median_is_over_timed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 2.0, 9.0, 3.0] * 2)
    monkeypatch.setattr("surefoot.bench.turns.timed", lambda *_: next(times))
    assert take_turns({"a": lambda: None}, 2)["a"] == Spread(1000 * statistics.median([1, 2, 9, 3]), 1000, 9000)


RANKS = [(0, 0), (0, 1), (1, 0), (0, 0), (2, 2)]


def test_the_best_tree_keeps_what_its_paths_say() -> None:
    order = best_trees(RANKS, 4)
    assert order[:2] == [(0,), (0, 0)]  # in 3 of 5 positions, and in 2
    assert all(path[:-1] in order[:place] for place, path in enumerate(order) if len(path) > 1)
    assert kept_of(order[:1], RANKS) == pytest.approx(3 / 5)
    assert kept_of(order[:2], RANKS) == pytest.approx(5 / 5)
    assert kept_of([(1,), (1, 0)], RANKS) == pytest.approx(2 / 5)
    assert branches([(0,), (0, 0), (0, 0, 0)]) == 0
    assert branches([(0,), (1,), (0, 0), (0, 1), (1, 0)]) == 2


def test_a_chain_and_a_tree_of_one_node_are_the_same() -> None:
    ms = {"verify 1": 10.0, "verify 2": 11.0, "verify 3": 12.0, "draft": 1.0, "copy": 1.0}
    rows = rows_of(RANKS, ms, deepest=1)
    assert rows[0] == ["1", "1.60", f"{16 / 12:.2f} x", "1.60", f"{16 / 12:.2f} x", "1", "0"]
    assert rows[1][1:3] == ["", ""]  # a chain of two is deeper than what was ranked
    assert len(rows) == 2  # as far as passes were timed


@torch.inference_mode()
def test_the_head_ranks_its_own_drafts_first() -> None:
    config = tiny_config(vocab_size=20)
    tensors = random_tensors(config, seed=3)
    head = MTPHead(Decoder(config, tensors, max_len=64), tensors)
    target = DecoderTarget(head.decoder, 1)
    tokens = [3, 1, 4, 1, 5, 9]

    def hidden_of(text: list[int]) -> torch.Tensor:
        return torch.cat([h for _, h in target.prefill(0, text)])

    drafter = MTPDrafter(head, slots=1)
    sequence = Sequence(0, list(tokens), SamplingParams(), limit=60)
    drafter.observe(sequence, 0, hidden_of(tokens[:-1]))
    drafted = list(drafter.propose([sequence], [3])[0].tokens)
    text = [*tokens, *drafted]
    assert ranks_along(head, hidden_of(text[:-1]), text, len(tokens) - 2, 3) == [(0, 0, 0)]
    other = [*tokens, (drafted[0] + 1) % 20, *drafted[1:]]
    assert ranks_along(head, hidden_of(other[:-1]), other, len(tokens) - 2, 3)[0][0] > 0


def test_passes_of_a_replayed_edit() -> None:
    text = list(range(30))
    assert passes(NoDrafter(), text, [7, 8, 9], 4) == 3
    assert passes(NgramDrafter(), [*text, 99], text, 4) < 10
    assert EDITS["unchanged"]("one two") == "one two"
    assert EDITS["put in"]("word " * 12) == "word " * 11 + "river word "
    assert EDITS["left out"]("word " * 12) == "word " * 11 + " "
    assert EDITS["renamed"]("alpha beta alpha") == "renamed_ahpla beta renamed_ahpla"
