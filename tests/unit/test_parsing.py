"""Thoughts and tool calls in an answer's text, whatever the pieces it comes in."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.server.parsing import ChatParser, Delta, parse, schemas_of

XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "metric": {"type": "boolean"},
        "where": {"$ref": "#/$defs/Place"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "level": {"enum": [1, 2, 3]},
        "unit": {"enum": ["C", "F"]},
        "loop": {"$ref": "#/properties/loop"},
    },
    "$defs": {"Place": {"type": "object"}},
}
SCHEMAS = {"get_weather": SCHEMA}


def together(deltas: list[Delta]) -> dict[str, Any]:
    """All pieces of one kind put together, as a client does."""
    calls: list[dict[str, str]] = []
    for delta in deltas:
        assert sum((bool(delta.content), bool(delta.reasoning), delta.tool is not None)) == 1, "one kind in each"
        if (piece := delta.tool) is not None:
            if piece.index == len(calls):
                calls.append({"id": piece.id or "", "name": piece.name or "", "arguments": ""})
            calls[piece.index]["arguments"] += piece.arguments
    return {
        "content": "".join(delta.content for delta in deltas),
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "calls": calls,
    }


def whole(text: str, thinking: bool = False, tools: bool = True) -> dict[str, Any]:
    return together(parse(text, thinking, tools, SCHEMAS))


def streamed(pieces: list[str], thinking: bool = False, tools: bool = True) -> dict[str, Any]:
    parser = ChatParser(thinking, tools, SCHEMAS)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return together(deltas + parser.finish())


def arguments(value: str, key: str) -> object:
    """What one argument's text becomes."""
    body = f"<tool_call>\n<function=get_weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = whole(body)["calls"]
    found: dict[str, object] = json.loads(call["arguments"])
    return found[key]


class TestThoughts:
    def test_opened_by_the_prompt(self) -> None:
        answer = whole("Let me see.\n\nYes.\n</think>\n\nHello", thinking=True)
        assert answer == {"content": "Hello", "reasoning": "Let me see.\n\nYes.", "calls": []}

    @pytest.mark.parametrize("thinking", [False, True])
    def test_opened_by_the_model(self, thinking: bool) -> None:
        answer = whole("\n<think>\nHm.\n</think>\n\nHello", thinking)
        assert (answer["content"], answer["reasoning"]) == ("Hello", "Hm.")

    def test_never_closed(self) -> None:
        answer = whole("I wonder </thi", thinking=True)
        assert (answer["content"], answer["reasoning"]) == ("", "I wonder </thi")

    def test_empty(self) -> None:
        assert whole("\n\n</think>\n\nHello", thinking=True) == {"content": "Hello", "reasoning": "", "calls": []}

    def test_tags_elsewhere_are_text(self) -> None:
        text = "The tag <think> opens, </think> closes.\n"
        assert whole(text)["content"] == text

    def test_calls_inside_are_thoughts(self) -> None:
        answer = whole(f"Perhaps {XML}?\n</think>\n\nNo.", thinking=True)
        assert answer == {"content": "No.", "reasoning": f"Perhaps {XML}?", "calls": []}

    def test_comes_at_once(self) -> None:
        parser = ChatParser(thinking=True)
        assert parser.feed("One two") == [Delta(reasoning="One two")]
        assert parser.feed(" three\n</th") == [Delta(reasoning=" three")]
        assert parser.in_reasoning
        assert parser.feed("ink>Four") == [Delta(content="Four")]
        assert not parser.in_reasoning

    def test_case_6_reasoning_tokens_are_no_more_than_all(self) -> None:
        """The end of thinking inside a draft: the tokens of a step are fed one by one, those before the end count."""
        steps = [["I", " think"], [" so", "</think>", "\n\n", "Yes"], ["."]]
        parser = ChatParser(thinking=True)
        count = 0
        for token in (token for step in steps for token in step):
            count += parser.in_reasoning
            parser.feed(token)
        assert count == 4  # the closing tag is the last of them


