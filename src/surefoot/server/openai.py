"""OpenAI's chats and completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from contextlib import aclosing
from typing import Any

from surefoot.sequence import TokenLogprobs
from surefoot.server import params, tokens
from surefoot.server.backend import Backend, Run, Whole
from surefoot.server.choices import Choice, Update
from surefoot.server.errors import ApiError, as_api_error
from surefoot.server.params import Job
from surefoot.server.parsing import Delta
from surefoot.server.schema import ChatRequest, CompletionRequest, Sampling, ToolChoice
from surefoot.server.wire import DONE, event

COMPLETION_TOKENS = 16  # OpenAI's default


def usage(run: Run) -> dict[str, Any]:
    """What the request took. Draft tokens that were kept and refused stand where OpenAI has predicted ones."""
    prompt, completion = run.prompt_tokens, run.count("tokens")
    drafted, accepted = run.count("proposed"), run.count("accepted")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": run.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": run.reasoning_tokens,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
        },
    }


class Form(ABC):
    """What chats and completions have in common: whole answers and streams over the same updates."""

    name = ""
    stream_name = ""

    def __init__(self, backend: Backend, request: Sampling, run: Run) -> None:
        self.backend, self.request, self.run = backend, request, run
        self.tokenizer = backend.reader.tokenizer

    @abstractmethod
    def choice(self, choice: Choice, whole: Whole) -> dict[str, Any]:
        """A whole choice, but for how it ended."""

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """What a stream says of a choice before it has begun, if anything."""
        return None

    @abstractmethod
    def piece(self, choice: Choice, update: Update) -> dict[str, Any] | None:
        """What a stream says of an update, but for how it ended; None for nothing."""

    @abstractmethod
    def empty(self) -> dict[str, Any]:
        """What a stream says where there is nothing new to say."""

    def answer(self, wholes: Seq[Whole]) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {"index": choice.index, **self.choice(choice, whole), **self._prompt(choice), **_ended(whole.updates[-1])}
            for choice, whole in zip(self.run.choices, wholes, strict=True)
        ]
        return self._frame(self.name) | {"choices": choices, "usage": usage(self.run)}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as events. An error behind the first token is the last event."""
        options = self.request.stream_options
        wants_usage = options is not None and options.include_usage
        frame = self._frame(self.stream_name) | ({"usage": None} if wants_usage else {})
        begun = set[int]()
        try:
            for choice in self.run.choices:
                if (said := self.first(choice)) is not None:
                    yield event(frame | {"choices": [{"index": choice.index, **said, **_open()}]})
            async with aclosing(self.run.updates()) as updates:
                async for update in updates:
                    choice = self.run.choices[update.index]
                    said = self.piece(choice, update)
                    prompt = {} if update.index in begun else self._prompt(choice)
                    begun.add(update.index)
                    if said is None and not prompt and update.finish is None:
                        continue
                    body = {"index": update.index, **(said or self.empty()), **prompt, **_ended(update)}
                    yield event(frame | {"choices": [body], "surefoot": update.pieces})
            if wants_usage:
                yield event(frame | {"choices": [], "usage": usage(self.run)})
        except Exception as error:
            yield event(as_api_error(error).body(self.run.path))
        yield DONE

    def prompt_scores(self, choice: Choice) -> list[TokenLogprobs | None]:
        """Log-probabilities of its prompt, once it has been read."""
        return choice.prompt_logprobs or []

    def _prompt(self, choice: Choice) -> dict[str, Any]:
        """What is said of a choice's prompt: in a stream once, where its answer begins."""
        if self.request.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": tokens.prompt_logprobs(self.prompt_scores(choice), self.tokenizer)}

    def _frame(self, name: str) -> dict[str, Any]:
        return {"id": self.run.id, "object": name, "created": self.run.created, "model": self.run.model}


