"""OpenAI's responses, without any memory of earlier ones."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
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
from surefoot.server.params import Job
from surefoot.server.schema import Item, ResponsesRequest
from surefoot.server.wire import event


class Responses:
    """/v1/responses."""

    def __init__(self, backend: Backend, request: ResponsesRequest, run: Run) -> None:
        self.request, self.run = request, run
        self._ids: dict[int, str] = {}

    @staticmethod
    def job(request: ResponsesRequest, backend: Backend) -> Job:
        """What to ask of the engine. Raises InputError, TokenizerError."""
        messages = [] if not request.instructions else [{"role": "system", "content": request.instructions}]
        if isinstance(request.input, str):
            messages.append({"role": "user", "content": request.input})
        else:
            messages += [_message(item) for item in request.input if item.type != "reasoning"]
        if not messages:
            raise InputError("input: expected at least one item, found none")
        tools = [
            {"type": "function", "function": {"name": tool.name, "description": tool.description or "",
                                              "parameters": tool.parameters or {}}}
            for tool in request.tools or ()
        ]  # fmt: skip
        prompt, parser = backend.reader.chat(messages, None if request.tool_choice == "none" else tools)
        given = params.basics(request, request.max_output_tokens, backend.reader.max_len - len(prompt))
        if request.text is not None and request.text.format is not None:
            given["structured"] = params.formatted(request.text.format)
        return Job((prompt,), SamplingParams(**given), parser=parser, **params.chosen_drafting(request))

    def answer(self, wholes: Seq[Whole]) -> dict[str, Any]:
        """The whole answer."""
        blocks = Blocks()
        for _ in (*blocks.add(wholes[0].deltas), *blocks.close()):
            pass
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
                    changes = list(blocks.add(update.deltas))
                    if update.finish is not None:
                        changes += blocks.close()
                    for change in changes:
                        for kind, body in self._changed(change):
                            yield said(kind, **body)
                    if update.finish is not None:
                        whole = self._response(blocks.all, update.finish)
                        yield said(f"response.{whole['status']}", response=whole)
        except Exception as error:
            message = as_api_error(error).message
            yield said("error", code="server_error", message=message, param=None)

    def _response(self, blocks: Seq[Block], finish: Finish | None) -> dict[str, Any]:
        cut = finish is not None and finish.reason == "length"
        status = "in_progress" if finish is None else "incomplete" if cut else "completed"
        request = self.request
        return {
            "id": self.run.id,
            "object": "response",
            "created_at": self.run.created,
            "model": self.run.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "output": [self._item(block, "incomplete" if cut and block is blocks[-1] else "completed")
                       for block in blocks],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": self.run.job.params.temperature,
            "top_p": self.run.job.params.top_p,
            "tool_choice": request.tool_choice or "auto",
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
                "content": [_part(block.text)]}  # fmt: skip

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
                yield "response.content_part.added", part | {"part": _part("")}
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
                yield "response.output_text.done", part | {"text": block.text, "logprobs": []}
                yield "response.content_part.done", part | {"part": _part(block.text)}
            yield "response.output_item.done", at | {"item": item}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(item: Item) -> dict[str, Any]:
    """An item of the input as chat templates read it."""
    if item.type == "function_call":
        function = {"name": item.name or "", "arguments": params.read_arguments(item.arguments or "")}
        return {"role": "assistant", "content": "",
                "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}  # fmt: skip
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": item.output or ""}
    if item.role is None:
        raise InputError("input.role: expected the role of a message, found none")
    content = item.content if isinstance(item.content, str) else "".join(part.text for part in item.content or ())
    return {"role": "system" if item.role == "developer" else item.role, "content": content}
