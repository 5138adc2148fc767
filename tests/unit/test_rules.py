"""Rules: what the history does to a row, against the definitions; and that a row of a window is the row of one step."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.errors import InputError
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.verify import Rules, ruled
from surefoot.verify.rules import Thinking
from tests.fakes import ListGrammar

V = 9
STOP = (0, 3)
THINK, END = 7, 8
GRAMMAR_TEXTS = [[1], [1, 2, 4], [5, 5, 5, 5], [6, 1]]


def pulled(tokens: Seq[int], logits: Tensor) -> Tensor:
    """A processor: what stood four tokens ago is likelier."""
    return logits + torch.tensor([2.0 * (token in tokens[-4:-3]) for token in range(V)])


def doubled(tokens: Seq[int], logits: Tensor) -> Tensor:
    """A processor that works in place."""
    return logits.mul_(1 + len(tokens) % 3)


def reference(
    row: list[float], prompt: list[int], output: list[int], p: SamplingParams, size: int | None
) -> list[float]:
    """The definition, in Python floats, without grammars."""
    history = prompt + output
    row = [value if size is None or token < size else -math.inf for token, value in enumerate(row)]
    for processor in p.processors:
        row = processor(history, torch.tensor(row, dtype=torch.float64)).tolist()
    banned = {token for token in range(V) if p.allowed_token_ids is not None and token not in p.allowed_token_ids}
    banned |= {word[-1] for word in p.bad_words_ids if tuple(history[len(history) - len(word) + 1 :]) == word[:-1]}
    banned |= set(STOP) if len(output) < p.min_new_tokens else set()
    banned |= {token for token in range(V) if size is not None and token >= size}
    row = [-math.inf if token in banned else value for token, value in enumerate(row)]
    if p.thinking_budget is not None:
        inside, thoughts = False, 0
        for place, token in enumerate(history):
            thoughts += inside and token != END and token != THINK and place >= len(prompt)
            inside = token == THINK or (inside and token != END)
        if inside and thoughts >= p.thinking_budget:
            row = [
                -math.inf if token != END else (value if value > -math.inf else 0.0) for token, value in enumerate(row)
            ]
    row = [value + dict(p.logit_bias).get(token, 0.0) for token, value in enumerate(row)]
    for token in range(V):
        count = output.count(token)
        if token in history:
            row[token] *= p.repetition_penalty if row[token] <= 0 else 1 / p.repetition_penalty
        row[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return row


TOKENS = st.lists(st.integers(0, V - 1), max_size=8)
WORDS = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=3), max_size=4)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.4, 1.1]),
        "frequency_penalty": st.sampled_from([-0.3, 0.9]),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -1.5, 0.25, 100.0]), max_size=3),
        "bad_words_ids": WORDS,
        "min_new_tokens": st.integers(1, 6),
        "allowed_token_ids": st.lists(st.integers(0, V - 1), min_size=1),
        "processors": st.lists(st.sampled_from([pulled, doubled]), max_size=2),
        "thinking_budget": st.integers(0, 3),
    },
)


def params_of(setting: dict[str, Any]) -> SamplingParams:
    return SamplingParams(max_new_tokens=99, **setting)


def rules_of(params: SamplingParams, prompt: list[int], **more: Any) -> Rules:
    thinking = None if params.thinking_budget is None and "grammar" not in more else Thinking(THINK, END)
    return Rules(params, prompt, stop_ids=STOP, thinking=thinking, **more)


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=1200, deadline=None)
@given(PARAMS, TOKENS, TOKENS, TOKENS, st.sampled_from([None, 6, V]), st.integers(0, 99))
def test_rows_agree_with_the_definition(
    setting: dict[str, Any], prompt: list[int], output: list[int], draft: list[int], size: int | None, seed: int
) -> None:
    params, prompt = params_of(setting), [1, *prompt]
    logits = random_logits(len(draft) + 1, seed)
    rows = rules_of(params, prompt, size=size).rows(logits, prompt + output, draft)
    for i, row in enumerate(rows.tolist()):
        assert row == pytest.approx(
            reference(logits[i].tolist(), prompt, output + draft[:i], params, size), rel=1e-5, abs=1e-4
        )


@settings(max_examples=120, deadline=None)
@given(PARAMS, TOKENS, st.lists(TOKENS, max_size=4), TOKENS, st.booleans(), st.integers(0, 99))
def test_a_row_of_a_window_has_the_bits_of_a_single_step(
    setting: dict[str, Any], prompt: list[int], steps: list[list[int]], draft: list[int], grammar: bool, seed: int
) -> None:
    """However the history came, and whatever drafts were thrown away on the way."""
    params, prompt = params_of(setting), [1, *prompt]

    def fresh() -> Rules:
        more = {"grammar": ListGrammar(GRAMMAR_TEXTS, STOP, V)} if grammar else {}
        return rules_of(params, prompt, **more)

    logits, rules, history = random_logits(len(draft) + 1, seed), fresh(), list(prompt)
    for step in steps:
        rules.cut(history, draft)
        rules.rows(random_logits(3), history, [*draft[:2], 5, 6])
        rules.forced(history)
        history += step
    window = rules.rows(logits, history, draft)
    for i, row in enumerate(window):
        alone = fresh().rows(logits[i : i + 1], history + draft[:i], ())
        assert torch.equal(row, alone[0])
        assert torch.equal(row, rules.rows(logits[i : i + 1], history, draft[:i])[0])  # as a drafter asks
    assert torch.equal(logits, random_logits(len(draft) + 1, seed))  # what was given is as it was


def test_a_control_that_forgets_the_draft_is_noticed() -> None:
    logits = random_logits(3)
    rules = rules_of(SamplingParams(presence_penalty=1.0), [1])
    window = rules.rows(logits, [1, 2], [2, 4])
    assert not torch.equal(window[2], rules.rows(logits[2:], [1, 2], ())[0])


def test_penalties_by_hand() -> None:
    """Repetition counts the prompt, the other two do not."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.tensor([[4.0, -4.0, 4.0, -4.0, 1.0]]).bfloat16()
    row = Rules(params, [0, 1]).rows(logits, [0, 1, 2, 2, 3], ())
    assert row.dtype == torch.float32
    assert row.tolist() == [[2.0, -8.0, 2.0 - 0.5 - 0.5, -8.0 - 0.5 - 0.25, 1.0]]


