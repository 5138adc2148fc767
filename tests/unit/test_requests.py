"""Requests with more than a length: what is refused, and what comes back beside the tokens."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot import Engine, SamplingParams, speculate
from surefoot.drafters.ngram import NgramDrafter
from surefoot.errors import InputError, TokenizerError
from surefoot.loading.tiny import byte_tokenizer, tiny_config, write_checkpoint
from surefoot.loading.tokenizer import Tokenizer
from surefoot.model.tensors import random_tensors
from surefoot.sampling import StructuredOutput
from surefoot.sequence import TokenLogprobs
from surefoot.types import Scores, Window

THINK, END_THINK, EOS, IM_END = 259, 260, 256, 258


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """266 ids, of which the last five have no token."""
    config = tiny_config(vocab_size=266, eos_token_ids=(EOS, IM_END))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    path = tmp_path_factory.mktemp("text")
    return write_checkpoint(path, config, random_tensors(config, seed=1), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.from_pretrained(folder, drafter="ngram", draft_length=3, max_len=96, slots=2)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Without a tokenizer."""
    config = tiny_config(vocab_size=266)
    path = write_checkpoint(tmp_path_factory.mktemp("bare"), config, random_tensors(config, seed=1))
    return Engine.from_pretrained(path, drafter="mtp", max_len=64)


# ---------------------------------------------------------------- what may be asked for


def processor(tokens: Seq[int], logits: Tensor) -> Tensor:
    return logits


EVERYTHING: dict[str, Any] = {
    "typical_p": 0.5, "repetition_penalty": 1.2, "presence_penalty": -2, "frequency_penalty": 2.0,
    "logit_bias": {7: -100, 3: 2.5}, "bad_words_ids": [[1, 2], (3,)], "min_new_tokens": 4, "allowed_token_ids": {3, 4},
    "logprobs": 0, "prompt_logprobs": 5, "n": 3, "stop": ["a", "bc"], "processors": [processor],
    "structured": StructuredOutput(json_schema={"type": "object"}), "thinking_budget": 0,
}  # fmt: skip


def test_params_are_kept_in_forms_that_cannot_change() -> None:
    params = SamplingParams(**EVERYTHING)
    assert params.logit_bias == ((3, 2.5), (7, -100.0))
    assert params.bad_words_ids == ((1, 2), (3,))
    assert params.allowed_token_ids == (3, 4)
    assert params.stop == ("a", "bc")
    assert params.processors == (processor,)
    same = replace(params)
    assert (same, hash(same)) == (params, hash(params))
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert replace(params, seed=1) != params
    assert SamplingParams(stop="a") == SamplingParams(stop=["a"])  # type: ignore[arg-type]  # all three will do
    with pytest.raises(AttributeError):
        params.n = 1  # type: ignore[misc]
    schema = {"type": "object", "title": "é"}
    wanted = StructuredOutput(json_schema=schema)
    schema["title"] = "changed"
    assert wanted.json_schema == '{"type": "object", "title": "é"}'


