"""An answer's text in parts: what was said, what was thought, which tools were called.

The forms are those of Qwen's chat templates. Thoughts stand before the answer, up to `</think>`; the template may have
opened them in the prompt. A call is one of

    <tool_call>                                     <tool_call>
    <function=NAME>                                 {"name": NAME, "arguments": {...}}
    <parameter=KEY>                                 </tool_call>
    VALUE
    </parameter>
    </function>
    </tool_call>

(Qwen3.5 and Qwen3-Coder on the left, Qwen3 and Hermes on the right). What a template adds around these parts when it
writes them, line breaks around thoughts and white space around calls, belongs to none of them and is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

OPEN_THOUGHT, CLOSE_THOUGHT = "<think>", "</think>"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
FUNCTION, CLOSE_FUNCTION = "<function=", "</function>"

FUNCTION_HEAD = re.compile(r"\s*<function=([^>\n]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>\s*\Z))", re.DOTALL)
FUNCTION_TAIL = re.compile(r"\s*</function>\s*\Z")
PYTHON_WORDS = {"True": True, "False": False, "None": None}  # as the template writes values of earlier calls

Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ToolPiece:
    """A piece of the call number `index`, from 0. `id` and `name` come with its first piece; all pieces' `arguments`,
    put together, are a JSON object."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class Delta:
    """What a piece of text added, of one kind."""

    content: str = ""
    reasoning: str = ""
    tool: ToolPiece | None = None


class _State(Enum):
    START = auto()  # nothing but white space has come
    THOUGHT = auto()
    GAP = auto()  # behind `</think>`, before the answer
    ANSWER = auto()
    CALL = auto()  # behind `<tool_call>`