class TestCalls:
    @pytest.mark.parametrize("text", [XML, HERMES])
    def test_both_forms(self, text: str) -> None:
        answer = whole(f"I will look.\n\n{text}\n")
        (call,) = answer["calls"]
        assert answer["content"] == "I will look."
        assert (call["id"], call["name"]) == ("call_0", "get_weather")
        assert json.loads(call["arguments"]) == {"city": "Paris", "days": 3}

    def test_several(self) -> None:
        answer = whole(f"Look.\n</think>\n\n{XML}\n{HERMES}\nThat is all.", thinking=True)
        assert [call["id"] for call in answer["calls"]] == ["call_0", "call_1"]
        assert (answer["reasoning"], answer["content"]) == ("Look.", "\nThat is all.")

    def test_not_looked_for_without_tools(self) -> None:
        assert whole(f"Hello\n{XML}\n", tools=False) == {"content": f"Hello\n{XML}\n", "reasoning": "", "calls": []}

    def test_no_arguments(self) -> None:
        for text in (
            "<tool_call>\n<function=now>\n</function>\n</tool_call>",
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        ):
            assert whole(text)["calls"] == [{"id": "call_0", "name": "now", "arguments": "{}"}]

    def test_values_keep_their_lines(self) -> None:
        value = "def f():\n\n    return '</tool_call>' + '</parameter>' + '</function>'\n"
        assert arguments(value, "city") == value
        call = json.dumps({"name": "write", "arguments": {"text": "a</tool_call>b"}})
        assert json.loads(whole(f"<tool_call>{call}</tool_call>")["calls"][0]["arguments"]) == {
            "text": "a</tool_call>b"
        }

    @pytest.mark.parametrize(
        ("key", "text", "expected"),
        [
            ("city", "3", "3"),
            ("city", "null", "null"),
            ("city", " Paris ", " Paris "),
            ("days", "3", 3),
            ("days", "three", "three"),
            ("days", "3.0", 3.0),
            ("days", "true", "true"),
            ("ratio", "0.5", 0.5),
            ("ratio", "1e999", "1e999"),
            ("ratio", "NaN", "NaN"),
            ("metric", "true", True),
            ("metric", "False", False),
            ("where", '{"a": [1, null]}', {"a": [1, None]}),
            ("tags", '["a", "ü"]', ["a", "ü"]),
            ("note", "None", None),
            ("note", "none of it", "none of it"),
            ("level", "2", 2),
            ("unit", "C", "C"),
            ("loop", "3", "3"),
            ("unheard", "3", "3"),
        ],
    )
    def test_values_are_typed_by_the_schema(self, key: str, text: str, expected: object) -> None:
        found = arguments(text, key)
        assert (found, type(found)) == (expected, type(expected))

    @pytest.mark.parametrize(
        "text",
        [
            "<tool_call>",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city"',
            "<tool_call>\n<function=get_weather>\nParis\n</function>\n</tool_call>",
            "<tool_call>\n<function=get_weather\n</function>\n</tool_call>",
            "<tool_call>\n<function=>\n</function>\n</tool_call>",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>\n"
            "</tool_call>",
            '<tool_call>\n{"name": "get_weather"}\n</tool_call>',
            '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": "{}"}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": {"x": NaN}}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": {"x": 1e999}}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": {}} and more\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": {"x": ' + "[" * 5000 + "}}</tool_call>",
            '<tool_call>\n{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
            "The <tool_call> tag.",
        ],
        ids=lambda text: text[:60],
    )
    def test_malformed_ones_are_content(self, text: str) -> None:
        text = f"So:\n\n{text} \n"
        assert whole(text) == {"content": text, "reasoning": "", "calls": []}
        assert streamed(list(text)) == whole(text)

    def test_a_good_one_behind_a_bad_one(self) -> None:
        answer = whole(f'<tool_call>\n{{"name": "a\n</tool_call>\n{HERMES}')
        assert answer["content"] == '<tool_call>\n{"name": "a\n</tool_call>'
        assert [call["name"] for call in answer["calls"]] == ["get_weather"]

    def test_prose_about_the_tag_is_not_held_back(self) -> None:
        parser = ChatParser(tools=True)
        assert together(parser.feed("A <tool_call> is"))["content"] == "A <tool_call> is"

    def test_arguments_can_be_sent(self) -> None:
        (call,) = whole('<tool_call>{"name": "f", "arguments": {"x": "\\ud800", "y": "ü"}}</tool_call>')["calls"]
        assert call["arguments"].encode()
        assert json.loads(call["arguments"])["y"] == "ü"

    def test_schema_that_refers_to_itself_many_times(self) -> None:
        """Each part is read once: thirty ways at every depth would never end."""
        again: list[Any] = [{"$ref": "#/$defs/x"}] * 30
        chain = {f"c{n}": {"$ref": f"#/$defs/c{n + 1}"} for n in range(3000)} | {"c3000": {"type": "integer"}}
        properties = {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/$defs/c0"}}
        schema = {"properties": properties, "$defs": {"x": {"anyOf": again, "type": "boolean"}, **chain}}
        text = ("<tool_call>\n<function=f>\n<parameter=a>\ntrue\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
                "</function>\n</tool_call>")  # fmt: skip
        (delta,) = parse(text, tools=True, schemas={"f": json.loads(json.dumps(schema))})
        assert delta.tool is not None
        assert json.loads(delta.tool.arguments) == {"a": True, "b": 3}

    @pytest.mark.parametrize("schema", [{}, {"properties": 3}, {"properties": {"a": {"type": 3, "anyOf": 4}}}])
    def test_odd_schemas(self, schema: dict[str, Any]) -> None:
        body = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        (call,) = together(parse(body, False, True, {"f": schema}))["calls"]
        assert call["arguments"] == '{"a": "1"}'

    def test_schemas_of_tools(self) -> None:
        tools: list[dict[str, Any]] = [
            {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
            {"type": "other"},
        ]
        assert schemas_of([*tools, {"function": {"name": "g"}}]) == {"f": SCHEMA}


PARTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=city>",
    "</parameter>", "\n", "\n\n", " ", "<", "Hello", "{", '"', '{"name": "f", "arguments": {}}', XML, HERMES, "ü",
]  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('aü<\n"{'),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


class TestAnyPieces:
    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(TEXTS, st.lists(st.integers(0, 200), max_size=8), st.booleans(), st.booleans())
    def test_case_32_streamed_is_unstreamed(self, text: str, cuts: list[int], thinking: bool, tools: bool) -> None:
        places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        pieces = [text[start:end] for start, end in pairwise(places)]
        assert streamed(pieces, thinking, tools) == whole(text, thinking, tools)
        assert streamed(list(text), thinking, tools) == whole(text, thinking, tools)

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<")), st.booleans())
    def test_plain_text_passes_unchanged(self, text: str, tools: bool) -> None:
        assert whole(text, tools=tools) == {"content": text, "reasoning": "", "calls": []}

    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(TEXTS.filter(lambda text: not text.lstrip().startswith("<think>")))
    def test_nothing_is_lost(self, text: str) -> None:
        """Without calls, an answer is its text."""
        answer = whole(text)
        if not answer["calls"]:
            assert answer["content"] == text

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.dictionaries(st.sampled_from("abc"), VALUES), st.integers(1, 30))
    def test_json_arguments_come_back(self, given_arguments: dict[str, Any], size: int) -> None:
        text = "<tool_call>\n" + json.dumps({"name": "f", "arguments": given_arguments}) + "\n</tool_call>"
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        (call,) = streamed(pieces)["calls"]
        assert json.loads(call["arguments"]) == given_arguments

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "</" not in text))
    def test_strings_of_the_first_form_come_back(self, value: str) -> None:
        assert arguments(value, "city") == value