def test_a_bias_of_minus_100_in_a_draft() -> None:
    """cases.md 13: at every row of a window, not at the last one alone."""
    rows = Rules(SamplingParams(logit_bias={2: -100}), [0]).rows(torch.zeros(4, 5), [0, 1], [1, 2, 3])
    assert rows[:, 2].tolist() == [-100.0] * 4


def test_bad_words_across_the_border_of_draft_and_history() -> None:
    params = SamplingParams(bad_words_ids=((4, 5, 6), (2,)))
    rows = Rules(params, [4]).rows(torch.zeros(3, V), [4], [5, 6])
    assert rows.isfinite().logical_not().nonzero().tolist() == [[0, 2], [1, 2], [1, 6], [2, 2]]
    rows = Rules(params, [4]).rows(torch.zeros(1, V), [4, 5], [])
    assert not rows[0, 6].isfinite()


@pytest.mark.parametrize("budget", range(4))
def test_thoughts_end_exactly_at_the_budget(budget: int) -> None:
    """cases.md 7: whether thoughts begin in the prompt, in the output, or in a draft; and anew."""
    params = SamplingParams(thinking_budget=budget, allowed_token_ids=(1, 2))  # the end comes, whatever was allowed

    def closes(prompt: list[int], output: list[int], draft: list[int]) -> list[bool]:
        rows = rules_of(params, prompt).rows(torch.zeros(len(draft) + 1, V), prompt + output, draft)
        return [row.isfinite().nonzero().tolist() == [[END]] for row in rows]

    late = [i >= budget for i in range(5)]
    assert closes([1, THINK], [], [1, 2, 1, 2]) == late
    assert closes([1, THINK, 1, 1], [], [1, 2, 1, 2]) == late  # what the prompt thought does not count
    assert closes([1, THINK], [1, 2], [1, 2]) == late[2:]
    assert closes([1], [THINK], [1, 2, 1, 2]) == late
    assert closes([1], [], [THINK, 1, 2, 1]) == [False, *late[:4]]
    assert closes([1], [THINK, 1, END, 1, THINK], [1, 2]) == [i + 1 >= budget for i in range(3)]
    assert closes([THINK, END], [], [1, 2]) == [False] * 3
    assert not any(closes([1, THINK], [END], [1, 2, 1, 2]))


