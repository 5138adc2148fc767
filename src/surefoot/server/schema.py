"""What requests may hold. Unknown fields are refused, so that none is dropped in silence; those in `Ignored`, and those
in other objects of which it is said, are known and mean nothing here. What was said earlier (messages, their parts,
calls) comes back from clients with all that any server once put into it: there, unknown fields are passed over, and
known ones that hold what a model would have to see are read or refused. The first thing that is wrong with a list is
the only one that is looked for: a body may hold a million of them."""

from __future__ import annotations

import json
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MOST_STOPS, MOST_WORDS = 64, 1024  # each is looked for at every token
MOST_TOP = 20  # log-probabilities of a position, as OpenAI has it
MOST_FIELDS = 256  # of an object; more than any has
T = TypeVar("T")


def _sendable(value: dict[str, Any]) -> dict[str, Any]:
    """What JSON and UTF-8 can hold: NaN and half surrogate pairs pass Python's reader."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    return value


def _first_wrong(value: object) -> object:
    """A table of numbers, or the first of its entries that is none, for pydantic to refuse."""
    if not isinstance(value, dict):
        return value
    wrong = (key for key, number in value.items() if isinstance(number, bool) or not isinstance(number, (int, float)))
    return next(({key: value[key]} for key in wrong), value)


Many = Annotated[list[T], Field(fail_fast=True)]
Numbers = Annotated[dict[str, float], BeforeValidator(_first_wrong)]
Object = Annotated[dict[str, Any], AfterValidator(_sendable)]
Top = Annotated[int, Field(ge=0, le=MOST_TOP)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Strict(BaseModel):
    """Values of the right type only, and no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: object) -> object:
        """Of too many fields the first, of which some must be unknown."""
        return dict(islice(value.items(), MOST_FIELDS)) if isinstance(value, dict) else value


class Lenient(BaseModel):
    """Values of the right type; other fields are passed over (clients send back what they got from others)."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Kinds(Lenient):
    """One of several kinds, by its `type`. Each has fields of its own in `OWN`, those that it needs, and those that it
    may have; one of another kind's would be dropped."""

    OWN: ClassVar[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {}

    type: str

    @model_validator(mode="after")
    def _own(self) -> Self:
        needed, possible = self.OWN[self.type]
        given = {name for name in type(self).model_fields if name != "type" and getattr(self, name) is not None}
        for name in needed:
            if name not in given:
                raise ValueError(f"{name} in a {self.type}")
        for name in sorted(given - {*needed, *possible}):
            raise ValueError(f"no {name} in a {self.type}")
        return self


class Ignored(Strict):
    """Fields of OpenAI's that say nothing to a server of one model on one's own machine."""

    user: str | None = None
    store: bool | None = None
    metadata: Object | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    moderation: Any = None
    verbosity: str | None = None
    prediction: Any = None


class StructuredOutputs(Strict):
    """vLLM's field: exactly one of these."""

    json_: Object | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None


class Drafting(Strict):
    """Surefoot's own fields."""

    drafter: str | None = None
    draft_length: int | None = None
    acceptance: Literal["coupled", "rejection"] | None = None
    thinking_budget: int | None = None


class StreamOptions(Strict):
    """What a stream has besides."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class Shared(Drafting):
    """Sampling as every form has it: OpenAI's parameters, and vLLM's further ones."""

    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: Numbers | None = None
    bad_words: Annotated[Many[str], Field(max_length=MOST_WORDS)] | None = None
    allowed_token_ids: Many[int] | None = None
    structured_outputs: StructuredOutputs | None = None


class Sampling(Shared, Ignored):
    """The parameters of chats and completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | Annotated[Many[str], Field(max_length=MOST_STOPS)] | None = None
    prompt_logprobs: Top | None = None


class SchemaFormat(Strict):
    """The `json_schema` of a response format. It holds whether it is said to be `strict` or not; a name and a
    description change nothing."""

    name: str | None = None
    description: str | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError("a json_schema only with type json_schema")
        return self


class Part(Lenient):
    """A part of a message's content. Only text is understood."""

    type: Literal["text", "input_text", "output_text", "reasoning_text"]
    text: str


class FunctionCall(Lenient):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str = ""


class ToolCall(Lenient):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


OF_ROLE = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "refusal": "assistant",
    "tool_call_id": "tool",
}  # whose messages have what


