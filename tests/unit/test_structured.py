"""Grammars: what they let through, that they can be rolled back, and what is refused with what words."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import models

from surefoot.engine.structured import Grammars, MatcherGrammar
from surefoot.errors import InputError, TokenizerError
from surefoot.loading.checkpoint import find_model
from surefoot.loading.tiny import byte_tokenizer
from surefoot.loading.tokenizer import Tokenizer, require_tokenizer
from surefoot.sampling import SamplingParams, StructuredOutput
from surefoot.verify import Rules

BUNDLED = require_tokenizer(Tokenizer.from_folder(find_model("surefoot-demo")), "the tests")
BYTES = Tokenizer(byte_tokenizer())
END = {id(BUNDLED): (0, 2), id(BYTES): (256,)}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer", "minimum": 0, "maximum": 99},
                   "kind": {"enum": ["a b", "é", "c\n"]}},
    "required": ["name", "n", "kind"],
    "additionalProperties": False,
}  # fmt: skip
FORMS = {
    "schema": StructuredOutput(json_schema=SCHEMA),
    "regex": StructuredOutput(regex=r"[a-c]{2,5}-[0-9]+é?x"),
    "choice": StructuredOutput(choice=("yes", "no", 'a "quoted" one', "a\nline", "yes and no")),
    "lark": StructuredOutput(grammar='start: "<" word ("," word)* ">"\nword: /[ab]{1,3}/'),
    "ebnf": StructuredOutput(grammar='root ::= "<" word ("," word)* ">"\nword ::= [ab] [ab]? [ab]?\n'),
}


def matches(name: str, text: str) -> bool:
    if name == "schema":
        value = json.loads(text)
        return set(value) == {"name", "n", "kind"} and 0 <= value["n"] <= 99 and value["kind"] in ("a b", "é", "c\n")
    if name == "choice":
        assert FORMS["choice"].choice is not None
        return text in FORMS["choice"].choice
    pattern = FORMS["regex"].regex if name == "regex" else "<[ab]{1,3}(,[ab]{1,3})*>"
    assert pattern is not None
    return re.fullmatch(pattern, text) is not None


def grammar(tokenizer: Tokenizer, form: StructuredOutput) -> MatcherGrammar:
    return Grammars(tokenizer, END[id(tokenizer)]).build(form, END[id(tokenizer)])


def walk(tokenizer: Tokenizer, rules: Rules, seed: int, length: int = 400) -> tuple[list[int], bool]:
    """Random tokens that the rules let through, drafts that they may refuse beside them; whether the text ended."""
    source, ends = random.Random(seed), END[id(tokenizer)]
    history = [5]
    while len(history) < length:
        draft = rules.forced(history)[:3] or [source.randrange(tokenizer.vocab_size) for _ in range(3)]
        draft = draft[: rules.cut(history, draft)]
        rows = rules.rows(torch.zeros(len(draft) + 1, tokenizer.vocab_size), history, draft)
        for i, row in enumerate(rows):
            allowed = row.isfinite().nonzero()[:, 0].tolist()
            stops = [token for token in allowed if token in ends]
            token = source.choice(stops if stops and source.random() < 0.5 else allowed)
            history.append(token)
            if token in ends:
                return history[1:-1], True
            if i < len(draft) and token != draft[i]:
                break
    return history[1:], False


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("tokenizer", [BUNDLED, BYTES], ids=["bundled", "bytes"])
def test_what_a_grammar_lets_through_matches_it(name: str, tokenizer: Tokenizer) -> None:
    """cases.md 33, on random choices: a text that ended is one of the language."""
    ended = 0
    for seed in range(12):
        rules = Rules(SamplingParams(), [5], stop_ids=END[id(tokenizer)], grammar=grammar(tokenizer, FORMS[name]))
        tokens, complete = walk(tokenizer, rules, seed)
        text = tokenizer.decode(tokens)
        if complete:
            ended += 1
            assert matches(name, text), text
    assert ended >= 6


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FORMS)), st.integers(0, 10**6), st.lists(st.integers(0, 6), max_size=8))
def test_rolled_back_is_as_before(name: str, seed: int, sizes: list[int]) -> None:
    source, ours, plain = random.Random(seed), grammar(BUNDLED, FORMS[name]), grammar(BUNDLED, FORMS[name])
    for size in sizes:
        before, read = ours.mask(), 0
        for _ in range(size):
            token = source.choice(ours.mask().nonzero()[:, 0].tolist() or [5])
            read += ours.push(token)
            if ours.push(source.randrange(BUNDLED.vocab_size)):
                ours.pop(1)
        ours.pop(read)
        assert torch.equal(ours.mask(), before)
        assert torch.equal(ours.mask(), plain.mask())
        assert (ours.ends(), ours.complete(), ours.forced()) == (plain.ends(), plain.complete(), plain.forced())
        step = source.choice(before.nonzero()[:, 0].tolist() or [5])
        assert ours.push(step) == plain.push(step)


def test_ends_and_forced_tokens() -> None:
    own = grammar(BUNDLED, FORMS["choice"])
    assert own.ends() == ()
    assert not own.push(0)  # a stop id is no text
    assert all(own.push(token) for token in BUNDLED.encode("yes"))
    assert own.ends() == (0, 2)  # though "yes and no" could follow
    assert not own.complete()
    assert own.push(BUNDLED.encode(" and")[0])
    assert own.ends() == ()
    assert BUNDLED.decode(own.forced()) == " no"
    assert all(own.push(token) for token in own.forced())
    assert own.complete()
    assert not own.mask().any()
    assert own.forced() == []
    own = grammar(BUNDLED, FORMS["schema"])
    assert BUNDLED.decode(own.forced()) == '{"name":'  # and a quote, in one token with what follows


def likes_space(form: StructuredOutput) -> str:
    """200 tokens of a model that wants nothing but white space, and then an end."""
    own, tokens = grammar(BUNDLED, form), list[int]()
    while len(tokens) < 200 and not own.complete():
        allowed = own.mask().nonzero()[:, 0].tolist()
        if own.ends():
            break
        tokens.append(next((token for token in allowed if not BUNDLED.decode([token]).strip()), allowed[0]))
        assert own.push(tokens[-1])
    return BUNDLED.decode(tokens)


def test_json_does_not_end_in_white_space_without_end() -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
              "additionalProperties": False}  # fmt: skip
    assert likes_space(StructuredOutput(json_schema=schema)) in ('{"on":true}', '{"on":false}')
    wanted = schema | {"x-guidance": {"whitespace_flexible": True}}
    assert likes_space(StructuredOutput(json_schema=wanted)).strip() == "{"  # the fault, for those who ask for it


def test_ids_without_a_token_may_not_come() -> None:
    own = grammar(BUNDLED, StructuredOutput(regex=r"(?s:.)*"))
    assert len(own.mask()) == BUNDLED.vocab_size
    assert not own.push(BUNDLED.vocab_size)
    rules = Rules(SamplingParams(), [5], stop_ids=(0,), grammar=own)
    rows = rules.rows(torch.zeros(1, BUNDLED.vocab_size + 7), [5], ())
    assert not rows[0, BUNDLED.vocab_size :].isfinite().any()
    assert rows[0, 0].isfinite()  # the empty text is complete


def test_a_stop_id_that_is_text_is_text() -> None:
    """A request's own stop id may be any token; it must not stand behind a complete text as if it were an end."""
    letter = BYTES.encode("x")[0]
    own = Grammars(BYTES, (256,)).build(StructuredOutput(regex="ax?b"), (256, letter))
    assert own.push(BYTES.encode("a")[0])
    assert own.mask()[letter]
    assert own.push(BYTES.encode("b")[0])
    assert own.ends() == (256,)