def test_a_grammar_begins_behind_the_thoughts_of_the_prompt() -> None:
    """cases.md 33: the end of thoughts inside a draft; no stop id before the text is complete."""
    rules = rules_of(SamplingParams(), [2, THINK], grammar=ListGrammar([[1, 2], [4]], (0,), V))
    draft = [5, END, 1, 2, 0]
    rows = rules.rows(torch.zeros(6, V), [2, THINK], draft)
    everything = [token for token in range(V) if token not in STOP]
    assert [row.isfinite().nonzero()[:, 0].tolist() for row in rows[:5]] == [everything, everything, [1, 4], [2], [0]]
    assert rules.cut([2, THINK], draft) == 5
    assert rules.cut([2, THINK], [5, END, 1, 4, 2]) == 3
    assert rules.forced([2, THINK]) == []
    assert rules.forced([2, THINK, END]) == []
    assert rules.forced([2, THINK, END, 1]) == [2]
    assert rules.cut([2, THINK, END, 1], [2, 0, 5]) == 2  # nothing comes behind the end
    assert rules.forced([2, THINK, END, 1, 2]) == []


def test_a_complete_text_may_end_before_min_new_tokens() -> None:
    """There would be nothing left to choose."""
    rules = rules_of(SamplingParams(min_new_tokens=5), [2], grammar=ListGrammar([[1, 2], [1]], (0,), V))
    rows = rules.rows(torch.zeros(3, V), [2], [1, 2])
    assert [row.isfinite().nonzero()[:, 0].tolist() for row in rows] == [[1], [2], [0]]


@pytest.mark.parametrize("answer", [None, 5, torch.zeros(V - 1), torch.zeros(1, V), torch.zeros(V, dtype=torch.int64)])
def test_a_processor_that_gives_no_logits(answer: Any) -> None:
    rules = Rules(SamplingParams(processors=(lambda tokens, logits: answer,)), [1])
    with pytest.raises(InputError, match=r"processor: expected logits \[9\], found"):
        rules.rows(torch.zeros(1, V), [1], ())


def test_rules_are_as_before_after_a_processor_has_failed() -> None:
    failing = [True]

    def processor(tokens: Seq[int], logits: Tensor) -> Tensor:
        if len(tokens) == 4 and failing:
            raise RuntimeError("mine")
        return logits

    rules = Rules(SamplingParams(processors=(processor,), frequency_penalty=1.0), [1])
    logits = random_logits(4)
    with pytest.raises(RuntimeError, match="mine"):
        rules.rows(logits, [1, 2], [2, 3, 4])
    failing.clear()
    fresh = Rules(SamplingParams(processors=(processor,), frequency_penalty=1.0), [1])
    assert torch.equal(rules.rows(logits, [1, 2], [2, 3, 4]), fresh.rows(logits, [1, 2], [2, 3, 4]))


@pytest.mark.parametrize(
    "setting, name",
    [
        ({"logit_bias": {V: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (1, V)}, "allowed_token_ids"),
        ({"bad_words_ids": ((1,), (2, V))}, r"bad_words_ids\[1\]"),
    ],
)
def test_ids_that_the_logits_do_not_have(setting: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=rf"{name}.*expected a token id from 0 to 8, found 9"):
        Rules(SamplingParams(**setting), [1]).rows(torch.zeros(1, V), [1], ())


def test_a_sequence_without_rules_keeps_its_logits() -> None:
    logits = random_logits(2)
    assert ruled(Sequence(0, [1], SamplingParams(), 9), logits, [3]) is logits