class ChatMessage(Lenient):
    """One message of a chat. Thoughts come by either name, that of vLLM's newer answers and that of all others'."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[Part] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _own(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content in a message of the {self.role}")
        for name, role in OF_ROLE.items():
            if getattr(self, name) and self.role != role:
                raise ValueError(f"no {name} in a message of the {self.role}")
        if self.reasoning and self.reasoning_content and self.reasoning != self.reasoning_content:
            raise ValueError("the same reasoning as reasoning_content, or one of them")
        return self


class Function(Strict):
    """A function that may be called. What the model makes of its parameters is its own, `strict` or not."""

    name: str
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = Field(None, exclude=True)


class Tool(Strict):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function
    cache_control: Any = Field(None, exclude=True)  # means nothing here


class FunctionName(Strict):
    """Which function."""

    name: str


class ToolChoice(Strict):
    """The function that has to be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Many[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    response_format: ResponseFormat | None = None
    tools: Many[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    modalities: Many[Literal["text"]] | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions. A prompt is text or token ids, or a list of those."""

    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    logprobs: Top | None = None
    echo: bool | None = None
    best_of: None = None
    suffix: None = None
    response_format: ResponseFormat | None = None


class TextBlock(Lenient):
    """A block of text where there is no other."""

    type: Literal["text"]
    text: str


class Block(Kinds):
    """A block of Anthropic's messages. Nobody here can read redacted thoughts."""

    OWN = {
        "text": (("text",), ()),
        "thinking": (("thinking",), ()),
        "redacted_thinking": ((), ()),
        "tool_use": (("name",), ("id", "input")),
        "tool_result": (("tool_use_id",), ("content", "is_error")),
    }

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Object | None = None
    tool_use_id: str | None = None
    content: str | Many[TextBlock] | None = None
    is_error: bool | None = None


BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "redacted_thinking", "tool_use")}


class AnthropicMessage(Lenient):
    """One message of Anthropic's form."""

    role: Literal["user", "assistant"]
    content: str | Many[Block]

    @model_validator(mode="after")
    def _own(self) -> Self:
        for block in self.content:
            if isinstance(block, Block) and block.type not in BLOCKS[self.role]:
                raise ValueError(f"no {block.type} in a message of the {self.role}")
        return self


class AnthropicTool(Strict):
    """A tool of Anthropic's form. The last fields mean nothing here, as in `Function`."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: Object
    input_examples: Many[Object] | None = None
    allowed_callers: Many[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None

    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None


class Thinking(Strict):
    """Whether to think, for how many tokens, and whether to show it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.type == "disabled" and self.budget_tokens is not None:
            raise ValueError("no budget_tokens with type disabled")
        return self


class AnthropicChoice(Strict):
    """Which tools to call."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name with type tool, and only then")
        return self


class OutputFormat(Strict):
    """What the text must be."""

    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class OutputConfig(Strict):
    """How the answer should be. The model knows no efforts (none is by `Thinking`)."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountRequest(Strict):
    """POST /v1/messages/count_tokens. The last fields mean nothing here."""

    model: str | None = None
    messages: Many[AnthropicMessage] = Field(min_length=1)
    system: str | Many[TextBlock] | None = None
    tools: Many[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    cache_control: Any = None
    context_management: Any = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(Shared, CountRequest):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: Annotated[Many[str], Field(max_length=MOST_STOPS)] | None = None

    diagnostics: Any = None
    inference_geo: str | None = None
    metadata: Object | None = None
    service_tier: str | None = None


class Item(Kinds):
    """An item of the input of /v1/responses: a message, thoughts, a call, or what a call gave. Thoughts that are only
    encrypted or summed up are passed over."""

    OWN = {
        "message": (("role", "content"), ()),
        "function_call": (("name",), ("call_id", "arguments")),
        "function_call_output": (("output",), ("call_id", "name")),
        "reasoning": ((), ("content",)),
    }

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Many[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Many[Part] | None = None


class TextFormat(Strict):
    """The format of /v1/responses' text, as in `ResponseFormat`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.type != "json_schema" and self.schema_ is not None:
            raise ValueError("a schema only with type json_schema")
        return self


class TextOptions(Strict):
    """How the text should be. A verbosity means nothing here."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Strict):
    """Whether to think. Thoughts are given whole, whatever summary is asked for; of earlier ones the model sees what
    its chat template shows."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Literal["auto", "current_turn"] | None = None
    mode: Literal["standard"] | None = None


class FlatTool(Strict):
    """A tool of /v1/responses, as in `Function`."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = Field(None, exclude=True)
    async_: Literal[False] | None = Field(None, alias="async", exclude=True)
    allowed_callers: Many[Literal["direct"]] | None = Field(None, exclude=True)
    defer_loading: Literal[False] | None = Field(None, exclude=True)


class FlatChoice(Strict):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(Shared, Ignored):
    """POST /v1/responses. Nothing is kept between requests."""

    model: str | None = None
    input: str | Many[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tools: Many[FlatTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Top | None = None
    include: Many[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    reasoning: Reasoning | None = None
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    max_tool_calls: Any = None
