"""Every form of the server against a model whose answers are known: what a stream says is what the whole says, calls
and thoughts go out and come back, and every parameter is taken everywhere. By the stock clients."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import httpx2
import openai
import pytest

from surefoot import Engine
from surefoot.server.backend import Backend
from surefoot.server.messages import Messages
from surefoot.server.openai import Chat
from surefoot.server.params import Reader, Tools
from surefoot.server.schema import ChatRequest, MessagesRequest
from tests.reciter import TURNS, WEATHER, Reciter, reciting_tokenizer
from tests.server import MODEL, Live, serving

GREETING, PARIS_JSON = "Hello, wörld! 世界 <b>", '{"city": "Paris", "days": 3}'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
FLAT: list[Any] = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}]
ANTHROPIC: list[Any] = [{"name": "weather", "description": "of a city", "input_schema": WEATHER}]
CHAT = "/v1/chat/completions"
READS = cast("Backend", SimpleNamespace(reader=Reader(reciting_tokenizer(), 4096)))


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(Reciter(TURNS).engine()) as live:
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], **options)


def tell(claude: anthropic.Anthropic, text: str, **options: Any) -> Any:
    options = {"max_tokens": 500, **options}
    return claude.messages.create(model=MODEL, messages=[{"role": "user", "content": text}], **options)


def post(live: Live, path: str, body: Any) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.post(live.url + path, content=content, headers={"content-type": "application/json"}, timeout=60)


def gathered(stream: Any) -> tuple[str, str, list[tuple[str, str]], list[str]]:
    """Text, thoughts, calls and finish reasons of a stream of chunks."""
    said = thought = ""
    calls: dict[int, list[str]] = {}
    reasons = []
    for chunk in stream:
        for choice in chunk.choices:
            said += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                known = calls.setdefault(call.index, ["", ""])
                known[0] += call.function.name or ""
                known[1] += call.function.arguments or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return said, thought, [(name, arguments) for name, arguments in calls.values()], reasons


def blocks(message: Any) -> list[Any]:
    return [
        (block.type, block.name, block.input) if block.type == "tool_use"
        else (block.type, block.text if block.type == "text" else block.thinking)
        for block in message.content
    ]  # fmt: skip


def items(response: Any) -> list[tuple[str, ...]]:
    return [
        (item.type, item.name, item.arguments) if item.type == "function_call"
        else (item.type, *(part.text for part in item.content))
        for item in response.output
    ]  # fmt: skip


# ---------------------------------------------------------------- a stream says what the whole says


@pytest.mark.parametrize("text", TURNS)
def test_case_32_streams(client: openai.OpenAI, claude: anthropic.Anthropic, text: str) -> None:
    whole = ask(client, text, tools=TOOLS).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    thoughts = getattr(whole.message, "reasoning_content", "")
    told = gathered(ask(client, text, tools=TOOLS, stream=True))
    assert told == (whole.message.content or "", thoughts, calls, [whole.finish_reason])

    message = tell(claude, text, tools=ANTHROPIC)
    with claude.messages.stream(
        model=MODEL, max_tokens=500, messages=[{"role": "user", "content": text}], tools=ANTHROPIC
    ) as stream:
        final = stream.get_final_message()
    assert blocks(final) == blocks(message)
    assert (final.stop_reason, final.usage.output_tokens) == (message.stop_reason, message.usage.output_tokens)

    response = client.responses.create(model=MODEL, input=text, tools=FLAT)
    with client.responses.stream(model=MODEL, input=text, tools=FLAT) as events:
        numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
        assert numbers == sorted(numbers)
        assert items(events.get_final_response()) == items(response)


def test_case_6_thoughts_are_among_the_tokens(client: openai.OpenAI) -> None:
    for text in TURNS:
        for budget in (1, 2, 5, 9, 1000):
            usage = ask(client, text, max_tokens=budget).usage
            assert usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens <= budget


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_come(client: openai.OpenAI, choice: Any) -> None:
    whole = ask(client, "forced", tools=TOOLS, tool_choice=choice).choices[0]
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", PARIS_JSON)
    told = gathered(ask(client, "forced", tools=TOOLS, tool_choice=choice, stream=True))
    assert told == ("", "", [("weather", PARIS_JSON)], ["tool_calls"])


def test_a_call_that_must_come_in_the_other_forms(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    for flat in ("required", {"type": "function", "name": "weather"}):
        response = client.responses.create(model=MODEL, input="forced", tools=FLAT, tool_choice=flat)  # type: ignore[call-overload]  # both are
        assert items(response) == [("function_call", "weather", PARIS_JSON)]
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        assert blocks(tell(claude, "forced", tools=ANTHROPIC, tool_choice=choice)) == [
            ("tool_use", "weather", json.loads(PARIS_JSON))]  # fmt: skip


def test_a_call_of_a_tool_that_is_not_there(client: openai.OpenAI) -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, "forced", **{"tool_choice": "required", **options})
        assert caught.value.param == "tool_choice"


def test_one_call_at_a_time(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    assert len(ask(client, "two", tools=TOOLS).choices[0].message.tool_calls) == 2
    whole = ask(client, "two", tools=TOOLS, parallel_tool_calls=False).choices[0]
    told = gathered(ask(client, "two", tools=TOOLS, parallel_tool_calls=False, stream=True))
    assert [call.function.arguments for call in whole.message.tool_calls] == [PARIS_JSON]
    assert told[2:] == ([("weather", PARIS_JSON)], ["tool_calls"])
    message = tell(claude, "two", tools=ANTHROPIC, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert (len(message.content), message.stop_reason, message.stop_sequence) == (1, "tool_use", None)
    assert len(client.responses.create(model=MODEL, input="two", tools=FLAT, parallel_tool_calls=False).output) == 1


def test_turns_with_tools_go_back(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    first = ask(client, "weather?", tools=TOOLS).choices[0].message
    history: list[Any] = [
        {"role": "user", "content": "weather?"},
        first,
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"},
        {"role": "user", "content": "hello"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == GREETING

    response = client.responses.create(model=MODEL, input="weather?", tools=FLAT)
    call = response.output[-1]
    assert call.type == "function_call"
    history = [{"role": "user", "content": "weather?"}, *(item.model_dump() for item in response.output),
               {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
               {"role": "user", "content": "hello"}]  # fmt: skip
    assert client.responses.create(model=MODEL, input=history, tools=FLAT).output_text == GREETING

    message = tell(claude, "weather?", tools=ANTHROPIC)
    result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "sunny"}
    history = [{"role": "user", "content": "weather?"}, {"role": "assistant", "content": message.content},
               {"role": "user", "content": [result, {"type": "text", "text": "hello"}]}]  # fmt: skip
    again = claude.messages.create(model=MODEL, max_tokens=500, messages=history, tools=ANTHROPIC)
    assert blocks(again)[-1] == ("text", GREETING)


def test_items_become_the_messages_of_a_chat(live: Live) -> None:
    """The same prompt in both forms of OpenAI's."""
    call = {"name": "weather", "arguments": '{"city": "Paris"}'}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.",
         "tool_calls": [{"id": "c", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "user", "content": "hello"},
    ]  # fmt: skip
    listed = [
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c", **call},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "sunny"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    ]
    chat = post(live, CHAT, {"messages": list(messages)}).json()
    response = post(live, "/v1/responses", {"input": listed, "instructions": "Be kind."}).json()
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


# ---------------------------------------------------------------- thoughts, beginnings, scores


def test_thinking_can_be_left_out(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    said = "one two three four five"
    assert ask(client, "count", reasoning_effort="none").choices[0].message.content == said
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(client, "count", extra_body=off).choices[0].message.content == said
    assert client.responses.create(model=MODEL, input="count", reasoning={"effort": "none"}).output_text == said
    assert blocks(tell(claude, "count", thinking={"type": "disabled"})) == [("text", said)]


def test_an_answer_that_is_begun_is_gone_on_with(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    begun = TURNS["count"].partition("three")[0].rstrip()
    history: list[Any] = [{"role": "user", "content": "count"}, {"role": "assistant", "content": begun}]
    answer = client.chat.completions.create(model=MODEL, messages=history, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content == " three four five"
    message = claude.messages.create(model=MODEL, max_tokens=100, messages=history)
    assert blocks(message) == [("text", " three four five")]
    with pytest.raises(openai.BadRequestError):
        ask(client, "count", extra_body={"continue_final_message": True})


@pytest.mark.parametrize("begun", ["<", "|", "im", "end", "im_end", "assistant", ">\n", "<|im_end|>"])
def test_what_is_gone_on_with_may_be_part_of_the_templates_end(begun: str) -> None:
    reader = Reader(reciting_tokenizer(), 2048)
    chat = [{"role": "user", "content": "count"}, {"role": "assistant", "content": begun}]
    prompt, _ = reader.chat(chat, Tools([]), continues=True)
    whole = reader.tokenizer.apply_chat([{"role": "user", "content": "count"}, {"role": "assistant", "content": "xyz"}],
                                        add_generation_prompt=False)  # fmt: skip
    text = whole.rpartition("xyz")[0] + begun.rstrip()
    assert prompt == reader.encode(text, add_special_tokens=False)


def test_which_stop_string_ended_it(client: openai.OpenAI) -> None:
    """One that came before `min_tokens` does not count, and is not named."""
    fields = {"min_tokens": 4, "chat_template_kwargs": {"enable_thinking": False}}
    choice = ask(client, "count", stop=["n", "four"], extra_body=fields).choices[0]
    assert (choice.message.content, choice.stop_reason) == ("one two three ", "four")


def test_counts_tokens(claude: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    counted = claude.messages.count_tokens(model=MODEL, messages=messages, tools=ANTHROPIC, system="Be kind.")
    assert counted.input_tokens == tell(claude, "hello", tools=ANTHROPIC, system="Be kind.").usage.input_tokens


def test_log_probabilities_of_responses(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "count", "reasoning": {"effort": "none"}, "top_logprobs": 1,
                             "include": ["message.output_text.logprobs"]}  # fmt: skip
    whole = client.responses.create(**asked)
    *_, last = client.responses.create(**asked, stream=True)
    for response in (whole, last.response):
        entries = response.output[0].content[0].logprobs
        assert "".join(entry.token for entry in entries) == "one two three four five<|im_end|>"
        assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 1 for entry in entries)


# ---------------------------------------------------------------- parameters everywhere

EVERYWHERE = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "typical_p": 0.95, "repetition_penalty": 1.01,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": -100}, "bad_words": ["zebra"],
    "min_tokens": 2, "stop_token_ids": [3], "ignore_eos": False, "seed": 5, "acceptance": "rejection",
    "drafter": "none", "draft_length": 0, "thinking_budget": 500, "allowed_token_ids": list(range(264)),
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50},
}


@pytest.mark.parametrize("path", FORMS)
def test_every_form_takes_every_parameter(live: Live, path: str) -> None:
    answer = post(live, path, FORMS[path] | EVERYWHERE)
    assert answer.status_code == 200, answer.text
    wrong = {"top_p": 2, "top_k": -2, "min_p": 2, "typical_p": 0, "repetition_penalty": 0, "presence_penalty": 3,
             "frequency_penalty": -3, "logit_bias": {"5": 101}, "bad_words": [""], "min_tokens": -1, "draft_length": 99,
             "stop_token_ids": [-1], "acceptance": "no", "drafter": "no", "thinking_budget": -1, "temperature": -1,
             "allowed_token_ids": [], "structured_outputs": {}}  # fmt: skip
    for name, value in wrong.items():
        answer = post(live, path, FORMS[path] | {name: value})
        assert answer.status_code == 400, name
        assert name in answer.json()["error"]["message"]


def test_structured_output_in_every_form() -> None:
    pytest.importorskip("llguidance")
    schema = {"enum": [7]}
    engine = Engine.from_pretrained(MODEL, drafter="mtp", slots=2, max_len=256)
    with serving(engine) as demo:
        asked = {
            "input": "x",
            "temperature": 0,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
        }
        response = post(demo, "/v1/responses", asked).json()
        assert json.loads(response["output"][0]["content"][0]["text"]) == 7
        message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "temperature": 0}
        wanted = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        for extra in (wanted, {"structured_outputs": {"json": schema}}):
            answer = post(demo, "/v1/messages", message | extra).json()
            assert json.loads(answer["content"][0]["text"]) == 7


@pytest.mark.parametrize("body", [
    b'{"input": "a", "metadata": {"a": NaN}}', b'{"input": "a", "metadata": {"a": "\\ud800"}}',
    b'{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"a": Infinity}}]}',
    b'{"input": "a", "top_logprobs": 100000}', b'{"input": "a", "conversation": "c"}',
])  # fmt: skip
def test_what_could_not_be_answered_is_refused(live: Live, body: bytes) -> None:
    assert post(live, "/v1/responses", body).status_code == 400


# ---------------------------------------------------------------- fields in fields

USER: dict[str, Any] = {"role": "user", "content": "hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
SCHEMA = {"type": "object"}
INSIDE: list[tuple[str, dict[str, Any], str]] = [  # what is refused, and how the message begins
    (CHAT, {"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}}, "response_format: expected"),
    (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema: expected no such"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "max": 3}}},
     "response_format.json_schema.max: expected no such"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format: expected"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "returns": SCHEMA}}]},
     "tools.0.function.returns: expected no such"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type: expected"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather", "strict": True}}},
     "tool_choice.function.strict: expected no such"),
    (CHAT, {"messages": [USER | {"tool_calls": [CALL]}]}, "messages.0: expected no tool_calls in a message of"),
    (CHAT, {"messages": [USER | {"reasoning": "Hm."}]}, "messages.0: expected no reasoning in a message of the user"),
    (CHAT, {"messages": [USER | {"tool_call_id": "c"}]}, "messages.0: expected no tool_call_id in a message of the"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0: expected content in a message of the user"),
    (CHAT, {"messages": [{"role": "assistant", "audio": {"id": "a"}}, USER]}, "messages.0.audio: expected None"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": {}}, USER]}, "messages.0.function_call: expected None"),
    (CHAT, {"messages": [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}, USER]},
     "messages.0: expected the same reasoning as reasoning_content"),
    (CHAT, {"stream_options": {"include_costs": True}}, "stream_options.include_costs: expected no such"),
    ("/v1/responses", {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}, "text.format: expected a"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format: expected"),
    ("/v1/responses", {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
     "structured_outputs: expected this or text.format"),
    ("/v1/responses", {"text": {"colour": "red"}}, "text.colour: expected no such"),
    ("/v1/responses", {"reasoning": {"context": "all_turns"}}, "reasoning.context: expected"),
    ("/v1/responses", {"reasoning": {"mode": "pro"}}, "reasoning.mode: expected"),
    ("/v1/responses", {"tools": [FLAT[0] | {"defer_loading": True}]}, "tools.0.defer_loading: expected"),
    ("/v1/responses", {"tools": [FLAT[0] | {"async": True}]}, "tools.0.async: expected"),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools.0.type: expected"),
    ("/v1/responses", {"input": [{"role": "user"}]}, "input.0: expected content in a message"),
    ("/v1/responses", {"input": [{"content": "x"}]}, "input.0: expected role in a message"),
    ("/v1/responses", {"input": [USER | {"output": "x"}]}, "input.0: expected no output in a message"),
    ("/v1/responses", {"input": [{"type": "function_call", "arguments": "{}"}]}, "input.0: expected name in a"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [USE]}]}, "messages.0: expected no tool_use in a"),
    ("/v1/messages", {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]},
     "messages.0: expected no tool_result in a message of the assistant"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "name": "y"}]}]},
     "messages.0.content.0: expected no name in a text"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
     "messages.0.content.0: expected tool_use_id in a tool_result"),
    ("/v1/messages", {"system": [{"type": "image"}]}, "system.0.type: expected 'text'"),
    ("/v1/messages", {"tools": [ANTHROPIC[0] | {"type": "bash_20250124"}]}, "tools.0.type: expected"),
    ("/v1/messages", {"tools": [ANTHROPIC[0] | {"max_uses": 3}]}, "tools.0.max_uses: expected no such"),
    ("/v1/messages", {"tools": ANTHROPIC, "tool_choice": {"type": "tool"}}, "tool_choice: expected a name"),
    ("/v1/messages", {"tools": ANTHROPIC, "tool_choice": {"type": "any", "name": "weather"}}, "tool_choice: expected"),
    ("/v1/messages", {"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking: expected no budget_tokens"),
    ("/v1/messages", {"thinking": {"type": "enabled", "tokens": 5}}, "thinking.tokens: expected no such"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_budget": 6},
     "thinking_budget: expected this or thinking.budget_tokens"),
    ("/v1/messages", {"output_config": {"effort": "none"}}, "output_config.effort: expected"),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA, "strict": True}}},
     "output_config.format.strict: expected no such"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "words"), INSIDE)
