"""Every sampling parameter, with every drafter and with none: the same tokens, log-probabilities and end.

Requests of one list decode side by side, each with other parameters; plain decoding has each of them alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot import Engine, Generation, SamplingParams
from surefoot.loading.tiny import byte_tokenizer, tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors
from surefoot.sampling import StructuredOutput
from surefoot.verify import Rules

DRAFTERS = ["ngram", "suffix", "mtp", "mtp+ngram", "mtp+suffix", "draft-model"]
TOKENS = 28
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
VOCAB = 8


def repelled(tokens: Seq[int], logits: Tensor) -> Tensor:
    """A processor that looks two tokens back."""
    return logits - 3 * torch.nn.functional.one_hot(torch.tensor(tokens[-2]), len(logits))


REQUESTS: list[dict[str, Any]] = [
    {},
    {"typical_p": 0.7},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 0.9, "frequency_penalty": 0.2},
    {"logit_bias": {2: -100, 3: 1.5}},
    {"bad_words_ids": ((1,), (5, 6), (4, 4, 4))},
    {"min_new_tokens": 15, "stop_token_ids": (0, 3)},
    {"allowed_token_ids": (1, 4, 6)},
    {"processors": (repelled,)},
    {"logprobs": 3, "repetition_penalty": 1.2},
    {"n": 2, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1, "logit_bias": {0: 1.0},
     "bad_words_ids": ((2, 2),), "min_new_tokens": 9, "stop_token_ids": (1,), "processors": (repelled,), "top_k": 6,
     "top_p": 0.95, "typical_p": 0.9, "min_p": 0.01, "logprobs": 0, "prompt_logprobs": 1},
]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["ok", "n"],
}
THINK, END_THINK = 259, 260  # behind the byte tokenizer's own
TEXT_PROMPTS = [[104, 105, THINK], [104, 105]]
TEXT_REQUESTS: list[dict[str, Any]] = [
    {},  # nothing but padding to leave out
    {"structured": StructuredOutput(json_schema=SCHEMA)},
    {"structured": StructuredOutput(regex="(ab|cd){3,6}x*"), "presence_penalty": 0.3},
    {"structured": StructuredOutput(choice=("yes", "yes, of course", "no")), "logprobs": 2},
    {"structured": StructuredOutput(grammar='root ::= "[" [0-9]+ ("," [0-9]+)* "]"'), "thinking_budget": 6},
    {"thinking_budget": 0},
    {"thinking_budget": 5, "stop_token_ids": (END_THINK,)},
    {"structured": StructuredOutput(regex="[ab]+"), "stop": ("ba", "abba", "aab"), "min_new_tokens": 4},
    {"structured": StructuredOutput(regex="[ab]{20}"), "stop": ("bbbbbbbbbbb",)},
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few tokens and a small embedding: drafts of every kind are sometimes right and sometimes wrong."""
    config = tiny_config(vocab_size=VOCAB)
    tensors = random_tensors(config, seed=2)
    tensors["model.embed_tokens.weight"] *= 0.3
    return write_checkpoint(tmp_path_factory.mktemp("small"), config, tensors)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with tokens for thinking, and five ids without a token."""
    config = tiny_config(vocab_size=266, eos_token_ids=(256,))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    folder = tmp_path_factory.mktemp("text")
    return write_checkpoint(folder, config, random_tensors(config, seed=3), tokenizer=tokenizer)


def engine(folder: Path, drafter: str, draft_length: int, dtype: str, slots: int = 1) -> Engine:
    draft_model = folder if drafter == "draft-model" else None
    return Engine.from_pretrained(
        folder, drafter=drafter, draft_length=draft_length, dtype=dtype, slots=slots, max_len=96,
        draft_model=draft_model,
    )  # fmt: skip


def seen(out: Generation) -> list[Any]:
    """All that a caller sees of a request but its statistics."""
    return [
        (choice.token_ids, choice.finish_reason, choice.logprobs, choice.prompt_logprobs, choice.cut_text)
        for choice in out.choices
    ]


def check(folder: Path, prompts: list[list[int]], requests: list[SamplingParams], dtype: str) -> list[Generation]:
    """Every drafter and draft length sees what plain decoding sees; returns that."""
    plain = engine(folder, "none", 0, dtype)
    expected = [plain.generate(prompt, params) for prompt, params in zip(prompts, requests, strict=True)]
    accepted = dict.fromkeys(DRAFTERS, 0)
    for drafter in DRAFTERS:
        ours = engine(folder, drafter, 1, dtype, slots=4)
        for ours.draft_length in (1, 3, 8):
            for request, out, plainly in zip(requests, ours.generate(prompts, requests), expected, strict=True):
                assert seen(out) == seen(plainly), (drafter, ours.draft_length, request)
                accepted[drafter] += sum(choice.stats.accepted for choice in out.choices)
    assert all(accepted.values()), accepted  # a drafter that is never right would prove little
    return expected


def check_rules(out: Generation, params: SamplingParams) -> None:
    """What the parameters themselves promise of an output."""
    tokens = out.token_ids
    for word in params.bad_words_ids:
        assert not any(tuple(tokens[i : i + len(word)]) == word for i in range(len(tokens)))
    assert params.allowed_token_ids is None or set(tokens) <= set(params.allowed_token_ids)
    assert len(tokens) >= min(params.min_new_tokens, TOKENS)
    for token, bias in dict(params.logit_bias).items():
        assert bias > -100 or token not in tokens


@pytest.mark.parametrize("dtype, temperature", [("float32", 0.0), ("float32", 1.0), ("bfloat16", 1.0)])
def test_parameters(small: Path, dtype: str, temperature: float) -> None:
    """cases.md 13, 14, 15, 18, 19."""
    common = SamplingParams(max_new_tokens=TOKENS, temperature=temperature, seed=5, ignore_eos=True)
    requests = [replace(common, **{"seed": 5 + i, **setting}) for i, setting in enumerate(REQUESTS)]
    expected = check(small, [PROMPT] * len(requests), requests, dtype)
    for out, params in zip(expected, requests, strict=True):
        check_rules(out, params)
    free = engine(small, "none", 0, dtype)
    changed = [
        free.generate(PROMPT, replace(common, seed=params.seed)).token_ids != out.token_ids
        for params, out in zip(requests[1:9], expected[1:9], strict=True)
    ]
    assert sum(changed) >= (7 if temperature else 6)  # greedy decoding has no use for typical_p


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_parameters(text: Path, temperature: float) -> None:
    """cases.md 5, 6, 7, 33: grammars, stop strings, thoughts, ids without a token."""
    common = SamplingParams(max_new_tokens=TOKENS, temperature=temperature)
    requests = [replace(common, **{"seed": i, **setting}) for i, setting in enumerate(TEXT_REQUESTS)] * 2
    prompts = [prompt for prompt in TEXT_PROMPTS for _ in TEXT_REQUESTS]
    for prompt, params, out in zip(prompts, requests, check(text, prompts, requests, "float32"), strict=True):
        assert max(out.token_ids) <= END_THINK
        check_rules(out, params)
        thinking, answer = THINK in prompt, out.token_ids
        if params.thinking_budget is not None and thinking:
            assert out.token_ids.index(END_THINK) <= params.thinking_budget
        if thinking and params.structured is not None:
            if END_THINK not in answer:
                assert params.thinking_budget is None
                continue
            answer = answer[answer.index(END_THINK) + 1 :]
        if params.structured is not None and answer and answer[-1] == 256:
            check_text(params.structured, bytes(answer[:-1]).decode())


def check_text(wanted: StructuredOutput, text: str) -> None:
    if wanted.choice is not None:
        assert text in wanted.choice
    if wanted.json_schema is not None:
        assert isinstance(json.loads(text)["ok"], bool)
    if wanted.grammar is not None:
        assert all(isinstance(value, str) for value in text[1:-1].split(","))


def test_a_grammar_is_drafted_for_free(text: Path) -> None:
    """What a grammar prescribes is a draft for the n-gram drafter, which has nothing to copy."""
    ours = engine(text, "ngram", 4, "float32")
    params = SamplingParams(max_new_tokens=30, structured=StructuredOutput(choice=("a long sentence", "nothing")))
    records = list(ours.stream([104], params))
    assert any(record.draft.source == "grammar" and record.accepted == 4 for record in records)
    assert len(records) < 8


def test_rejection_keeps_the_rules(small: Path) -> None:
    """Under the p/q rule tokens differ between drafters, but not between batches, and the rules hold."""
    common = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, acceptance="rejection", ignore_eos=True)
    requests = [replace(common, **{"seed": i, **setting}) for i, setting in enumerate(REQUESTS)]
    for drafter in DRAFTERS:
        together = engine(small, drafter, 3, "float32", slots=3).generate([PROMPT] * len(requests), requests)
        alone = engine(small, drafter, 3, "float32")
        for out, params in zip(together, requests, strict=True):
            assert seen(alone.generate(PROMPT, params)) == seen(out)
            check_rules(out, params)


def test_control_rules_that_do_not_see_the_draft_are_noticed(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cases.md 14: what `check` would say of an engine that counts emitted tokens only."""
    requests = [
        SamplingParams(max_new_tokens=TOKENS, repetition_penalty=penalty, ignore_eos=True) for penalty in (1, 1.5)
    ]
    check(small, [PROMPT] * 2, requests, "float32")
    own = Rules.rows

    def blind(self: Rules, logits: Tensor, history: Seq[int], draft: Seq[int]) -> Tensor:
        return torch.cat([own(self, row[None], history, ()) for row in logits])

    monkeypatch.setattr(Rules, "rows", blind)
    with pytest.raises(AssertionError, match="SamplingParams"):
        check(small, [PROMPT] * 2, requests, "float32")