class Chat(Form):
    """/v1/chat/completions."""

    name = "chat.completion"
    stream_name = "chat.completion.chunk"

    @staticmethod
    def job(request: ChatRequest, backend: Backend) -> Job:
        """What to ask of the engine. Raises InputError, TokenizerError."""
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs: expected with logprobs true, found without", "top_logprobs")
        choice = request.tool_choice
        tools = params.tools_of(
            [tool.model_dump(exclude_none=True) for tool in request.tools or ()],
            None if isinstance(choice, ToolChoice) else choice,
            request.parallel_tool_calls is False,
            choice.function.name if isinstance(choice, ToolChoice) else None,
        )
        prompt, parser = backend.reader.chat(
            params.to_template(request.messages),
            tools,
            params.thinking_by(request.reasoning_effort) | (request.chat_template_kwargs or {}),
            continues=request.continue_final_message is True,
        )
        most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        sampling = params.sampling(
            request,
            backend.reader,
            max_tokens=most,
            room=backend.reader.max_len - len(prompt),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            response_format=request.response_format,
            tools_stop=tools.stop,
        )
        return Job((prompt,), sampling, parser=parser, **params.chosen_drafting(request))

    def answer(self, wholes: Seq[Whole]) -> dict[str, Any]:
        """The whole answer; what is said of the prompt, which all choices have in common, stands where vLLM's chats
        have it, too."""
        return super().answer(wholes) | self._prompt(self.run.choices[0])

    def choice(self, choice: Choice, whole: Whole) -> dict[str, Any]:
        """See `Form`."""
        said: dict[str, Any] = {"role": "assistant", **message(whole.deltas)}
        return {"message": said, "logprobs": self._logprobs(whole.logprobs)}

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """See `Form`."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, choice: Choice, update: Update) -> dict[str, Any] | None:
        """See `Form`."""
        if not update.deltas and not update.logprobs:
            return None
        return {"delta": delta(update.deltas), "logprobs": self._logprobs(update.logprobs)}

    def empty(self) -> dict[str, Any]:
        """See `Form`."""
        return {"delta": {}}

    def _logprobs(self, entries: Seq[TokenLogprobs] | None) -> dict[str, Any] | None:
        return {"content": tokens.chat_logprobs(entries, self.tokenizer)} if entries else None


def message(deltas: Seq[Delta]) -> dict[str, Any]:
    """A whole message: content, reasoning, calls."""
    content = "".join(one.content for one in deltas)
    reasoning = "".join(one.reasoning for one in deltas)
    calls: dict[int, dict[str, Any]] = {}
    for one in deltas:
        if one.tool is not None:
            call = calls.setdefault(one.tool.index, {"id": "", "type": "function",
                                                     "function": {"name": "", "arguments": ""}})  # fmt: skip
            call["id"] += one.tool.id or ""
            call["function"]["name"] += one.tool.name or ""
            call["function"]["arguments"] += one.tool.arguments
    said: dict[str, Any] = {"content": content if content or not calls else None}
    if reasoning:
        said["reasoning_content"] = reasoning
    if calls:
        said["tool_calls"] = list(calls.values())
    return said


def delta(deltas: Seq[Delta]) -> dict[str, Any]:
    """What a stream says of pieces of a message."""
    said: dict[str, Any] = {}
    for name, text in (
        ("content", "".join(one.content for one in deltas)),
        ("reasoning_content", "".join(one.reasoning for one in deltas)),
    ):
        if text:
            said[name] = text
    calls = []
    for one in deltas:
        if one.tool is not None:
            function: dict[str, Any] = {"arguments": one.tool.arguments}
            call: dict[str, Any] = {"index": one.tool.index, "function": function}
            if one.tool.id is not None:
                call |= {"id": one.tool.id, "type": "function"}
            if one.tool.name is not None:
                function["name"] = one.tool.name
            calls.append(call)
    if calls:
        said["tool_calls"] = calls
    return said


class Completion(Form):
    """/v1/completions."""

    name = stream_name = "text_completion"
    request: CompletionRequest

    def __init__(self, backend: Backend, request: CompletionRequest, run: Run) -> None:
        super().__init__(backend, request, run)
        self._offsets: dict[int, int] = {}  # where a choice's next token stands, of those that have begun

    @staticmethod
    def job(request: CompletionRequest, backend: Backend) -> Job:
        """What to ask of the engine. Raises InputError, TokenizerError."""
        prompts = backend.reader.prompts(request.prompt)
        sampling = params.sampling(
            request,
            backend.reader,
            max_tokens=COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens,
            room=0,
            logprobs=request.logprobs,
            response_format=request.response_format,
        )
        if request.echo:
            sampling = params.with_prompt_logprobs(sampling, request.logprobs)
        return Job(prompts, sampling, **params.chosen_drafting(request))

    def choice(self, choice: Choice, whole: Whole) -> dict[str, Any]:
        """See `Form`."""
        scores = [*self._echoed(choice), *whole.logprobs]
        return {
            "text": self._echo(choice) + whole.text,
            "logprobs": self._logprobs(scores, 0, self._prompt_of(choice)[0]),
        }

    def piece(self, choice: Choice, update: Update) -> dict[str, Any] | None:
        """See `Form`. The first piece has the prompt, if that is wanted, which has been read by then."""
        text, entries = update.text, list[TokenLogprobs | None](update.logprobs or ())
        if choice.index not in self._offsets:
            text, entries = self._echo(choice) + text, [*self._echoed(choice), *entries]
        offset = self._offsets.setdefault(choice.index, 0)
        if not text and not entries:
            return None
        scores = self._logprobs(entries, offset, self._prompt_of(choice)[0])
        if scores is not None:
            self._offsets[choice.index] = scores["text_offset"][-1] + len(scores["tokens"][-1])
        return {"text": text, "logprobs": scores}

    def empty(self) -> dict[str, Any]:
        """See `Form`."""
        return {"text": "", "logprobs": None}

    def _echo(self, choice: Choice) -> str:
        if not self.request.echo:
            return ""
        return self.tokenizer.decode(self._prompt_of(choice))

    def _prompt_of(self, choice: Choice) -> list[int]:
        return self.run.job.prompts[choice.index // self.run.job.params.n]

    def _echoed(self, choice: Choice) -> list[TokenLogprobs | None]:
        return self.prompt_scores(choice) if self.request.echo and self.request.logprobs is not None else []

    def _logprobs(self, entries: Seq[TokenLogprobs | None], offset: int, first: int = 0) -> dict[str, Any] | None:
        return tokens.completion_logprobs(entries, self.tokenizer, offset, first) if entries else None


def _ended(update: Update) -> dict[str, Any]:
    finish = update.finish
    if finish is None:
        return _open()
    return {"finish_reason": finish.reason, "stop_reason": finish.by}


def _open() -> dict[str, Any]:
    return {"finish_reason": None}
