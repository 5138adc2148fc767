"""The HTTP server, spoken to by the stock clients and by worse ones."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

from surefoot import Engine, SamplingParams
from surefoot.cli.bench_server import started
from surefoot.cli.main import run
from surefoot.drafters.none import NoDrafter
from surefoot.errors import NumericalError
from surefoot.sequence import Sequence, TokenLogprobs
from surefoot.server.backend import Backend
from surefoot.server.blocks import Blocks
from surefoot.server.errors import ApiError, validation_error
from surefoot.server.parsing import Delta, ToolPiece
from surefoot.server.tokens import chat_logprobs
from surefoot.types import Draft
from tests.server import MODEL, Live, serving

PROMPT = "def fibonacci(n):\n    "
MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):"}]


def engine(**wanted: Any) -> Engine:
    return Engine.from_pretrained(MODEL, **{"drafter": "mtp", "slots": 4, "max_len": 1024, **wanted})


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(engine()) as live:
        yield live


@pytest.fixture(scope="module")
def plain() -> Engine:
    return engine(drafter="none", draft_length=0, slots=1)


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(live: Live, path: str, body: Any, **kwargs: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | kwargs.pop("headers", {})
    return httpx.post(live.url + path, content=content, headers=headers, timeout=60, **kwargs)


def complete(live: Live, **fields: Any) -> dict[str, Any]:
    answer = post(live, "/v1/completions", {"prompt": PROMPT, "max_tokens": 24, "temperature": 0} | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; every chunk that comes is whole UTF-8."""
    found = []
    with httpx.stream("POST", live.url + path, json=body | {"stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        for chunk in answer.iter_raw():
            for line in chunk.decode().splitlines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    found.append(json.loads(line.removeprefix("data: ")))
    return found


# ---------------------------------------------------------------- information


def test_models_and_health(live: Live, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert httpx.get(f"{live.url}/health").json() == {"status": "ok"}
    assert "<html" in httpx.get(live.url).text
    assert httpx.get(f"{live.url}/static/app.js").status_code == 200


def samples(live: Live) -> dict[str, float]:
    """What /metrics says, by name and labels."""
    lines = httpx.get(f"{live.url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_metrics_and_stats(live: Live) -> None:
    before = samples(live)
    complete(live, drafter="none", max_tokens=24, ignore_eos=True)
    after = samples(live)
    assert 'surefoot_http_answers_total{path="/v1/completions",status="200"}' in after
    for name, times in (("time_to_first_token", 1), ("inter_token", 23)):  # 24 tokens have 23 gaps
        name = f"surefoot_{name}_seconds"
        assert after[f"{name}_count"] - before.get(f"{name}_count", 0) == times
        assert after[f"{name}_sum"] > before.get(f"{name}_sum", 0)
        assert after[f'{name}_bucket{{le="+Inf"}}'] == after[f"{name}_count"]
    stats = httpx.get(f"{live.url}/stats").json()
    assert stats["slots"] == 4
    assert stats["running"] == stats["queued"] == 0
    assert 0 <= stats["accepted"] <= stats["drafted"]
    assert all(0 <= share <= 1 for share in stats["acceptance_by_position"])
    assert stats["tokens_per_second"] > 0


# ---------------------------------------------------------------- OpenAI's client


def test_completion_is_plain_decoding(client: openai.OpenAI, plain: Engine) -> None:
    expected = plain.generate(PROMPT, SamplingParams(max_new_tokens=24))
    got = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    assert got.choices[0].text == expected.text
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert got.usage.completion_tokens == 24


def test_sampled_completion_is_plain_decoding(client: openai.OpenAI, plain: Engine) -> None:
    wanted = SamplingParams(max_new_tokens=24, temperature=0.9, top_k=40, min_p=0.02, repetition_penalty=1.2, seed=5)
    got = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0.9, seed=5,
                                    extra_body={"top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2})  # fmt: skip
    assert got.choices[0].text == plain.generate(PROMPT, wanted).text


def test_stream_says_what_the_whole_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 40, "temperature": 0.8,
                             "seed": 3, "n": 2, "extra_body": {"ignore_eos": True}}  # fmt: skip
    whole = client.chat.completions.create(**asked)
    texts, finish, usage = ["", ""], ["", ""], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finish[choice.index] = choice.finish_reason or finish[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert finish == [choice.finish_reason for choice in whole.choices]
    assert texts[0] != texts[1]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 80
    assert usage.completion_tokens_details is not None
    details = usage.completion_tokens_details.model_dump()
    assert 0 < details["accepted_tokens"] <= details["drafted_tokens"]


def test_origins_of_a_streams_pieces(live: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    pieces = [tuple(piece) for event in events(live, "/v1/completions", body) for piece in event["surefoot"]]
    assert "".join(text for text, _ in pieces) == complete(live, max_tokens=40)["choices"][0]["text"]
    assert {origin for _, origin in pieces} <= {"mtp", "bonus", "replaced", "plain"}
    assert "mtp" in {origin for _, origin in pieces}
    body |= {"drafter": "none"}
    pieces = [tuple(piece) for event in events(live, "/v1/completions", body) for piece in event["surefoot"]]
    assert {origin for _, origin in pieces} == {"plain"}


def test_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True,
                                          top_logprobs=3, extra_body={"ignore_eos": True})  # fmt: skip
    assert chat.choices[0].logprobs is not None
    entries = chat.choices[0].logprobs.content
    assert entries is not None
    assert len(entries) == 6
    for entry in entries:
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
        assert len(entry.top_logprobs) == 3
    text = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2, echo=True)
    scores = text.choices[0].logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.token_logprobs is not None
    assert "".join(scores.tokens) == text.choices[0].text
    assert text.choices[0].text.startswith(PROMPT)
    assert scores.token_logprobs[0] is None
    assert all(score is not None and score <= 0 for score in scores.token_logprobs[1:])


def test_bytes_of_half_a_character(plain: Engine) -> None:
    tokenizer = plain.tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode("é∂漢")
    entries = chat_logprobs([TokenLogprobs(token, -1.0) for token in tokens], tokenizer)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "é∂漢"


def test_several_prompts(live: Live) -> None:
    both = complete(live, prompt=[PROMPT, "import "], n=2, temperature=1.0, seed=7)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    second = complete(live, prompt="import ", n=2, temperature=1.0, seed=7)
    assert [c["text"] for c in both["choices"][2:]] == [c["text"] for c in second["choices"]]


def test_structured_output(client: openai.OpenAI, live: Live) -> None:
    pytest.importorskip("llguidance")
    form: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}}
    got = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, extra_body=form)
    assert got.choices[0].message.content in ("yes", "no")
    assert got.choices[0].finish_reason == "stop"
    form = {"structured_outputs": {"regex": "[0-9]{3}"}}
    assert complete(live, **form)["choices"][0]["text"].isdigit()


def test_words_that_must_not_come(live: Live) -> None:
    text = complete(live, temperature=0)["choices"][0]["text"]
    assert " return" in text
    assert "return" not in complete(live, bad_words=["return"])["choices"][0]["text"]


CALLED = """<think>
hm
</think>

so: <tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>"""


def test_thoughts_and_calls_of_chats(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100, "temperature": 0, "tools": [tool],
                             "extra_body": {"structured_outputs": {"choice": [CALLED]}}}  # fmt: skip
    whole = client.chat.completions.create(**asked)
    said = whole.choices[0].message.model_dump()
    assert whole.choices[0].finish_reason == "tool_calls"
    assert said["reasoning_content"] == "hm"
    assert said["content"] == "so:"
    assert [call["function"] for call in said["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert 0 < (whole.usage.completion_tokens_details.reasoning_tokens or 0) < whole.usage.completion_tokens
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0].message.model_dump()
    assert final["content"] == said["content"]
    assert [call["function"]["arguments"] for call in final["tool_calls"]] == ['{"a": 1}']


# ---------------------------------------------------------------- public bug reports


def test_case_3_usage_is_what_came(live: Live) -> None:
    """The stop string is complete inside a draft: tokens behind it are neither shown nor counted."""
    for stop in ("return", "fib", "\n", "(n"):
        answer = complete(live, max_tokens=60, stop=stop, logprobs=0)
        assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["logprobs"]["tokens"])
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["stop_reason"] == stop


def test_case_5_stop_strings_across_tokens(live: Live) -> None:
    text = complete(live, max_tokens=60)["choices"][0]["text"]
    for start in range(0, 40, 9):
        stop = text[start : start + 7]
        body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stop": [stop, stop + "never"]}
        streamed = events(live, "/v1/completions", body)
        assert "".join(event["choices"][0]["text"] for event in streamed) == text[: text.index(stop)]
    never = complete(live, max_tokens=60, stop=text[-5:] + "never")
    assert never["choices"][0]["text"] == text  # what was held back for the match is not lost


def test_case_30_client_gone(live: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
    for stream in (True, False):
        raw = json.dumps(body | {"stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", live.port)) as line:
            line.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw)
            )
            deadline = time.monotonic() + 10
            while live.service.stats().running == 0:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        begun = live.service.stats().tokens
        assert live.wait_idle(5)
        assert live.service.stats().tokens - begun < 500
        assert live.service.stats().ended["cancelled"] >= 1