class ChatParser:
    """Splits an answer while it comes. All that `feed` and one last `finish` return, put together, depends on the text
    alone, never on the pieces it came in.

    `thinking`: the prompt ended inside `<think>`. `tools`: calls are looked for. `schemas` gives the JSON schema of
    each tool's arguments, by which the values of the first form are typed; without one, they are strings. `call_id`
    begins the ids of calls, which go on with an underscore and the index.

    What may be the beginning of a tag is held back, and so is a call until it is complete: one that is malformed or
    never completed is content, every character of it. Tags inside thoughts are thoughts. Thoughts that the model opens
    itself count at the very beginning only.
    """

    def __init__(
        self, thinking: bool = False, tools: bool = False, schemas: Schemas | None = None, call_id: str = "call"
    ) -> None:
        self._thinking = thinking
        self._tools = tools
        self._schemas = schemas or {}
        self._call_id = call_id
        self._state = _State.START
        self._held = ""  # text that has not been given
        self._space = ""  # white space before the call that `_held` is inside of
        self._scanned = 0  # characters of `_held` that hold no end of the call
        self._calls = 0
        self._fresh = True  # nothing of this part has been given
        self._given: list[Delta] = []

    @property
    def in_reasoning(self) -> bool:
        """Whether a token that comes now would be counted as reasoning."""
        return self._state is _State.THOUGHT or (self._state is _State.START and self._thinking)

    def feed(self, text: str) -> list[Delta]:
        """What the text adds; may be nothing."""
        self._held += text
        return self._advance()

    def finish(self) -> list[Delta]:
        """What was held back, at the end of the text."""
        deltas = self._advance()
        if self._state is _State.START:
            self._enter(_State.THOUGHT if self._thinking else _State.ANSWER)
        while self._state is _State.CALL:
            self._refuse()
            deltas += self._advance()
        if self._state is _State.THOUGHT:
            self._give(reasoning=self._held.lstrip("\n") if self._fresh else self._held)
        elif self._state is _State.ANSWER and not (self._calls and self._fresh and self._held.isspace()):
            self._give(content=self._held)
        self._held = ""
        return _merged(deltas + self._taken())

    def _advance(self) -> list[Delta]:
        steps = {
            _State.START: self._start,
            _State.THOUGHT: self._thought,
            _State.GAP: self._gap,
            _State.ANSWER: self._answer,
            _State.CALL: self._call,
        }
        while self._held and steps[self._state]():
            pass
        return _merged(self._taken())

    # Each reads from `_held` what it can and says whether another state goes on with the rest.

    def _start(self) -> bool:
        text = self._held.lstrip()
        if OPEN_THOUGHT.startswith(text):
            return False
        if text.startswith(OPEN_THOUGHT):
            self._held = text.removeprefix(OPEN_THOUGHT)
            self._enter(_State.THOUGHT)
        else:
            self._enter(_State.THOUGHT if self._thinking else _State.ANSWER)
        return True

    def _thought(self) -> bool:
        if self._fresh:
            self._held = self._held.lstrip("\n")
        text, found, rest = self._held.partition(CLOSE_THOUGHT)
        if found:
            self._give(reasoning=text.rstrip("\n"))
            self._held = rest
            self._enter(_State.GAP)
            return True
        self._keep_from(len(_before_tag(text, CLOSE_THOUGHT).rstrip("\n")), "reasoning")
        return False

    def _gap(self) -> bool:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = _State.ANSWER
        return bool(self._held)

    def _answer(self) -> bool:
        if not self._tools:
            self._keep_from(len(self._held), "content")
            return False
        text, found, rest = self._held.partition(OPEN_CALL)
        if found:
            said = text.rstrip()
            self._give(content=said)
            self._space, self._held, self._scanned = text[len(said) :], rest, 0
            self._state = _State.CALL
            return True
        self._keep_from(len(_before_tag(text, OPEN_CALL).rstrip()), "content")
        return False

    def _call(self) -> bool:
        begin = self._held.lstrip()
        if not begin.startswith("{") and not begin.startswith(FUNCTION):
            return not FUNCTION.startswith(begin) and self._refuse()
        if begin.startswith(FUNCTION) and "\n" in begin and not FUNCTION_HEAD.match(begin):
            return self._refuse()
        while (end := self._held.find(CLOSE_CALL, self._scanned)) >= 0:
            body = self._held[:end]
            whole, call = _xml_call(body, self._schemas) if begin.startswith(FUNCTION) else _json_call(body)
            if whole and call is None:
                return self._refuse()
            if whole and call is not None:
                name, arguments = call
                piece = ToolPiece(self._calls, f"{self._call_id}_{self._calls}", name, arguments)
                self._given.append(Delta(tool=piece))
                self._calls += 1
                self._held = self._held[end + len(CLOSE_CALL) :]
                self._enter(_State.ANSWER)
                return True
            self._scanned = end + 1
        self._scanned = max(self._scanned, len(self._held) - len(CLOSE_CALL) + 1)
        return False

    def _refuse(self) -> bool:
        """The tag was none: it is content, and the text behind it is read as any other."""
        self._give(content=self._space + OPEN_CALL)
        self._state = _State.ANSWER
        return True

    def _enter(self, state: _State) -> None:
        self._state, self._fresh = state, True

    def _give(self, content: str = "", reasoning: str = "") -> None:
        if content or reasoning:
            self._fresh = False
            self._given.append(Delta(content=content, reasoning=reasoning))

    def _keep_from(self, place: int, kind: str) -> None:
        """Give what is held before the place."""
        self._give(**{kind: self._held[:place]})
        self._held = self._held[place:]

    def _taken(self) -> list[Delta]:
        given, self._given = self._given, []
        return given


def parse(
    text: str, thinking: bool = False, tools: bool = False, schemas: Schemas | None = None, call_id: str = "call"
) -> list[Delta]:
    """A whole answer's parts: what a `ChatParser` gives for it in one piece."""
    parser = ChatParser(thinking, tools, schemas, call_id)
    return _merged(parser.feed(text) + parser.finish())


