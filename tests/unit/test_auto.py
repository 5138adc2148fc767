"""The drafter that chooses: what it picks and learns, what it may lose, and that its choices show in no token."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot import Engine, SamplingParams
from surefoot.drafters import policy
from surefoot.drafters.auto import DEEPEST, AutoDrafter
from surefoot.drafters.ngram import NgramDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.drafters.policy import GUARDED, UNGUARDED, Guard, StepCosts
from surefoot.engine import profile
from surefoot.engine.calibrate import measure_costs
from surefoot.engine.profile import load_profile, profile_file, save_profile
from surefoot.errors import InputError
from surefoot.loading.tiny import tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors
from surefoot.prove.enumeration import Dice, every_verdict, exact_law
from surefoot.prove.table import (
    Right,
    Row,
    Run,
    Sampled,
    Sometimes,
    TableTarget,
    Wrong,
    decode,
    decode_batch,
    hashed_rows,
)
from surefoot.sequence import Sequence
from surefoot.types import Drafter

V = 6
ROW = hashed_rows(V, salt=4)
PROMPT = (1, 2, 0, 1)
LONG = SamplingParams(max_new_tokens=600)


def costs(draft: float = 0.1, row: float = 0.05) -> StepCosts:
    """A plain step takes 1, a window's further row `row`, and a draft's token `draft`; of four sequences twice that."""
    windows = (1, DEEPEST + 1)
    passes = (1.0, 1 + row * DEEPEST)
    return StepCosts((1, 4), windows, 0, (passes, tuple(2 * s for s in passes)), ((0.0, 0.0),) * 2,
                     ((draft, draft), (2 * draft, 2 * draft)))  # fmt: skip


def auto(then: Drafter | None = None, *, draft: float = 0.1, row: float = 0.05) -> AutoDrafter:
    return AutoDrafter(costs(draft, row), NgramDrafter(min_ngram=4), then or NoDrafter())


def run(drafter: AutoDrafter, params: SamplingParams = LONG, row: Row = ROW) -> Run:
    return decode(TableTarget(row, V), drafter, params, DEEPEST, PROMPT)


class Turning(Right):
    """Right for `good` tokens, wrong for as many, and so on."""

    def __init__(self, row: Row, good: int) -> None:
        super().__init__(row)
        self._good = good

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        right, _ = super().token(sequence, prefix)
        return (right if len(prefix) // self._good % 2 == 0 else (right + 1) % V), None


def test_a_good_head_is_asked_for_long_drafts() -> None:
    drafter = auto(Right(ROW))
    assert len(run(drafter).records) < 100
    assert max(drafter.choices, key=lambda choice: drafter.choices[choice]) == ("mtp", DEEPEST)


def test_a_bad_head_is_hardly_asked() -> None:
    drafter = auto(Wrong(ROW), draft=0.3)
    run(drafter)
    asked = sum(count for (arm, _), count in drafter.choices.items() if arm == "mtp")
    assert 0 < asked < 40
    assert drafter.probed > 0


def test_a_head_that_costs_too_much_is_left_alone() -> None:
    drafter = auto(Right(ROW), draft=9.0)
    run(drafter, SamplingParams(max_new_tokens=UNGUARDED))
    assert drafter.choices["mtp", DEEPEST] == 0


def test_a_text_that_repeats_itself_is_copied() -> None:
    drafter = auto(Wrong(ROW))
    repeating = hashed_rows(V, salt=4, order=1)
    assert len(run(drafter, row=repeating).records) < 200
    assert any(arm.startswith("ngram") for arm, _ in drafter.choices)


def test_drafts_are_no_longer_than_asked() -> None:
    drafter = auto(Right(ROW))
    for depth in (0, 1, 3):
        sequence = Sequence(0, list(PROMPT), LONG, limit=99)
        assert len(drafter.propose([sequence], [depth])[0].tokens) <= depth


def test_many_sequences_get_shorter_drafts() -> None:
    """A window's row is dearer where a pass has many: four sequences' plain step costs twice one's here."""
    cheap = costs(draft=0.3, row=0.02)
    passes = (cheap.verify[0], (2.0, 2.0 + 8 * DEEPEST))
    crowded = StepCosts((1, 4), cheap.windows, 0, passes, cheap.by_context, cheap.draft)
    params = SamplingParams(max_new_tokens=40)
    deepest = {}
    for batch in (1, 4):
        drafter = AutoDrafter(crowded, NgramDrafter(min_ngram=4), Right(ROW))
        decode_batch(TableTarget(ROW, V), drafter, [((i, 2, 0, 1), params) for i in range(batch)], DEEPEST)
        deepest[batch] = max(depth for _, depth in drafter.choices)
    assert deepest[4] < deepest[1]