# ---------------------------------------------------------------- Anthropic's client


def test_messages(live: Live, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 40,
        "extra_body": {"seed": 4, "temperature": 0.8},
    }
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as other:
        whole = other.messages.create(**asked)
        with other.messages.stream(**asked) as stream:
            streamed = "".join(stream.text_stream)
            final = stream.get_final_message()
        asked["stop_sequences"] = [streamed[2:6]]
        stopped = other.messages.create(**asked)
    text = "".join(block.text for block in whole.content if block.type == "text")
    assert text == streamed
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    same = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40, temperature=0.8, seed=4)
    assert same.choices[0].message.content == text
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence == streamed[2:6]


def test_blocks() -> None:
    blocks = Blocks()
    deltas = [Delta(reasoning="hm"), Delta(reasoning="m"), Delta(content="x"), Delta(tool=ToolPiece(0, "a", "f", "{")),
              Delta(tool=ToolPiece(0, arguments="}")), Delta(tool=ToolPiece(1, "b", "g", "{}"))]  # fmt: skip
    changes = [change for delta in deltas for change in blocks.add([delta])] + list(blocks.close())
    assert [(block.kind, block.text, block.name) for block in blocks.all] == [
        ("thinking", "hmm", ""), ("text", "x", ""), ("tool", "{}", "f"), ("tool", "{}", "g"),
    ]  # fmt: skip
    whats = [(change.what, change.block.index) for change in changes]
    assert [pair for pair in whats if pair[0] != "grow"] == [(what, i) for i in range(4) for what in ("begin", "done")]