def test_a_field_in_a_field_is_not_dropped(live: Live, path: str, fields: dict[str, Any], words: str) -> None:
    answer = post(live, path, FORMS[path] | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(words)


@pytest.mark.parametrize(("path", "fields"), [
    (CHAT, {"response_format": {"type": "text"}}),
    (CHAT, {"tools": [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": None, "audio": None, "function_call": None,
                                "tool_calls": [CALL | {"index": 0}], "annotations": [], "refusal": None},
                         {"role": "tool", "tool_call_id": "c", "content": "x"}, USER]}),
    ("/v1/responses", {"text": {"format": {"type": "text"}, "verbosity": "low"}}),
    ("/v1/responses", {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}),
    ("/v1/responses", {"tools": [FLAT[0] | {"strict": True, "defer_loading": False, "allowed_callers": ["direct"]}]}),
    ("/v1/responses", {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}, USER]}),
    ("/v1/messages", {"tools": [ANTHROPIC[0] | {"type": "custom", "strict": True, "cache_control": None}]}),
    ("/v1/messages", {"system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]}),
    ("/v1/messages", {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "low"}}),
])  # fmt: skip
def test_what_clients_send_besides_is_taken(live: Live, path: str, fields: dict[str, Any]) -> None:
    answer = post(live, path, FORMS[path] | fields)
    assert answer.status_code == 200, answer.text