def lost(drafter: AutoDrafter, then: Right) -> float:
    """The most that a span of GUARDED tokens lost, by the model's own costs, in plain steps."""
    emitted, balance, states = 0, 0.0, [(0, 0.0)]
    for record in run(drafter, SamplingParams(max_new_tokens=1500)).records:
        drafted = len(record.draft.tokens)
        emitted += record.emitted
        head = drafted if record.draft.source == then.name else 0
        balance += record.emitted - (1 + 0.05 * drafted + 0.3 * head)
        states.append((emitted, balance))
    late = [state for state in states if state[0] >= UNGUARDED]
    return max(a[1] - b[1] for a, b in itertools.combinations(late, 2) if b[0] - a[0] <= GUARDED)


@pytest.mark.parametrize("good", [5, 20, 90, 300])
def test_a_text_that_turns_loses_little(good: int) -> None:
    then = Turning(ROW, good)
    assert lost(auto(then, draft=0.3), then) < 0.03 * GUARDED


def test_without_a_guard_it_would_lose_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the above: a head that is hopeless, and an estimate that never learns it."""
    then = Wrong(ROW)
    monkeypatch.setattr(policy.Rates, "judge", lambda self, drafted, kept: None)
    assert lost(auto(then, draft=0.3), then) < 0.03 * GUARDED
    monkeypatch.setattr(Guard, "allows", lambda self, cost: True)
    assert lost(auto(then, draft=0.3), then) > 0.03 * GUARDED


@settings(max_examples=30, deadline=None)
@given(
    salt=st.integers(0, 99), temperature=st.sampled_from([0.0, 0.8]), depth=st.integers(0, 9), draft=st.floats(0, 0.5)
)
def test_the_choice_shows_in_no_token(salt: int, temperature: float, depth: int, draft: float) -> None:
    row = hashed_rows(V, salt, order=2)
    params = SamplingParams(max_new_tokens=60, temperature=temperature, seed=salt)
    requests = [((*PROMPT, i), params) for i in range(3)]
    plain = decode_batch(TableTarget(row, V, hidden=True), NoDrafter(), requests, 0)
    chosen = decode_batch(TableTarget(row, V, hidden=True), auto(Sometimes(row), draft=draft), requests, depth)
    assert [one.output for one in chosen] == [one.output for one in plain]


class EveryDraw(Sampled):
    """Each token of positive draft probability is drafted in turn."""

    def __init__(self, row: Row, dice: Dice) -> None:
        super().__init__(row)
        self._dice = dice

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        _, probs = super().token(sequence, prefix)
        assert probs is not None
        return self._dice.roll(probs.tolist()), probs


def test_exact_law_under_the_ratio_rule() -> None:
    """Five tokens, every outcome: the depth follows from what was kept, and the law stays the target's."""
    row, other = hashed_rows(2, salt=1), hashed_rows(2, salt=2)
    params = SamplingParams(temperature=1.0, max_new_tokens=5, acceptance="rejection")
    dice, law, depths = Dice(), defaultdict[tuple[int, ...], float](float), set()
    with every_verdict(dice):
        for _ in dice.outcomes():
            drafter = AutoDrafter(costs(draft=0.12), NgramDrafter(min_ngram=9, max_ngram=9), EveryDraw(other, dice))
            out = decode(TableTarget(row, 2), drafter, params, 2, (1, 0))
            law[tuple(out.output)] += dice.chance
            depths |= set(drafter.choices)
    expected = exact_law(row, params, (1, 0), 5)
    assert len(depths) > 1
    assert sum(abs(law.get(x, 0) - expected.get(x, 0)) for x in {*law, *expected}) < 2e-5