@pytest.mark.parametrize(
    "name, values",
    [
        ("typical_p", [0, -1, 1.1, float("nan"), True, "1", None, 10**400]),
        ("repetition_penalty", [0, -1, 101, float("nan"), float("inf"), None, False]),
        ("presence_penalty", [-2.1, 2.1, float("nan"), "a"]),
        ("frequency_penalty", [-2.1, 2.1, float("inf"), [1]]),
        ("logit_bias", [{-1: 1}, {1.5: 1}, {"1": 1}, {True: 1}, {1: 101}, {1: -100.5}, {1: float("nan")}, {1: "a"}, 5,
                        "1:2", [1, 2], [(1, 2), (1, 3)], {1: 10**400}, [(1, 2, 3)], None]),
        ("bad_words_ids", [5, [5], [[]], [[-1]], [[1.5]], "ab", ["ab"], {1: 2}, None]),
        ("min_new_tokens", [-1, 257, 1.0, True, None, 10**5000]),
        ("allowed_token_ids", [(), [], [-1], ["a"], 5, "ab"]),
        ("logprobs", [-1, 1.0, True, "3"]),
        ("prompt_logprobs", [-1, 1.5, False]),
        ("n", [0, -1, 1.5, 2**14 + 1, True, None]),
        ("stop", [5, None, [""], "", [5], ["\ud800"], {"a": 1}]),
        ("processors", [5, [5], "ab", None, processor]),
        ("structured", [5, "regex", {"regex": "a"}]),
        ("thinking_budget", [-1, 1.5, True]),
    ],
)  # fmt: skip
def test_values_that_are_refused(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InputError, match=rf"^{name}"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "wanted, message",
    [
        ({}, "expected one of json_schema, regex, choice, grammar, found \\[\\]"),
        ({"regex": "a", "grammar": "b"}, "found \\['regex', 'grammar'\\]"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": 5}, "json_schema"),
        ({"json_schema": "[1]"}, "json_schema"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema"),
        ({"json_schema": {"a": float("nan")}}, "json_schema"),
        ({"json_schema": "\ud800"}, "json_schema"),
        ({"regex": ""}, "regex"),
        ({"regex": 5}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"grammar": ""}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": "abc"}, "choice"),
        ({"choice": ["a", ""]}, "choice\\[1\\]"),
        ({"choice": ["a", 5]}, "choice\\[1\\]"),
    ],
)
def test_structures_that_are_refused(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        StructuredOutput(**wanted)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"logit_bias": {266: 1.0}}, "logit_bias.*from 0 to 265, found 266"),
        ({"bad_words_ids": ((3, 266),)}, r"bad_words_ids\[0\]\[1\].*found 266"),
        ({"allowed_token_ids": (10**9,)}, "allowed_token_ids"),
        ({"structured": StructuredOutput(regex="((")}, "structured.*unclosed group"),
        ({"structured": StructuredOutput(regex="a"), "ignore_eos": True}, "structured.*end-of-sequence"),
    ],
)
def test_requests_that_an_engine_refuses(engine: Engine, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.generate([[1], [2]], [SamplingParams(), SamplingParams(**setting)])
    assert len(engine.generate([1], SamplingParams(max_new_tokens=2, ignore_eos=True)).token_ids) == 2


@pytest.mark.parametrize("setting", [
    {"stop": "a"}, {"structured": StructuredOutput(regex="a")}, {"thinking_budget": 3},
])  # fmt: skip
def test_what_needs_a_tokenizer(bare: Engine, setting: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match=next(iter(setting))):
        bare.generate([1], SamplingParams(**setting))


def test_thoughts_need_their_tokens(tmp_path: Path) -> None:
    config = tiny_config()
    write_checkpoint(tmp_path, config, random_tensors(config, seed=1), tokenizer=byte_tokenizer())
    with pytest.raises(InputError, match="thinking_budget: expected a tokenizer with <think> and </think>"):
        Engine.from_pretrained(tmp_path, max_len=32).generate([1], SamplingParams(thinking_budget=3))


def test_structured_output_without_its_library(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.engine.request.find_spec", lambda name: None)
    fresh = Engine(engine.target, engine.drafter, 3, tokenizer=engine.tokenizer, eos_token_ids=(EOS,))
    with pytest.raises(InputError, match=r"expected the package llguidance \(pip install 'surefoot\[structured\]'\)"):
        fresh.generate([1], SamplingParams(structured=StructuredOutput(regex="a")))


# ---------------------------------------------------------------- log-probabilities


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    """Before penalties, temperature and filters; the chosen token may stand outside the best."""
    params = SamplingParams(
        max_new_tokens=12, temperature=1.5, top_k=50, seed=3, presence_penalty=1.0, logprobs=4, prompt_logprobs=2,
        ignore_eos=True,
    )  # fmt: skip
    prompt = [104, 101, 108, 108, 111]
    out = engine.generate(prompt, params)
    logs = engine.logits(prompt + out.token_ids).log_softmax(-1)
    assert out.logprobs is not None
    assert [entry.token for entry in out.logprobs] == out.token_ids
    for place, entry in enumerate(out.logprobs):
        row = logs[len(prompt) - 1 + place]
        assert entry.logprob == pytest.approx(row[entry.token].item(), abs=1e-4)
        values, ids = row.sort(descending=True, stable=True)
        assert [token for token, _ in entry.top] == ids[:4].tolist()
        assert [value for _, value in entry.top] == pytest.approx(values[:4].tolist(), abs=1e-4)
    assert any(entry.token not in dict(entry.top) for entry in out.logprobs)
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert [entry.token for entry in out.prompt_logprobs[1:] if entry] == prompt[1:]
    for place, found in enumerate(out.prompt_logprobs[1:]):
        assert found is not None
        assert found.logprob == pytest.approx(logs[place, found.token].item(), abs=1e-4)
        assert [token for token, _ in found.top] == logs[place].topk(2).indices.tolist()


def test_logprobs_of_a_stream_are_those_of_its_tokens(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=9, logprobs=1, prompt_logprobs=0, ignore_eos=True)
    records = list(engine.stream([5, 6, 5, 6], params))
    assert all(len(record.logprobs or ()) == record.emitted for record in records)
    streamed = [entry for record in records for entry in record.logprobs or ()]
    whole = engine.generate([5, 6, 5, 6], params)
    assert streamed == whole.logprobs
    assert all(entry.top[0] == (entry.token, entry.logprob) for entry in streamed)  # greedy takes the best
    assert records[0].sequence.prompt is not None
    assert records[0].sequence.prompt.logprobs == whole.prompt_logprobs


def test_logprobs_that_were_not_asked_for(engine: Engine) -> None:
    out = engine.generate([5], SamplingParams(max_new_tokens=2))
    assert out.logprobs is out.prompt_logprobs is None
    only = engine.generate([5], SamplingParams(max_new_tokens=2, logprobs=0, prompt_logprobs=10**6))
    assert only.logprobs is not None
    assert [entry.top for entry in only.logprobs] == [()] * len(only.token_ids)
    assert only.prompt_logprobs == [None]


def test_ties_among_the_best_go_to_the_lowest_ids() -> None:
    def flat(tokens: list[int], position: int) -> Tensor:
        return torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0]] * len(tokens))

    out = speculate(flat, [0], SamplingParams(max_new_tokens=1, logprobs=4))
    best = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]).log_softmax(-1).tolist()
    assert out.logprobs == [TokenLogprobs(1, best[1], tuple((token, best[token]) for token in (1, 2, 4, 0)))]