def schemas_of(tools: Seq[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schemas of tools in OpenAI's form, by name; those of entries in another form are left out."""
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    return {
        function["name"]: function["parameters"]
        for function in functions
        if isinstance(function.get("name"), str) and isinstance(function.get("parameters"), Mapping)
    }


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one; calls stay as they are."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else delta
        if merged and not (last.tool or delta.tool) and bool(last.content) == bool(delta.content):
            merged[-1] = replace(last, content=last.content + delta.content, reasoning=last.reasoning + delta.reasoning)
        else:
            merged.append(delta)
    return merged


def _before_tag(text: str, tag: str) -> str:
    """The text without an end that may be the beginning of the tag."""
    size = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    return text[: len(text) - size]


def _json_call(body: str) -> tuple[bool, tuple[str, str] | None]:
    """Whether the body may end here, and the call's name and arguments (None if it is malformed)."""
    try:
        call = json.loads(body, strict=False, parse_constant=_no_number)
        if isinstance(call, dict) and isinstance(call.get("arguments"), dict) and isinstance(call.get("name"), str):
            return True, (call["name"], _json(call["arguments"])) if call["name"] else None
    except json.JSONDecodeError as error:
        return not error.msg.startswith("Unterminated string"), None  # the end tag stands in a string
    except (ValueError, RecursionError):  # a number or a nesting that Python does not take
        pass
    return True, None


def _xml_call(body: str, schemas: Schemas) -> tuple[bool, tuple[str, str] | None]:
    """As `_json_call`; one that has an argument twice is malformed."""
    if not body.rstrip().endswith(CLOSE_FUNCTION):
        return False, None  # the end tag stands in a value
    head = FUNCTION_HEAD.match(body)
    if head is None:
        return True, None
    name, place = head[1].strip(), head.end()
    schema = schemas.get(name, {})
    values: dict[str, Any] = {}
    while parameter := PARAMETER.match(body, place):
        key = parameter[1].strip()
        if not key or key in values:
            return True, None
        values[key] = _typed(parameter[2].removeprefix("\n").removesuffix("\n"), _types(schema, key))
        place = parameter.end()
    if not name or not FUNCTION_TAIL.match(body, place):
        return True, None
    return True, (name, _json(values))


def _typed(text: str, types: frozenset[str]) -> Any:
    """The value that the text is of one of these types; the text itself if it is none."""
    if not types - {"string"}:
        return text
    plain = text.strip()
    try:
        value = PYTHON_WORDS[plain] if plain in PYTHON_WORDS else json.loads(plain, parse_constant=_no_number)
        _json(value)
    except (ValueError, RecursionError):  # no JSON, or more than Python or JSON can hold
        return text
    return value if _types_of(value) & types else text


def _types_of(value: Any) -> set[str]:
    """JSON Schema's names for a value that is not a string."""
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    names = {bool: {"boolean"}, int: {"integer", "number"}, type(None): {"null"}, dict: {"object"}, list: {"array"}}
    return names.get(type(value), set())


def _types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The types that a schema of arguments lets one of them have; none if it does not say."""
    properties = schema.get("properties")
    return frozenset(_allowed(properties.get(key), schema)) if isinstance(properties, Mapping) else frozenset()


def _allowed(part: object, root: Mapping[str, Any]) -> set[str]:
    """The types that a part of the schema names, itself or by parts and references: those are read once each, however
    often they are met, as they may go round in circles."""
    types: set[str] = set()
    left, seen = [part], set[int]()
    while left:
        part = left.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        named = part.get("type")
        types |= {name for name in (named, *_listed(named)) if isinstance(name, str)}
        for value in (*_listed(part.get("enum")), *([part["const"]] if "const" in part else [])):
            types |= {"string"} if isinstance(value, str) else _types_of(value)
        left += [choice for word in ("anyOf", "oneOf", "allOf") for choice in _listed(part.get(word))]
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            found: Any = root
            for step in reference[2:].split("/"):
                found = found.get(step) if isinstance(found, Mapping) else None
            left.append(found)
    return types


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _json(value: object) -> str:
    """JSON that can be sent. Raises ValueError for numbers it has no form for."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, written as an escape
        return json.dumps(value, allow_nan=False)
    return text


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
