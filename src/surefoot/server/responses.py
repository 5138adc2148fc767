"""OpenAI's responses, without any memory of earlier ones."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from collections.abc import Sequence as Seq
from contextlib import aclosing
from typing import Any

from surefoot.errors import InputError
from surefoot.sampling import SamplingParams
from surefoot.sequence import TokenLogprobs
from surefoot.server import params, tokens
from surefoot.server.backend import Backend, Run, Whole
from surefoot.server.blocks import Block, Blocks, Change
from surefoot.server.choices import Finish, Update
from surefoot.server.errors import as_api_error
from surefoot.server.params import Job
from surefoot.server.schema import FlatChoice, Item, Part, ResponsesRequest
from surefoot.server.wire import event


class Responses:
    """/v1/responses."""

    def __init__(self, backend: Backend, request: ResponsesRequest, run: Run) -> None:
        self.request, self.run = request, run
        self._tokenizer = backend.reader.tokenizer
        self._ids: dict[int, str] = {}
        self._waiting: list[TokenLogprobs] = []
        self._scores: dict[int, list[dict[str, Any]]] = {}  # by block

    @staticmethod
    def job(request: ResponsesRequest, backend: Backend) -> Job:
        """What to ask of the engine. Raises InputError, TokenizerError."""
        messages: list[dict[str, Any]] = []
        if request.instructions:
            messages.append({"role": "system", "content": request.instructions})
        if isinstance(request.input, str):
            messages.append({"role": "user", "content": request.input})
        else:
            for item in request.input:
                _add(messages, item)
        if not messages:
            raise InputError("input: expected at least one item, found none")
        choice = request.tool_choice
        tools = params.tools_of(
            [{"type": "function", "function": {"name": tool.name, "description": tool.description or "",
                                               "parameters": tool.parameters or {}}}
             for tool in request.tools or ()],
            None if isinstance(choice, FlatChoice) else choice,
            request.parallel_tool_calls is False,
            choice.name if isinstance(choice, FlatChoice) else None,
        )  # fmt: skip
        thinks = params.thinking_by(None if request.reasoning is None else request.reasoning.effort)
        prompt, parser = backend.reader.chat(messages, tools, thinks)
        given = params.shared(request, backend.reader, request.max_output_tokens, backend.reader.max_len - len(prompt))
        given["structured"] = params.structured(
            request.structured_outputs, None if request.text is None else request.text.format, "text.format"
        )
        given["stop"] = tools.stop
        if request.top_logprobs or "message.output_text.logprobs" in (request.include or ()):
            given["logprobs"] = request.top_logprobs or 0
        return Job((prompt,), SamplingParams(**given), parser=parser, **params.chosen_drafting(request))

    def answer(self, wholes: Seq[Whole]) -> dict[str, Any]:
        """The whole answer."""
        blocks = Blocks()
        for update in wholes[0].updates:
            self._changes(blocks, update)
        return self._response(blocks.all, wholes[0].finish)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as events. An error behind the first token is the last event."""
        blocks, number = Blocks(), 0

        def said(kind: str, **body: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number - 1, **body}, kind)

        yield said("response.created", response=self._response([], None))
        yield said("response.in_progress", response=self._response([], None))
        try:
            async with aclosing(self.run.updates()) as updates:
                async for update in updates:
                    for change in self._changes(blocks, update):
                        for kind, body in self._changed(change):
                            yield said(kind, **body)
                    if update.finish is not None:
                        whole = self._response(blocks.all, update.finish)
                        yield said(f"response.{whole['status']}", response=whole)
        except Exception as error:
            message = as_api_error(error).message
            yield said("error", code="server_error", message=message, param=None)

    def _changes(self, blocks: Blocks, update: Update) -> list[Change]:
        """What an update changes. A text's log-probabilities are those of all tokens since the last text's end."""
        self._waiting += update.logprobs or ()
        changes = list(blocks.add(update.deltas))
        if update.finish is not None:
            changes += blocks.close()
        for change in changes:
            if change.what == "done" and change.block.kind == "text":
                self._scores[change.block.index] = tokens.chat_logprobs(self._waiting, self._tokenizer)
                self._waiting = []
        return changes

    def _response(self, blocks: Seq[Block], finish: Finish | None) -> dict[str, Any]:
        cuts = {"length": "max_output_tokens", "abort": "abort"}
        cut = None if finish is None else cuts.get(finish.reason)
        status = "in_progress" if finish is None else "incomplete" if cut else "completed"
        request = self.request
        return {
            "id": self.run.id,
            "object": "response",
            "created_at": self.run.created,
            "model": self.run.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": cut} if cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "output": [self._item(block, "incomplete" if cut and block is blocks[-1] else "completed")
                       for block in blocks],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self.run.job.params.temperature,
            "top_p": self.run.job.params.top_p,
            "tool_choice": _choice(request),
            "tools": [tool.model_dump() | {"strict": False} for tool in request.tools or ()],
            "metadata": request.metadata or {},
            "usage": None if finish is None else self._usage(),
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        prompt, output = self.run.prompt_tokens, self.run.count("tokens")
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.run.cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {
                "reasoning_tokens": self.run.reasoning_tokens,
                "drafted_tokens": self.run.count("proposed"),
                "accepted_tokens": self.run.count("accepted"),
            },
            "total_tokens": prompt + output,
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """A block as an item of the output."""
        item_id = self._ids.setdefault(block.index, uuid.uuid4().hex)
        if block.kind == "tool":
            return {"id": f"fc_{item_id}", "type": "function_call", "call_id": block.id, "name": block.name,
                    "arguments": block.text, "status": status}  # fmt: skip
        if block.kind == "thinking":
            content = [{"type": "reasoning_text", "text": block.text}]
            return {"id": f"rs_{item_id}", "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": f"msg_{item_id}", "type": "message", "role": "assistant", "status": status,
                "content": [self._part(block)]}  # fmt: skip

    def _changed(self, change: Change) -> Iterator[tuple[str, dict[str, Any]]]:
        """A change of a block as events."""
        block = change.block
        item = self._item(block, "completed" if change.what == "done" else "in_progress")
        at = {"output_index": block.index}
        inside = at | {"item_id": item["id"]}
        part = inside | {"content_index": 0}
        if change.what == "begin":
            bare = item | {"arguments": ""} if block.kind == "tool" else item | {"content": []}
            yield "response.output_item.added", at | {"item": bare}
            if block.kind == "text":
                yield "response.content_part.added", part | {"part": _part("", [])}
        elif change.what == "grow":
            if block.kind == "tool":
                yield "response.function_call_arguments.delta", inside | {"delta": change.text}
            elif block.kind == "thinking":
                yield "response.reasoning_text.delta", part | {"delta": change.text}
            else:
                yield "response.output_text.delta", part | {"delta": change.text, "logprobs": []}
        else:
            if block.kind == "tool":
                done = inside | {"arguments": block.text, "name": block.name}
                yield "response.function_call_arguments.done", done
            elif block.kind == "thinking":
                yield "response.reasoning_text.done", part | {"text": block.text}
            else:
                scores = self._scores.get(block.index, [])
                yield "response.output_text.done", part | {"text": block.text, "logprobs": scores}
                yield "response.content_part.done", part | {"part": self._part(block)}
            yield "response.output_item.done", at | {"item": item}

    def _part(self, block: Block) -> dict[str, Any]:
        return _part(block.text, self._scores.get(block.index, []))


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _choice(request: ResponsesRequest) -> str | dict[str, Any]:
    choice = request.tool_choice
    return choice.model_dump() if isinstance(choice, FlatChoice) else choice or "auto"


def _add(messages: list[dict[str, Any]], item: Item) -> None:
    """Add an item of the input as chat templates read it: thoughts, text and calls that follow one another are one
    message of the assistant."""
    if item.type == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        return
    role = {"developer": "system", None: "assistant"}.get(item.role, item.role)
    if role != "assistant":
        messages.append({"role": role, "content": _text(item.content)})
        return
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (item.type == "message" and last["content"]):
        messages.append({"role": "assistant", "content": ""})
    last = messages[-1]
    if item.type == "reasoning":
        last["reasoning_content"] = last.get("reasoning_content", "") + _text(item.content)
    elif item.type == "function_call":
        function = {"name": item.name or "", "arguments": params.read_arguments(item.arguments or "")}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    else:
        last["content"] = _text(item.content)


def _text(content: str | list[Part] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