def test_under_the_ratio_rule_company_and_experience_have_no_say() -> None:
    params = SamplingParams(max_new_tokens=60, temperature=1.0, seed=3, acceptance="rejection")

    def tokens(drafter: AutoDrafter, *, company: int = 0) -> list[int]:
        others = [((i, 3), SamplingParams(max_new_tokens=80)) for i in range(company)]
        return decode_batch(TableTarget(ROW, V), drafter, [(PROMPT, params), *others], DEEPEST)[0].output

    drafter = auto(Sampled(hashed_rows(V, salt=5)))
    alone = tokens(drafter)
    assert tokens(auto(Sampled(hashed_rows(V, salt=5))), company=3) == alone
    run(drafter)
    assert tokens(drafter) == alone


def test_a_sequence_is_forgotten_and_what_it_taught_is_not() -> None:
    drafter = auto(Wrong(ROW))
    run(drafter)
    first = drafter.choices["none", 0]
    run(drafter)
    assert not drafter._runs
    assert drafter.choices["none", 0] - first > first  # it begins where the first one ended


# ---------------------------------------------------------------- with a model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = tiny_config(vocab_size=8)
    write_checkpoint(tmp_path / "model", config, random_tensors(config, seed=2))
    return tmp_path / "model"


def test_an_engine_that_chooses(model: Path) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    engine = Engine.from_pretrained(model, drafter="auto", max_len=64)
    assert (engine.drafter.name, engine.draft_length) == ("auto", DEEPEST)
    assert engine.generate([1, 2, 3], params).token_ids == engine.plain().generate([1, 2, 3], params).token_ids
    assert isinstance(engine.drafter, AutoDrafter)
    assert sum(engine.drafter.choices.values()) > 0


def test_a_request_that_names_its_own_drafter(model: Path) -> None:
    engine = Engine.from_pretrained(model, drafter="auto", max_len=64)
    assert [engine.choose_drafter(name, None)[1] for name in (None, "auto", "mtp", "none")] == [DEEPEST, DEEPEST, 3, 0]


def test_costs_are_measured_once(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    measured: list[list[int]] = []

    def measure(*args: object) -> StepCosts:
        measured.append(list(args[2]))  # type: ignore[call-overload]  # the batch sizes
        return measure_costs(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("surefoot.engine.profile.measure_costs", measure)
    for slots in (1, 1, 3):
        Engine.from_pretrained(model, drafter="auto", max_len=64, slots=slots)
    assert measured == [[1], [3]]
    (file,) = (tmp_path / ".cache" / "surefoot").iterdir()
    kept = load_profile(file)
    assert kept is not None
    assert kept.costs.batches == (1, 3)
    file.write_text(file.read_text()[:100])
    assert load_profile(file) is None
    Engine.from_pretrained(model, drafter="auto", max_len=64)
    assert measured[2:] == [[1]]


def test_a_folder_that_cannot_be_written_does_no_harm(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "file")
    engine = Engine.from_pretrained(model, drafter="auto", max_len=64)
    assert engine.generate([1, 2, 3], SamplingParams(max_new_tokens=4)).token_ids
    file = profile_file(engine.target.decoder, None)  # type: ignore[union-attr]  # a checkpoint's target
    with pytest.raises(InputError, match="expected to write the profile"):
        save_profile(file, profile.Profile(costs()))


def test_a_model_with_few_positions(model: Path) -> None:
    engine = Engine.from_pretrained(model, drafter="auto", max_len=3)
    assert len(engine.generate([1], SamplingParams(max_new_tokens=9, ignore_eos=True)).token_ids) == 2
