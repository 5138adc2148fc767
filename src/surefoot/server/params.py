"""From a request's fields to what the engine takes."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from surefoot.errors import InputError, shown
from surefoot.loading.tokenizer import Tokenizer
from surefoot.sampling import MAX_SEED, SamplingParams, StructuredOutput
from surefoot.server.parsing import CLOSE_CALL, CLOSE_THOUGHT, FUNCTION, OPEN_CALL, OPEN_THOUGHT, ChatParser, schemas_of
from surefoot.server.schema import (
    ChatMessage,
    Drafting,
    Effort,
    ResponseFormat,
    Sampling,
    Shared,
    StructuredOutputs,
    TextFormat,
)

SHRINKS = 4  # at most so many characters of a text become one when the tokenizer normalises it
TAKEN = frozenset({"self", "messages", "tools", "add_generation_prompt"})  # of what a chat template is given
JSON_OBJECT = StructuredOutput(json_schema={"type": "object"})


@dataclass(frozen=True)
class Job:
    """What the engine is asked for: `params` for each of the prompts, and how to draft."""

    prompts: tuple[list[int], ...]
    params: SamplingParams
    drafter: str | None = None
    draft_length: int | None = None
    parser: Callable[[], ChatParser] | None = None  # of answers to chats


@dataclass(frozen=True)
class Reader:
    """Turns texts into tokens, for requests of at most `max_len` tokens. `sampling` holds where they say nothing."""

    tokenizer: Tokenizer
    max_len: int
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def longest(self) -> int:
        """The characters of the longest token, at least as many as its bytes."""
        return max(map(len, self.tokenizer.backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt. A text that cannot fit is refused before it is read. Raises InputError."""
        most = self.max_len * self.longest * SHRINKS
        if len(text) > most:
            raise InputError(f"prompt: expected at most {self.max_len} tokens (max_len), "
                             f"found {len(text)} characters, more than they can hold")  # fmt: skip
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except InputError as error:
            raise InputError(str(error).replace("text:", "prompt:", 1)) from error

    def prompts(self, value: str | list[str] | list[int] | list[list[int]]) -> tuple[list[int], ...]:
        """The prompts of a completion. Raises InputError."""
        if isinstance(value, str):
            return (self.encode(value),)
        if not value:
            raise InputError("prompt: expected a text or token ids, found an empty list")
        if isinstance(value[0], int):
            return ([int(token) for token in value if isinstance(token, int)],)
        return tuple(
            self.encode(one) if isinstance(one, str) else list(one) for one in value if not isinstance(one, int)
        )

    def chat(
        self,
        messages: Seq[dict[str, Any]],
        tools: Tools,
        template: Mapping[str, Any] = MappingProxyType({}),
        *,
        continues: bool = False,
    ) -> tuple[list[int], Callable[[], ChatParser]]:
        """The tokens of a chat, up to where the answer begins, and what parses the answer; `template` goes to the chat
        template. `continues`: the answer goes on from the last message, which is the assistant's. A call that has to
        come is begun in the prompt, without thoughts. Raises TokenizerError for what the template refuses, InputError
        for names that are taken and a last message that cannot go on."""
        if taken := template.keys() & TAKEN:
            raise InputError(f"chat_template_kwargs: expected none of {sorted(TAKEN)}, found {sorted(taken)}")
        given: dict[str, Any] = {**template, **({"tools": tools.all} if tools.all else {})}
        if tools.forced is not None:
            given["enable_thinking"] = False
        text = self._up_to_last(messages, given) if continues else self.tokenizer.apply_chat(messages, **given)
        begun = "" if tools.forced is None else self._begun_call(tools.forced)
        if begun and text.rstrip().endswith(OPEN_THOUGHT):  # a template that opens thoughts whatever it is told
            text = f"{text.rstrip()}\n\n{CLOSE_THOUGHT}\n\n"
        text += begun
        thinking = text.rstrip().endswith(OPEN_THOUGHT)

        def parser() -> ChatParser:
            parser = ChatParser(thinking, bool(tools.all), schemas_of(tools.all), f"call_{uuid.uuid4().hex}")
            parser.feed(begun)  # which gives nothing: a call is held back until it is complete
            return parser

        return self.encode(text, add_special_tokens=False), parser

    def _up_to_last(self, messages: Seq[Mapping[str, Any]], given: Mapping[str, Any]) -> str:
        """The text of a chat up to the end of its last message, which a mark behind it shows: the message's own text
        may stand in other places, too, and be part of what the template ends it with."""
        last, mark = str(messages[-1].get("content") or "").rstrip(), uuid.uuid4().hex
        if messages[-1].get("role") == "assistant" and last:
            marked = [*messages[:-1], {**messages[-1], "content": last + mark}]
            text, found, _ = self.tokenizer.apply_chat(marked, add_generation_prompt=False, **given).partition(mark)
            if found:
                return text
        raise InputError("messages: expected a last message of the assistant with a text to continue, found none")

    def _begun_call(self, name: str) -> str:
        """The beginning of a call in the form of the template; of any function, if the name is empty."""
        if FUNCTION in (self.tokenizer.chat_template or ""):
            return f"{OPEN_CALL}\n{FUNCTION}{name}>\n" if name else f"{OPEN_CALL}\n{FUNCTION}"
        start = f'{OPEN_CALL}\n{{"name": "'
        return f'{start}{name}", "arguments": ' if name else start

    def words(self, words: Seq[str]) -> tuple[tuple[int, ...], ...]:
        """Tokens of words that must not come: each at the beginning of a text, and behind a space."""
        found: dict[tuple[int, ...], None] = {}
        for index, word in enumerate(words):
            if not word.strip():
                raise InputError(f"bad_words[{index}]: expected a word, found {shown(word)}")
            for form in (word, " " + word.lstrip()):
                found[tuple(self.encode(form, add_special_tokens=False))] = None
        return tuple(found)