# ---------------------------------------------------------------- /v1/responses


def test_responses(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "def add(a, b):", "max_output_tokens": 40, "temperature": 0.8,
                             "extra_body": {"seed": 4}}  # fmt: skip
    whole = client.responses.create(**asked)
    text, last = "", None
    for event in client.responses.create(**asked, stream=True):
        last = event
        if event.type == "response.output_text.delta":
            text += event.delta
    assert whole.output_text == text
    assert last is not None
    assert last.type == f"response.{whole.status}"
    same = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40, temperature=0.8, seed=4)
    assert same.choices[0].message.content == text


# ---------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature: expected a number at least 0"),
        ("completions", {"prompt": "x", "temperature": float("nan")}, 400, "temperature: expected"),
        ("completions", {"prompt": "x", "top_k": 1.5}, 400, "top_k: expected a valid integer, found 1.5"),
        ("completions", {"prompt": "x", "top_q": 1}, 400, "top_q: expected no such field"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens: expected an integer of at least 1"),
        ("completions", {"prompt": "x", "seed": 2**70}, 400, "seed: expected"),
        ("completions", {"prompt": "x", "stop": [""]}, 400, "stop[0]: expected"),
        ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias: expected token ids"),
        ("completions", {"prompt": "x", "n": 1000}, 400, "n: expected at most 128"),
        ("completions", {"prompt": "x", "drafter": "best"}, 400, "the engine's own, or 'none', 'ngram'"),
        ("completions", {"prompt": "x", "draft_length": 99}, 400, "draft_length: expected"),
        ("completions", {"prompt": "x", "structured_outputs": {}}, 400, "structured_outputs: expected one of"),
        ("completions", {"prompt": "x", "structured_outputs": {"regex": "("}}, 400, "structured_outputs: expected"),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix: expected"),
        ("completions", {"prompt": ""}, 400, "prompt: expected at least one token"),
        ("completions", {"prompt": []}, 400, "prompt: expected"),
        ("completions", {"prompt": [10**9]}, 400, "prompt[0]: expected a token id"),
        ("completions", {"prompt": [1] * 2000}, 400, "prompt: expected at most 1023 tokens"),
        ("completions", {"prompt": "\ud800"}, 400, "prompt"),
        ("completions", {"prompt": "x", "\ud800": "\ud800"}, 400, "expected"),
        ("completions", {}, 400, "prompt: expected a value, found none"),
        ("completions", b"", 400, ""),
        ("completions", b"{", 400, "body: expected JSON, found an error at character 1: "),
        ("completions", b"[" * 100_000, 400, ""),
        ("completions", b'{"prompt": "x", "n": ' + b"9" * 10_000 + b"}", 400, ""),
        ("completions", {"prompt": "x", "model": "gpt-4"}, 404, "model: expected 'surefoot-demo', found 'gpt-4'"),
        ("chat/completions", {"messages": []}, 400, "messages: expected"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "type"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs: expected with logprobs"),
        ("chat/completions", {"messages": MESSAGES, "thinking_budget": 3}, 400, "thinking_budget: expected"),
        ("chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, 400, "json_schema"),
        ("chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, 400, "expected none of"),
        ("chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"self": 1}}, 400, "expected none of"),
        ("chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"add_generation_prompt": True}}, 400,
         "expected none of"),
        ("completions", {"prompt": "x", "allowed_token_ids": [0], "logit_bias": {"0": 1}, "stop_token_ids": [0],
                         "min_tokens": 3}, 400, "parameters: expected them to leave a token at position 1"),
        ("completions", {"prompt": "x", "structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [50]}, 400,
         "parameters: expected them to leave a token"),
        ("completions", {"prompt": "x", "structured_outputs": {"choice": ["yes"]}, "bad_words": ["y", "ye", "yes"]},
         400, "parameters: expected them to leave a token"),
        ("completions", {"prompt": "x", "stop": ["x"] * 65}, 400, "stop: expected at most 64 entries, found 65"),
        ("completions", {"prompt": "x", "stop": ["x", 5]}, 400, "stop.1: expected a valid string, found 5"),
        ("messages", {"messages": MESSAGES}, 400, "max_tokens: expected a value"),
        ("messages", {"messages": MESSAGES, "max_tokens": 5, "model": "claude"}, 404, "model: expected"),
        ("responses", {"input": []}, 400, "input: expected at least one item"),
        ("responses", {"input": "x", "previous_response_id": "y"}, 400, "previous_response_id: expected"),
    ],
)  # fmt: skip
def test_bad_request(live: Live, path: str, body: Any, status: int, words: str) -> None:
    answer = post(live, f"/v1/{path}", body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["type"] == ("not_found_error" if path == "messages" and status == 404 else "invalid_request_error")


def test_parameters_that_contradict_each_other_in_a_stream(live: Live) -> None:
    body = {"prompt": "x", "allowed_token_ids": [0], "stop_token_ids": [0], "min_tokens": 3}
    (error,) = [event["error"] for event in events(live, "/v1/completions", body)]
    assert error["type"] == "invalid_request_error"
    assert "parameters: expected them to leave a token" in error["message"]


def test_failures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Backend, name: str | None) -> None:
        raise RuntimeError("a fault")

    with serving(engine(slots=1, max_len=64)) as live:
        monkeypatch.setattr(Backend, "check_model", fail)
        answer = post(live, "/v1/completions", {"prompt": "x"})
        assert answer.status_code == 500
        assert "a fault" in answer.json()["error"]["message"]
        assert samples(live)['surefoot_http_answers_total{path="/v1/completions",status="500"}'] == 1


MANY = 200_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [1] * MANY}),
        ("chat/completions", {"messages": [{"role": "user", "content": [1] * MANY}]}),
        ("chat/completions", {"messages": MESSAGES, "tools": [1] * MANY}),
        ("completions", {"prompt": [None] * MANY}),
        ("completions", {"prompt": [[None]] * MANY}),
        ("completions", {"prompt": "x", "logit_bias": {str(n): "a" for n in range(MANY)}}),
        ("completions", {"prompt": "x", "structured_outputs": {str(n): 1 for n in range(MANY)}}),
        ("completions", {str(n): 1 for n in range(MANY)}),
        ("messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [1] * MANY}]}),
        ("responses", {"input": [1] * MANY}),
        ("responses", {"input": "x", "include": [1] * MANY}),
    ],
)  # fmt: skip
def test_a_body_wrong_many_times(live: Live, path: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of its faults are collected: gathering all of them would hold up every other request."""
    counts: list[int] = []

    def counted(errors: Seq[Any]) -> ApiError:
        counts.append(len(errors))
        return validation_error(errors)

    monkeypatch.setattr("surefoot.server.app.validation_error", counted)
    answer = post(live, f"/v1/{path}", body)
    assert answer.status_code == 400
    assert "expected" in answer.json()["error"]["message"]
    assert 1 <= counts[0] <= 300


def test_content_type(live: Live) -> None:
    for headers in ({"content-type": "application/x-www-form-urlencoded"}, {"content-type": ""}):
        answer = post(live, "/v1/completions", {"prompt": "x"}, headers=headers)
        assert answer.status_code == 400
        assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_log_probabilities_of_streams(live: Live) -> None:
    """A stream's are those of the whole, the prompts' among them, each choice's its own."""
    body: dict[str, Any] = {"prompt": ["é∂ a", "import "], "n": 2, "max_tokens": 12, "temperature": 1.0, "seed": 3,
                            "logit_bias": {str(token): 5 for token in range(128, 256)}, "ignore_eos": True,
                            "logprobs": 1, "prompt_logprobs": 1}  # fmt: skip
    for echo in (False, True):
        asked = body | {"echo": echo}
        wholes = complete(live, **asked)["choices"]
        streamed: dict[int, dict[str, Any]] = {}
        for event in events(live, "/v1/completions", asked):
            for choice in event["choices"]:
                known = streamed.setdefault(choice["index"], {"text": "", "logprobs": {}, "prompt_logprobs": []})
                known["text"] += choice["text"]
                known["prompt_logprobs"] += choice.get("prompt_logprobs", [])
                for name, values in (choice["logprobs"] or {}).items():
                    known["logprobs"].setdefault(name, []).extend(values)
        for whole in wholes:
            assert streamed[whole["index"]] == {name: whole[name] for name in ("text", "logprobs", "prompt_logprobs")}
            offsets = whole["logprobs"]["text_offset"]
            assert offsets == sorted(offsets)
        assert wholes[0]["prompt_logprobs"] != wholes[2]["prompt_logprobs"]
    chat = {"messages": MESSAGES, "max_tokens": 3, "prompt_logprobs": 1}
    whole = post(live, "/v1/chat/completions", chat).json()
    expected = whole["choices"][0]["prompt_logprobs"]
    assert whole["prompt_logprobs"] == expected
    pieces = [event["choices"][0] for event in events(live, "/v1/chat/completions", chat)]
    assert [piece["prompt_logprobs"] for piece in pieces if "prompt_logprobs" in piece] == [expected]


def test_paths_and_methods(live: Live) -> None:
    assert httpx.get(f"{live.url}/v1/nothing").status_code == 404
    assert post(live, "/v1/nothing", {}).status_code == 404
    assert httpx.get(f"{live.url}/v1/completions").json()["error"]["message"]
    assert httpx.get(f"{live.url}/v1/models/other").status_code == 404


@pytest.mark.parametrize("text", ["a", "漢字 ", " return x"])
def test_prompt_of_ten_megabytes(live: Live, text: str) -> None:
    prompt = text * (10_000_000 // len(text.encode()))
    begun = time.monotonic()
    answer = post(live, "/v1/completions", json.dumps({"prompt": prompt}, ensure_ascii=False).encode())
    assert answer.status_code == 400
    assert "prompt: expected at most 1024 tokens" in answer.json()["error"]["message"]
    assert time.monotonic() - begun < 5


def test_fuzzed_bodies(live: Live) -> None:
    """Fields of the schema with values of every kind: an answer or a reason, never a failure."""
    dice = random.Random(0)
    schema = httpx.get(f"{live.url}/openapi.json").json()["components"]["schemas"]
    values: list[Any] = [None, True, -1, 0, 1, 2, 2**31, 2**63, 2**64, -0.5, 0.5, 1e308, "", "x", "\x00", "\ud83d",
                         [], [0], [""], [[]], {}, {"type": "json_object"}, {"0": 1}, ["a"] * 50]  # fmt: skip
    paths = {"chat/completions": "ChatRequest", "completions": "CompletionRequest", "messages": "MessagesRequest",
             "responses": "ResponsesRequest"}  # fmt: skip
    seen = set()
    for path, name in paths.items():
        base: dict[str, Any] = {"prompt": "x"} if path == "completions" else {"messages": MESSAGES}
        base = {"input": "x", "max_output_tokens": 3} if path == "responses" else base | {"max_tokens": 3}
        for _ in range(20):
            fields = dice.sample(sorted(schema[name]["properties"]), dice.choice([1, 1, 2]))
            body = base | {field: dice.choice(values) for field in fields if field not in ("stream", "max_tokens")}
            answer = post(live, f"/v1/{path}", body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            seen.add(answer.status_code)
    assert seen >= {200, 400}
    for _ in range(40):
        noise = bytes(dice.randrange(256) for _ in range(dice.randrange(60)))
        assert post(live, "/v1/completions", noise).status_code == 400
    assert live.wait_idle()


def test_slow_client_holds_up_nobody(live: Live, plain: Engine) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 500, "stream": True, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with (
        socket.create_connection(("127.0.0.1", live.port)) as reader,
        socket.create_connection(("127.0.0.1", live.port)) as writer,
    ):
        reader.sendall(head % len(body) + body)  # and reads nothing
        writer.sendall(head % len(body) + body[:10])  # and does not go on
        expected = plain.generate(PROMPT, SamplingParams(max_new_tokens=24)).text
        assert complete(live)["choices"][0]["text"] == expected
    assert live.wait_idle()


# ---------------------------------------------------------------- requests that fail


class Failing(NoDrafter):
    """Fails for prompts that begin with one token."""

    name = "failing"

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        if any(sequence.tokens[0] == self.token and len(sequence.output) >= 3 for sequence in sequences):
            raise NumericalError("logits: expected numbers, found NaN")
        return super().propose(sequences, depths)


def test_failing_request_ends_alone() -> None:
    with serving(engine(drafter=Failing(7), slots=2, max_len=128)) as live:
        bad = {"prompt": [7, 8], "max_tokens": 20, "ignore_eos": True}
        answer = post(live, "/v1/completions", bad)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "found NaN" in answer.json()["error"]["message"]
        streamed = events(live, "/v1/completions", bad)
        assert len(streamed) > 3
        assert "found NaN" in streamed[-1]["error"]["message"]
        assert complete(live)["usage"]["completion_tokens"] == 24
        assert live.wait_idle()


# ---------------------------------------------------------------- limits, keys, the end


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    with serving(
        engine(slots=1, max_len=512),
        api_keys=["first", "second"],
        queue_limit=0,
        max_body=2000,
        cors_origins=["http://pages.example"],
    ) as live:
        yield live


def test_api_key(guarded: Live) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    refused: list[dict[str, str]] = [
        {},
        {"authorization": "Bearer third"},
        {"authorization": "first"},
        {"x-api-key": "sec"},
    ]
    for headers in refused:
        answer = post(guarded, "/v1/completions", body, headers=headers)
        assert answer.status_code == 401
        assert "api_key: expected" in answer.json()["error"]["message"]
    assert post(guarded, "/v1/messages", {}).json()["error"]["type"] == "authentication_error"
    for headers in ({"authorization": "Bearer first"}, {"x-api-key": "second"}):
        assert post(guarded, "/v1/completions", body, headers=headers).status_code == 200
    assert httpx.get(f"{guarded.url}/health").status_code == 200


def test_body_too_large(guarded: Live) -> None:
    headers = {"x-api-key": "first", "content-type": "application/json"}
    assert post(guarded, "/v1/completions", {"prompt": "x" * 3000}, headers=headers).status_code == 413

    def pieces() -> Iterator[bytes]:
        yield from [b"x" * 1000] * 3

    answer = httpx.post(f"{guarded.url}/v1/completions", content=pieces(), headers=headers)
    assert answer.status_code == 413
    assert "expected at most 2000 bytes" in answer.json()["error"]["message"]


def test_queue_full(guarded: Live) -> None:
    headers = {"x-api-key": "first"}
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{guarded.url}/v1/completions", json=body, headers=headers) as busy:
        chunks = busy.iter_raw()
        next(chunks)
        answer = post(guarded, "/v1/completions", {"prompt": "x"}, headers=headers)
        assert answer.status_code == 429
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "queue_full"
        # Several choices: those that found room are not left behind.
        assert post(guarded, "/v1/completions", {"prompt": "x", "n": 3}, headers=headers).status_code == 429
    assert guarded.wait_idle()


def test_pages_of_other_sites(guarded: Live) -> None:
    asked = {"origin": "http://pages.example", "access-control-request-method": "POST"}
    answer = httpx.options(f"{guarded.url}/v1/completions", headers=asked)
    assert answer.headers["access-control-allow-origin"] == "http://pages.example"
    other = httpx.options(f"{guarded.url}/v1/completions", headers=asked | {"origin": "http://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_shutdown_finishes_what_runs() -> None:
    texts: list[str] = []
    with serving(engine(slots=1, max_len=512)) as live:
        body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        begun = threading.Event()

        def read() -> None:
            with httpx.stream("POST", f"{live.url}/v1/completions", json=body | {"stream": True}) as answer:
                for line in answer.iter_lines():
                    begun.set()
                    if line.startswith("data: {"):
                        texts.append(json.loads(line[6:])["choices"][0]["finish_reason"])

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(20)
        live.server.should_exit = True
        thread.join(60)
    assert texts[-1] == "length"


@pytest.mark.parametrize("path", ["completions", "chat/completions", "messages", "responses"])
def test_shutdown_cancels_what_takes_too_long(path: str) -> None:
    """One request runs, one waits; the limit ends both, and both are told, streamed or whole."""
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    body |= {"completions": {"prompt": PROMPT}, "responses": {"input": PROMPT}}.get(path, {"messages": MESSAGES})
    body |= {"max_output_tokens" if path == "responses" else "max_tokens": 3000}
    answers = dict[str, str]()

    def read(url: str, name: str, stream: bool) -> None:
        with httpx.stream("POST", f"{url}/v1/{path}", json=body | {"stream": stream}, timeout=60) as answer:
            for piece in answer.iter_text():
                answers[name] = answers.get(name, "") + piece

    with serving(engine(slots=1, max_len=4096), shutdown_timeout=0.3) as live:
        asked = ((live.url, "streamed", True), (live.url, "whole", False))
        threads = [threading.Thread(target=read, args=each) for each in asked]
        threads[0].start()
        while not live.service.stats().tokens:
            time.sleep(0.01)
        threads[1].start()
        while live.service.stats().waiting != 1:
            time.sleep(0.01)
        began = time.monotonic()
        live.server.should_exit = True
        for thread in threads:
            thread.join(30)
    assert 0.3 <= time.monotonic() - began < 10
    word = {"messages": '"pause_turn"', "responses": '"incomplete_details":{"reason":"abort"}'}.get(path, '"abort"')
    for text in answers.values():
        assert word in text
    assert len(answers) == 2
    assert live.service.stats().ended == {"cancelled": 2}


def test_what_a_model_suggests_holds_unless_a_request_says_otherwise(plain: Engine) -> None:
    def text(**params: Any) -> str | None:
        return plain.generate(PROMPT, SamplingParams(max_new_tokens=24, **params)).text

    suggested = {"temperature": 0.9, "top_k": 5, "repetition_penalty": 1.3}
    with serving(engine(), sampling=suggested) as live:
        for asked, wanted in (
            ({"temperature": None}, suggested),
            ({"temperature": None, "top_k": -1}, suggested | {"top_k": 0}),
            ({"temperature": None, "top_k": 2, "min_p": 0.1}, suggested | {"top_k": 2, "min_p": 0.1}),
            ({"temperature": 0, "repetition_penalty": 1.0}, {}),
        ):
            got = complete(live, seed=7, **asked)["choices"][0]["text"]
            assert got == text(seed=7, **wanted)
    assert text(seed=7, **suggested) != text(seed=7, temperature=1.0)


# ---------------------------------------------------------------- the command


def test_command_serves_until_told_to_stop() -> None:
    code = "from surefoot.cli.main import run; run()"
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--max-len", "512", "--name", "demo", "--slots", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "serving demo at http" in line)
        url = line.split(" at ")[1].strip()
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "stream": True}
        reasons: list[str | None] = []
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    if not reasons:
                        process.send_signal(signal.SIGTERM)
                    reasons.append(json.loads(line[6:])["choices"][0]["finish_reason"])
        assert reasons[-1] == "length"
        log = [json.loads(line) for line in process.stderr if line.startswith("{")]
        assert process.wait(30) in (0, -signal.SIGTERM)
    assert [(line["path"], line["outcome"], line["completion_tokens"]) for line in log] == [
        ("/v1/completions", "length", 100)
    ]


def test_command_says_that_it_is_closing_while_it_finishes() -> None:
    """Behind SIGTERM and until the running answer is complete: on new connections, and on one that was open."""
    asked = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "drafter": "none"}
    bodies = {"completions": {"prompt": "x"}, "chat/completions": {"messages": MESSAGES}, "responses": {"input": "x"},
              "messages": {"messages": MESSAGES, "max_tokens": 3}}  # fmt: skip
    with (
        started(["--max-len", "512", "--slots", "1"]) as server,
        httpx.Client(base_url=server.url, timeout=60) as open_,
    ):
        assert open_.get("/health").status_code == 200
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked | {"stream": True}, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert open_.get("/health").status_code == 503
            for path, body in bodies.items():
                refused = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert "expected it to take requests, found it closing" in refused.json()["error"]["message"]
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                assert client.models.list().data
                with pytest.raises(openai.InternalServerError) as error:
                    client.completions.create(model=MODEL, prompt="x")
                assert (error.value.code, error.value.type) == ("closing", "server_error")
            assert server.process.poll() is None
            *_, last = (json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines)
        assert last == "length"
        assert server.process.wait(30) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_command_says_what_is_wrong(
    live: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, words in (
        (["--port", str(live.port)], "expected a free address"),
        (["--port", "70000"], "--port: expected an integer"),
        (["--queue-limit", "-1"], "--queue-limit: expected"),
        (["--prefix-cache", "-1"], "--prefix-cache: expected"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout: expected"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout: expected"),
        (["--generation-config", "mine"], "--generation-config: expected auto or none"),
        (["--api-key", ""], "api_key: expected at least one character"),
    ):
        monkeypatch.setattr(sys, "argv", ["surefoot", "serve", "--port", "0", *options])
        with pytest.raises(SystemExit) as end:
            run()
        assert end.value.code == 2
        assert words in capsys.readouterr().err
