"""One place where requests of every form go into the service and come out of it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from fastapi import Request

from surefoot.engine.service import Service, Ticket
from surefoot.errors import ClosedError, shown
from surefoot.sequence import TokenLogprobs
from surefoot.server.board import Board
from surefoot.server.choices import Choice, Finish, Update, follow
from surefoot.server.errors import ApiError
from surefoot.server.params import Job, Reader, each_choice
from surefoot.server.parsing import Delta


@dataclass(frozen=True)
class Limits:
    """`max_choices` of one request, all its prompts counted."""

    max_choices: int = 128


@dataclass
class Whole:
    """A choice from beginning to end."""

    updates: list[Update] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text, not parsed."""
        return "".join(update.text for update in self.updates)

    @property
    def deltas(self) -> list[Delta]:
        """All of it, parsed."""
        return [delta for update in self.updates for delta in update.deltas]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Of all tokens, if they were asked for."""
        return [entry for update in self.updates for entry in update.logprobs or ()]

    @property
    def finish(self) -> Finish:
        """How it ended."""
        finish = self.updates[-1].finish
        assert finish is not None
        return finish


@dataclass
class Run:
    """A request that was let in. Whoever has one closes it. `trace` is the client's (W3C's `traceparent`)."""

    id: str
    created: int
    path: str
    model: str
    job: Job
    choices: list[Choice]
    board: Board
    trace: str | None = None

    def __post_init__(self) -> None:
        self._left = dict.fromkeys(range(len(self.choices)))

    async def updates(self) -> AsyncGenerator[Update, None]:
        """Everything, as it comes."""
        async with aclosing(follow(self.choices)) as events:
            async for choice, record, update in events:
                if record is not None:
                    self.board.emitted(record.emitted)
                elif update.finish is not None:
                    self._ended(choice.index, update.finish.reason)
                yield update

    def close(self) -> None:
        """Cancel what still runs, and say how that ended; to be called whatever happens."""
        for index in list(self._left):
            ticket = self.choices[index].ticket
            ticket.cancel()
            self._ended(index, "cancelled" if ticket.error is None else "error")

    async def whole(self) -> list[Whole]:
        """The whole answer, choice by choice."""
        answers = [Whole() for _ in self.choices]
        async with aclosing(self.updates()) as updates:
            async for update in updates:
                answers[update.index].updates.append(update)
        return answers

    def _ended(self, index: int, outcome: str) -> None:
        del self._left[index]
        self.board.ended(self.path, self.model, self.id, self.choices[index], outcome, self.trace)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(map(len, self.job.prompts))

    @property
    def cached_tokens(self) -> int:
        """Of all prompts, those that the first choice of each did not read."""
        return sum(choice.cached_tokens for choice in self.choices[:: self.job.params.n])

    def count(self, name: str) -> int:
        """The sum of one of the choices' counts (a property of `Stats`)."""
        return sum(getattr(choice.stats, name) for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts."""
        return sum(choice.reasoning_tokens for choice in self.choices)


class Backend:
    """The service, and what all forms need to know of its model."""

    def __init__(self, service: Service, reader: Reader, model: str, board: Board, limits: Limits) -> None:
        self.service, self.reader, self.model, self.board, self.limits = service, reader, model, board, limits

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for a model that is not served. None is the one that is."""
        if name is not None and name != self.model:
            raise ApiError(404, f"model: expected {self.model!r}, found {shown(name)}", "model", "model_not_found")

    async def start(self, make: Callable[[], Job], request: Request, prefix: str) -> Run:
        """Let a request in: `make` builds the job, in a thread, as texts may be long. Raises what it raises, ApiError,
        InputError, ClosedError and QueueFullError; then nothing of it is left in the service."""
        if not self.service.open:
            raise ClosedError("service: expected it to take requests, found it closing")
        job = await asyncio.to_thread(make)
        wanted = len(job.prompts) * job.params.n
        if wanted > self.limits.max_choices:
            raise ApiError(400, f"n: expected at most {self.limits.max_choices} choices in all, found {wanted}", "n")
        choices: list[Choice] = []
        try:
            for index, (prompt, params) in enumerate(each_choice(job)):
                submit = partial(
                    self.service.submit, prompt, params, drafter=job.drafter, draft_length=job.draft_length
                )
                parser = None if job.parser is None else job.parser()
                ticket = await _submitted(submit)
                choices.append(Choice(index, ticket, params, self.reader.tokenizer, len(prompt), parser))
        except BaseException:
            for choice in choices:
                choice.ticket.cancel()
            raise
        run_id, trace = f"{prefix}{uuid.uuid4().hex}", request.headers.get("traceparent")
        return Run(run_id, int(time.time()), request.url.path, self.model, job, choices, self.board, trace)


async def _submitted(submit: Callable[[], Ticket]) -> Ticket:
    """Submit in a thread, as grammars take time. A ticket that nobody waits for any more is cancelled."""
    task = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: None if done.exception() else done.result().cancel())
        raise