@dataclass(frozen=True)
class Tools:
    """The tools of a request, in OpenAI's form; `forced` is the one that has to be called ("" for any, None for none),
    `single` says that at most one call may come."""

    all: list[dict[str, Any]]
    forced: str | None = None
    single: bool = False

    @property
    def stop(self) -> tuple[str, ...]:
        """Where the answer ends for their sake."""
        return (CLOSE_CALL,) if self.all and self.single else ()


def tools_of(tools: Seq[Mapping[str, Any]], choice: str | None, single: bool, named: str | None = None) -> Tools:
    """The tools by a request's choice: "auto", "none", "required", or `named`. Raises InputError for one to be called
    that there is not."""
    if choice == "none":
        return Tools([])
    names = [tool["function"]["name"] for tool in tools]
    if choice != "required" and named is None:
        return Tools([dict(tool) for tool in tools], single=single)
    if not names or (named is not None and named not in names):
        raise InputError(f"tool_choice: expected one of the tools {names}, found {shown(named or choice, 100)}")
    forced = named if named is not None else names[0] if len(names) == 1 else ""
    return Tools([dict(tool) for tool in tools], forced, single)


def thinking_by(effort: Effort | None) -> dict[str, Any]:
    """For the chat template."""
    return {} if effort is None else {"enable_thinking": effort != "none"}