def chat_of(*messages: dict[str, Any], **fields: Any) -> str:
    """What the model reads of a chat."""
    request = ChatRequest.model_validate({"messages": list(messages)} | fields)
    return READS.reader.tokenizer.decode(Chat.job(request, READS).prompts[0])


def messages_of(*messages: dict[str, Any], **fields: Any) -> str:
    """What the model reads of messages in Anthropic's form."""
    request = MessagesRequest.model_validate({"messages": list(messages), "max_tokens": 1} | fields)
    return READS.reader.tokenizer.decode(Messages.job(request, READS).prompts[0])


def test_thoughts_and_refusals_of_earlier_turns_are_read() -> None:
    by_one_name = chat_of(USER, {"role": "assistant", "content": "x", "reasoning_content": "Hm."}, USER)
    assert chat_of(USER, {"role": "assistant", "content": "x", "reasoning": "Hm."}, USER) == by_one_name
    assert "<think>\nHm.\n</think>" in by_one_name
    refused = chat_of(USER, {"role": "assistant", "content": None, "refusal": "Never."}, USER)
    assert refused == chat_of(USER, {"role": "assistant", "content": "Never."}, USER)


def test_a_failed_call_is_read_as_one() -> None:
    def told(**fields: Any) -> str:
        result = {"type": "tool_result", "tool_use_id": "c", "content": "no such city"} | fields
        return messages_of(USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]})

    assert "Error: no such city" in told(is_error=True)
    assert "Error" not in told()
    assert told(is_error=False) == told()
    assert "Error: no such city" in told(is_error=True, content=[{"type": "text", "text": "no such city"}])


