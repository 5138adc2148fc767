"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing
from typing import Any

from surefoot.errors import InputError
from surefoot.sampling import SamplingParams
from surefoot.server import params
from surefoot.server.backend import Backend, Run, Whole
from surefoot.server.blocks import Block, Blocks, Change
from surefoot.server.choices import Finish
from surefoot.server.errors import as_api_error
from surefoot.server.params import Job, Tools
from surefoot.server.parsing import ChatParser, Delta
from surefoot.server.schema import AnthropicMessage, CountRequest, MessagesRequest, TextBlock, TextFormat
from surefoot.server.wire import event

# "pause_turn" says that the answer can be sent back to be gone on with, which is so.
REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn", "abort": "pause_turn"}

FAILED = "Error: "  # what a model reads before the result of a call that failed; templates have no word for it


class Messages:
    """/v1/messages."""

    def __init__(self, backend: Backend, request: MessagesRequest, run: Run) -> None:
        self.run = run
        self._hides = request.thinking is not None and request.thinking.display == "omitted"

    @staticmethod
    def job(request: MessagesRequest, backend: Backend) -> Job:
        """What to ask of the engine. Raises InputError, TokenizerError."""
        tools = _tools(request)
        prompt, parser = chat(request, backend, tools)
        given = params.shared(request, backend.reader, request.max_tokens, room=0)
        if request.thinking is not None and request.thinking.budget_tokens is not None:
            if request.thinking_budget is not None:
                raise InputError("thinking_budget: expected this or thinking.budget_tokens, found both")
            given["thinking_budget"] = request.thinking.budget_tokens
        given["stop"] = (*(request.stop_sequences or ()), *tools.stop)
        answer = request.output_config and request.output_config.format
        shape = None if not answer else TextFormat.model_validate({"type": answer.type, "schema": answer.schema_})
        given["structured"] = params.structured(request.structured_outputs, shape, "output_config.format")
        return Job((prompt,), SamplingParams(**given), parser=parser, **params.chosen_drafting(request))

    def answer(self, wholes: Seq[Whole]) -> dict[str, Any]:
        """The whole answer."""
        whole, blocks = wholes[0], Blocks()
        for _ in (*blocks.add(self._shown(whole.deltas)), *blocks.close()):
            pass
        content = [_content(block) for block in blocks.all]
        return self._message(content) | self._ended(whole.finish) | {"usage": self._usage()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as events. An error behind the first token is the last event."""
        blocks = Blocks()
        usage = {"input_tokens": self.run.prompt_tokens, "output_tokens": 0}
        start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event({"type": "message_start", "message": start})
        try:
            async with aclosing(self.run.updates()) as updates:
                async for update in updates:
                    shown = self._shown(update.deltas)
                    changes = list(blocks.add(shown))
                    if update.finish is not None:
                        changes += blocks.close()
                    for change in changes:
                        grown = change.what == "grow"
                        told = grown and change is _last_grown(changes) and len(shown) == len(update.deltas)
                        pieces = {"surefoot": update.pieces} if told else {}
                        yield _event(_changed(change) | pieces)
                    if update.finish is not None:
                        ended = self._ended(update.finish)
                        yield _event({"type": "message_delta", "delta": ended, "usage": self._usage()})
            yield _event({"type": "message_stop"})
        except Exception as error:
            yield _event(as_api_error(error).body(self.run.path))

    def _shown(self, deltas: Seq[Delta]) -> Seq[Delta]:
        """Without thoughts, if those are not wanted."""
        return [delta for delta in deltas if not delta.reasoning] if self._hides else deltas

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.run.id, "type": "message", "role": "assistant", "model": self.run.model, "content": content}

    def _ended(self, finish: Finish) -> dict[str, Any]:
        by_string = isinstance(finish.by, str)
        reason = "stop_sequence" if by_string and finish.reason == "stop" else REASONS[finish.reason]
        return {"stop_reason": reason, "stop_sequence": finish.by if by_string else None}

    def _usage(self) -> dict[str, Any]:
        """Anthropic counts cached tokens beside the others, not among them."""
        cached = self.run.cached_tokens
        return {
            "input_tokens": self.run.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.run.count("tokens"),
            "drafted_tokens": self.run.count("proposed"),
            "accepted_tokens": self.run.count("accepted"),
        }


def chat(request: CountRequest, backend: Backend, tools: Tools) -> tuple[list[int], Callable[[], ChatParser]]:
    """What the model reads, and what parses its answer. A last message of the assistant is gone on with. Raises
    InputError, TokenizerError."""
    messages = [one for message in request.messages for one in _messages(message)]
    if request.system:
        system = request.system if isinstance(request.system, str) else _text(request.system)
        messages.insert(0, {"role": "system", "content": system})
    thinks = {} if request.thinking is None else {"enable_thinking": request.thinking.type != "disabled"}
    return backend.reader.chat(messages, tools, thinks, continues=messages[-1]["role"] == "assistant")


def count(request: CountRequest, backend: Backend) -> dict[str, int]:
    """How many tokens the model would read."""
    return {"input_tokens": len(chat(request, backend, _tools(request))[0])}


def _tools(request: CountRequest) -> Tools:
    tools = [
        {"type": "function", "function": {"name": tool.name, "description": tool.description or "",
                                          "parameters": tool.input_schema}
         | ({"examples": tool.input_examples} if tool.input_examples else {})}
        for tool in request.tools or ()
    ]  # fmt: skip
    choice = request.tool_choice
    if choice is None:
        return params.tools_of(tools, None, single=False)
    word = {"any": "required", "tool": None}.get(choice.type, choice.type)
    named = (choice.name or "") if choice.type == "tool" else None
    return params.tools_of(tools, word, choice.disable_parallel_tool_use is True, named)


def _messages(message: AnthropicMessage) -> list[dict[str, Any]]:
    """A message as chat templates read it: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts, thoughts, calls, results = "", "", [], []
    for block in message.content:
        if block.type == "text":
            texts += block.text or ""
        elif block.type == "thinking":
            thoughts += block.thinking or ""
        elif block.type == "tool_use":
            calls.append({"id": block.id, "type": "function",
                          "function": {"name": block.name, "arguments": block.input or {}}})  # fmt: skip
        elif block.type == "tool_result":
            content = block.content if isinstance(block.content, str) else _text(block.content or ())
            told = f"{FAILED}{content}" if block.is_error else content
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": told})
    own: dict[str, Any] = {"role": message.role, "content": texts}
    if thoughts:
        own["reasoning_content"] = thoughts
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if texts or calls or thoughts or not results else results


def _text(blocks: Seq[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def _content(block: Block) -> dict[str, Any]:
    """A block of a whole answer."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        arguments = json.loads(block.text or "{}")
    except ValueError:  # an answer cut at its limit
        arguments = {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def _changed(change: Change) -> dict[str, Any]:
    """A change of a block as an event."""
    block = change.block
    if change.what == "begin":
        empty = Block(block.index, block.kind, id=block.id, name=block.name)
        return {"type": "content_block_start", "index": block.index, "content_block": _content(empty)}
    if change.what == "done":
        return {"type": "content_block_stop", "index": block.index}
    name, field = {
        "text": ("text_delta", "text"),
        "thinking": ("thinking_delta", "thinking"),
        "tool": ("input_json_delta", "partial_json"),
    }[block.kind]
    return {"type": "content_block_delta", "index": block.index, "delta": {"type": name, field: change.text}}


def _last_grown(changes: Seq[Change]) -> Change | None:
    return next((change for change in reversed(changes) if change.what == "grow"), None)


def _event(body: dict[str, Any]) -> bytes:
    return event(body, body["type"])