def to_template(messages: Seq[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content as text, arguments as objects."""
    return [_message(message) for message in messages]


def _message(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role,
                             "content": text + (message.refusal or "")}  # fmt: skip
    plain |= _given(
        name=message.name,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content or message.reasoning,
    )
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": read_arguments(call.function.arguments)}}
            for call in message.tool_calls
        ]  # fmt: skip
    return plain


def read_arguments(text: str) -> Any:
    """A call's arguments as chat templates read them. Raises InputError for what is no JSON."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InputError(f"messages.tool_calls.arguments: expected JSON, found {shown(text, 100)}") from error


def chosen_drafting(request: Drafting) -> dict[str, Any]:
    """What a request says of drafting, for `Job`."""
    return {"drafter": request.drafter, "draft_length": request.draft_length}


def shared(request: Shared, reader: Reader, max_tokens: int | None, room: int) -> dict[str, Any]:
    """What every form has, for `SamplingParams`. What the request does not say is the reader's, and then as OpenAI has
    it: temperature 1, a seed drawn for each request.

    A prompt that leaves no room is refused by the engine, which knows why. Raises InputError for what cannot be."""
    seed = secrets.randbits(63) if request.seed is None else request.seed
    if not -(2**63) <= seed <= MAX_SEED:
        raise InputError(f"seed: expected an integer of 64 bits, found {shown(seed)}")
    bias = None if request.logit_bias is None else {_token(key): value for key, value in request.logit_bias.items()}
    given = _given(
        max_new_tokens=max(1, room) if max_tokens is None else max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=0 if request.top_k == -1 else request.top_k,  # vLLM's word for off
        min_p=request.min_p,
        typical_p=request.typical_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        min_new_tokens=request.min_tokens,
        stop_token_ids=None if request.stop_token_ids is None else tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logit_bias=bias,
        bad_words_ids=None if request.bad_words is None else reader.words(request.bad_words),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        seed=seed % (MAX_SEED + 1),
        acceptance=request.acceptance,
        thinking_budget=request.thinking_budget,
    )
    return {"temperature": 1.0, **reader.sampling, **given}


def sampling(
    request: Sampling,
    reader: Reader,
    *,
    max_tokens: int | None,
    room: int,
    logprobs: int | None,
    response_format: ResponseFormat | None,
    tools_stop: tuple[str, ...] = (),
) -> SamplingParams:
    """The parameters of a chat or a completion. Raises InputError for what cannot be."""
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    given = shared(request, reader, max_tokens, room) | _given(
        stop=(*stop, *tools_stop),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        n=request.n,
        structured=structured(request.structured_outputs, response_format),
    )
    return SamplingParams(**given)


def structured(
    outputs: StructuredOutputs | None, wanted: ResponseFormat | TextFormat | None, field: str = "response_format"
) -> StructuredOutput | None:
    """What the text must be, by either field, of which `field` is the form's own. Raises InputError if both say so."""
    shaped = None if wanted is None else formatted(wanted, field)
    if outputs is None:
        return shaped
    if shaped is not None:
        raise InputError(f"structured_outputs: expected this or {field}, found both")
    choice = None if outputs.choice is None else tuple(outputs.choice)
    return StructuredOutput(json_schema=outputs.json_, regex=outputs.regex, choice=choice, grammar=outputs.grammar)


def formatted(wanted: ResponseFormat | TextFormat, field: str) -> StructuredOutput | None:
    """What a format asks for, which is in `field`. Raises InputError for a schema that is missing."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JSON_OBJECT
    shape = wanted if isinstance(wanted, TextFormat) else wanted.json_schema
    schema = None if shape is None else shape.schema_
    if schema is None:
        raise InputError(f"{field}: expected a json_schema with a schema, found none")
    return StructuredOutput(json_schema=schema)


def each_choice(job: Job) -> list[tuple[list[int], SamplingParams]]:
    """Prompt and parameters of every choice: those of the first prompt, then those of the next."""
    return [(prompt, params) for prompt in job.prompts for params in job.params.choices()]


def with_prompt_logprobs(params: SamplingParams, count: int | None) -> SamplingParams:
    """The parameters with log-probabilities of the prompt, unless they ask for those already."""
    return params if params.prompt_logprobs is not None else replace(params, prompt_logprobs=count)


def _token(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise InputError(f"logit_bias: expected token ids, found {shown(key, 100)}") from None


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