def test_examples_of_a_tools_input_are_read() -> None:
    example = {"city": "Ulaanbaatar"}
    assert "Ulaanbaatar" in messages_of(USER, tools=[ANTHROPIC[0] | {"input_examples": [example]}])
    assert "examples" not in messages_of(USER, tools=ANTHROPIC)


def test_thoughts_that_are_omitted(claude: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "messages": [USER],
                               "thinking": {"type": "adaptive", "display": "omitted"}}  # fmt: skip
    shown = tell(claude, "hello", thinking={"type": "adaptive"})
    assert [kind for kind, _ in blocks(shown)] == ["thinking", "text"]
    whole = claude.messages.create(**options)
    assert blocks(whole) == [("text", GREETING)]
    assert whole.usage.output_tokens == shown.usage.output_tokens
    with claude.messages.stream(**options) as stream:
        told = [event.model_dump_json() for event in stream]
        assert blocks(stream.get_final_message()) == [("text", GREETING)]
    assert not any("greeting" in event for event in told)


def test_one_call_at_a_time_is_said_again(live: Live) -> None:
    for asked, said in ((None, True), (True, True), (False, False)):
        response = post(live, "/v1/responses", {"input": "hello", "parallel_tool_calls": asked}).json()
        assert response["parallel_tool_calls"] is said