def test_prompt_logprobs_of_a_function_are_refused() -> None:
    with pytest.raises(InputError, match="prompt_logprobs: expected a checkpoint's target"):
        speculate(lambda tokens, position: torch.zeros(len(tokens), 3), [0, 1], SamplingParams(prompt_logprobs=1))


# ---------------------------------------------------------------- choices


def test_choices_have_streams_of_their_own(engine: Engine) -> None:
    """cases.md 18: choice i is what a request with the seed i higher gets; seeds go around at 2^64."""
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=2**64 - 2, n=4, ignore_eos=True)
    out = engine.generate([5, 6], params)
    assert [choice.token_ids for choice in out.choices] == [
        engine.generate([5, 6], replace(params, n=1, seed=seed)).token_ids for seed in (2**64 - 2, 2**64 - 1, 0, 1)
    ]
    assert len({tuple(choice.token_ids) for choice in out.choices}) == 4
    first, second = engine.generate([[5, 6], [7]], [params, replace(params, n=1)])
    assert [choice.token_ids for choice in first.choices] == [choice.token_ids for choice in out.choices]
    assert second.choices == [second]
    assert [choice.stats.tokens for choice in out.choices] == [8] * 4


def test_a_stream_has_one_choice(engine: Engine) -> None:
    params = SamplingParams(n=2, max_new_tokens=4, temperature=1.0)
    with pytest.raises(InputError, match=r"n: expected 1 .*, found 2"):
        engine.stream([5], params)
    for choice in params.choices():
        assert list(engine.stream([5], choice))


# ---------------------------------------------------------------- stop strings


class Says:
    """A target that says this text, whatever the prompt's one token."""

    vocab_size, max_len, slots = 259, 200, 1

    def __init__(self, text: str) -> None:
        self.text, self.length = [*text.encode(), EOS], 0

    def prefill(self, slot: int, tokens: Seq[int]) -> Iterator[tuple[int, Tensor | None]]:
        self.length = 0
        return iter(())

    def verify(self, windows: Seq[Window]) -> list[Scores]:
        rows = range(self.length, self.length + len(windows[0].tokens))
        ids = torch.tensor([self.text[min(row, len(self.text) - 1)] for row in rows])
        return [Scores(torch.nn.functional.one_hot(ids, self.vocab_size).float() * 9)]

    def commit(self, slot: int, keep: int) -> None:
        self.length += keep

    def release(self, slot: int) -> None:
        pass


def text_engine(text: str) -> Engine:
    tokenizer = Tokenizer(byte_tokenizer())
    return Engine(Says(text), NgramDrafter(min_ngram=1), 6, tokenizer=tokenizer, eos_token_ids=(EOS,))


WHOLE = "ab ab ab ab é!"


@pytest.mark.parametrize(
    "stop", [(), ("b a",), ("ab é",), ("ab ab ab ab ab",), ("b ab é", "!"), ("é!x", "é"), ("!!",), ("ab ab ab ab é!",)]
)
def test_stop_strings(stop: tuple[str, ...]) -> None:
    """cases.md 5: across draft tokens and characters; what is held back, as for "!!", is given at last."""
    found = min((WHOLE.find(s) + len(s), WHOLE.find(s)) for s in (*stop, WHOLE) if s in WHOLE)
    stopped = any(s in WHOLE for s in stop)
    for engine in (text_engine(WHOLE), text_engine(WHOLE).plain()):
        out = engine.generate([1], SamplingParams(stop=stop))
        assert out.text == (WHOLE[: found[1]] if stopped else WHOLE)
        assert out.token_ids == [*WHOLE[: found[0]].encode(), *([] if stopped else [EOS])]
        assert out.finish_reason == "stop"
        assert engine.draft_length == 0 or len(out.token_ids) < 9 or out.stats.accepted > 0