@pytest.mark.parametrize(
    "wanted, message",
    [
        ({"regex": "(("}, "unclosed group"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
        ({"grammar": "root ::= (("}, ""),
        ({"json_schema": {"type": "nonsense"}}, "Invalid type: nonsense"),
        ({"json_schema": {"type": "string", "not": {"const": "a"}}}, "Unimplemented keys"),
        ({"json_schema": {"$ref": "#/$defs/none"}}, ""),
        ({"json_schema": False}, ""),
    ],
)
def test_grammars_that_are_none(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"structured: expected a grammar that can be compiled, found: .*{message}"):
        grammar(BUNDLED, StructuredOutput(**wanted))


@pytest.mark.parametrize(
    "limits",
    [
        LLParserLimits(step_max_items=20, verbose_errors=False),
        LLParserLimits(max_items_in_row=3, verbose_errors=False),
    ],
)
def test_a_grammar_that_grows_too_complex_is_an_error_of_its_request(limits: LLParserLimits) -> None:
    source = LLMatcher.grammar_from_lark('start: x*\nx: "a" | "a" x | x "a" | x x')
    tokenizer = LLTokenizer(BUNDLED.backend.to_str(), n_vocab=BUNDLED.vocab_size, eos_token=0)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    rules = Rules(SamplingParams(), [5], stop_ids=(0,), grammar=MatcherGrammar(matcher, (0,), tokenizer))
    with pytest.raises(InputError, match=r"expected a grammar of bounded complexity, found: .*items"):
        rules.rows(torch.zeros(4, BUNDLED.vocab_size), [5], BUNDLED.encode("a") * 3)


def test_something_must_be_able_to_end_the_text() -> None:
    with pytest.raises(InputError, match=r"expected an end-of-sequence id .* found stop ids \[100\]"):
        Grammars(BUNDLED, (0,)).build(FORMS["regex"], (100,))


def test_a_tokenizer_that_the_library_does_not_know() -> None:
    words = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(TokenizerError, match="structured: expected a tokenizer that llguidance knows"):
        Grammars(words, ())