# ---------------------------------------------------------------- around it


def test_a_body_that_does_not_come() -> None:
    with serving(Reciter(TURNS).engine(), body_seconds=0.3) as live:
        with socket.create_connection(("127.0.0.1", live.port), timeout=30) as slow:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
            slow.sendall(head.encode() + b"{")
            assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
        assert post(live, CHAT, FORMS[CHAT]).status_code == 200


def test_headers_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request's and, behind an answer, the next one's; a request that is whole is not hurried."""
    monkeypatch.setattr("surefoot.server.process.HEADERS_S", 0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving(Engine.from_pretrained("surefoot-demo", drafter="none")) as live:
        for first in (b"", whole):
            with socket.create_connection(("127.0.0.1", live.port), timeout=30) as slow:
                if first:
                    slow.sendall(first)
                    answer = b""
                    while not answer.endswith(b"}"):
                        answer += slow.recv(65536)
                slow.sendall(whole[:20])
                assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
                assert slow.recv(65536) == b""


def test_a_slow_answer_is_no_slow_body() -> None:
    with serving(Reciter(TURNS, delay=0.01).engine(), body_seconds=0.2) as live:
        for stream in (True, False):
            start = time.monotonic()
            answer = post(live, CHAT, FORMS[CHAT] | {"stream": stream})
            assert answer.status_code == 200
            assert time.monotonic() - start > 0.2


def test_health_of_a_service_that_is_closed() -> None:
    with serving(Reciter(TURNS).engine()) as live:
        assert httpx2.get(f"{live.url}/health").status_code == 200
        live.service.close()
        assert httpx2.get(f"{live.url}/health").status_code == 503
        assert post(live, CHAT, FORMS[CHAT]).status_code == 503


def test_spans() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from surefoot.server.spans import Spans

    exporter = InMemorySpanExporter()
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with serving(Reciter(TURNS).engine(), spans=Spans("http://127.0.0.1:9", exporter)) as live:
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        answer = httpx2.post(live.url + CHAT, json=FORMS[CHAT], headers=headers).json()
    (span,) = exporter.get_finished_spans()
    assert (span.name, f"{span.context.trace_id:032x}") == (CHAT, trace)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == parent
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert span.attributes["gen_ai.response.finish_reason"] == "stop"
    assert [event.name for event in span.events] == ["first token"]
    assert span.start_time is not None
    assert span.start_time <= span.events[0].timestamp <= (span.end_time or 0)