def test_a_stop_string_and_the_budget() -> None:
    out = text_engine("abcdef").generate([1], SamplingParams(stop=("cd",), max_new_tokens=4))
    assert (out.text, out.finish_reason, len(out.token_ids)) == ("ab", "stop", 4)
    out = text_engine("abcdef").generate([1], SamplingParams(stop=("cd",), max_new_tokens=3))
    assert (out.text, out.finish_reason) == ("abc", "length")  # held back, and flushed
    out = text_engine("abababab").generate([1], SamplingParams(stop=("ba",), min_new_tokens=4))
    assert (out.text, len(out.token_ids)) == ("aba", 5)


# ---------------------------------------------------------------- thoughts, padding, processors


def test_thoughts_that_the_prompt_opens_end_at_the_budget(engine: Engine) -> None:
    """cases.md 6, 7."""
    for budget in (0, 1, 7):
        params = SamplingParams(
            max_new_tokens=20, thinking_budget=budget, ignore_eos=True, bad_words_ids=((END_THINK,),)
        )
        assert engine.generate([104, THINK, 10], params).token_ids.index(END_THINK) == budget
        assert END_THINK not in engine.generate([104, THINK, END_THINK], params).token_ids


def test_ids_without_a_token_never_come(engine: Engine, bare: Engine) -> None:
    params = SamplingParams(max_new_tokens=60, temperature=50.0, ignore_eos=True, stop_token_ids=())
    seen = [set(e.generate([1], replace(params, seed=seed)).token_ids) for e in (engine, bare) for seed in range(4)]
    assert max(set().union(*seen[:4])) <= END_THINK
    assert max(set().union(*seen[4:])) > END_THINK  # without a tokenizer nobody knows


def test_a_draft_ends_where_the_rules_leave_the_drafter_nothing(folder: Path) -> None:
    """Its vocabulary has none of the allowed ids, but the stop ids that every draft vocabulary has."""
    ours = Engine.from_pretrained(folder, drafter="mtp", draft_length=3, max_len=64, draft_vocab=[5, 6])
    for temperature, rule in ((0.0, "coupled"), (1.0, "coupled"), (1.0, "rejection")):
        params = SamplingParams(
            max_new_tokens=9, temperature=temperature, acceptance=rule, allowed_token_ids=(7, 8),  # type: ignore[arg-type]
        )  # fmt: skip
        out = ours.generate([1, 2], params)
        assert set(out.token_ids) <= {7, 8}
        assert (len(out.token_ids), out.stats.proposed) == (9, 0)


def test_plain_decoding_has_no_drafts_from_a_grammar_either(folder: Path) -> None:
    params = SamplingParams(max_new_tokens=9, structured=StructuredOutput(regex="abcdef"))
    out = Engine.from_pretrained(folder, drafter="none", max_len=64).generate([1], params)
    assert (out.text, out.stats.proposed, out.stats.steps) == ("abcdef", 0, 7)


def test_a_processor_of_ones_own(engine: Engine) -> None:
    calls: list[int] = []

    def counting(tokens: Seq[int], logits: Tensor) -> Tensor:
        calls.append(len(tokens))
        return torch.nn.functional.one_hot(torch.tensor(65 + len(tokens) % 4), len(logits)) * 1.0

    params = SamplingParams(max_new_tokens=12, processors=(counting,), ignore_eos=True)
    out = engine.generate([1], params)
    assert out.text == "BCDABCDABCDA"
    assert set(calls) >= set(range(1, 13))
    assert out.stats.accepted > 0


def test_a_row_without_a_token_behind_a_draft_that_is_refused(engine: Engine) -> None:
    """Plain decoding never comes there, so it is no error."""
    dead: list[int] = []
    script = [65 + n**3 // 7 % 2 for n in range(60)]  # what repeats does not go on alike

    def told(tokens: Seq[int], logits: Tensor) -> Tensor:
        row = torch.nn.functional.one_hot(torch.tensor(script[len(tokens)]), len(logits)) * 1.0
        if len(tokens) > 1 and tokens[-1] != script[len(tokens) - 1]:
            dead.append(len(tokens))
            row.fill_(-torch.inf)
        return row

    out = engine.generate([1], SamplingParams(max_new_tokens=40, processors=(told,), ignore_eos=True))
    assert out.token_ids == script[1:41]
    assert dead


def test_processors_that_fail(engine: Engine) -> None:
    def nothing(tokens: Seq[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, -torch.inf if len(tokens) == 3 else 0.0)

    with pytest.raises(InputError, match="parameters: expected them to leave a token at position 3, found none"):
        engine.generate([1], SamplingParams(processors=(nothing,), ignore_eos=True))

    def own_error(tokens: Seq[int], logits: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.generate([1], SamplingParams(processors=(own_error,)))
    assert engine.generate([1], SamplingParams(max_new_tokens=3, ignore_eos=True)).token_ids  # all slots are free
