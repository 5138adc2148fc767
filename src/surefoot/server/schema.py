"""What requests may hold. Unknown fields are refused, so that none is dropped in silence; those in `Ignored` are known
and mean nothing here. The first thing that is wrong with a list is the only one that is looked for: a body may hold a
million of them."""

from __future__ import annotations

import json
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

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


class SchemaFormat(Lenient):
    """The `json_schema` of a response format."""

    name: str | None = None
    schema_: Object | None = Field(None, alias="schema")


class ResponseFormat(Lenient):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


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


class ChatMessage(Lenient):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[Part] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(Lenient):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: Object | None = None


class Tool(Lenient):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


class FunctionName(Lenient):
    """Which function."""

    name: str


class ToolChoice(Lenient):
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


class Block(Lenient):
    """A block of Anthropic's messages."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Object | None = None
    tool_use_id: str | None = None
    content: str | Many[Block] | None = None


class AnthropicMessage(Lenient):
    """One message of Anthropic's form."""

    role: Literal["user", "assistant"]
    content: str | Many[Block]


class AnthropicTool(Lenient):
    """A tool of Anthropic's form."""

    name: str
    description: str | None = None
    input_schema: Object


class Thinking(Lenient):
    """Whether to think, and for how many tokens."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class AnthropicChoice(Lenient):
    """Which tools to call."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Lenient):
    """What the text must be."""

    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class OutputConfig(Lenient):
    """How the answer should be."""

    format: OutputFormat | None = None


class CountRequest(Strict):
    """POST /v1/messages/count_tokens. The last fields mean nothing here."""

    model: str | None = None
    messages: Many[AnthropicMessage] = Field(min_length=1)
    system: str | Many[Block] | None = None
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


class Item(Lenient):
    """An item of the input of /v1/responses: a message, thoughts, a call, or what a call gave."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Many[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Many[Part] | None = None


class TextFormat(Lenient):
    """The format of /v1/responses' text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: Object | None = Field(None, alias="schema")


class TextOptions(Lenient):
    """How the text should be."""

    format: TextFormat | None = None


class Reasoning(Lenient):
    """Whether to think."""

    effort: Effort | None = None


class FlatTool(Lenient):
    """A tool of /v1/responses."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Object | None = None


class FlatChoice(Lenient):
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
