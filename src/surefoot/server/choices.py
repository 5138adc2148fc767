"""Steps of the engine to what a client reads, for streams and whole answers alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from surefoot.engine.loop import StepRecord
from surefoot.engine.service import Ticket, TicketEvent
from surefoot.engine.stats import Stats
from surefoot.engine.text import OutputText
from surefoot.loading.tokenizer import Tokenizer
from surefoot.sampling import SamplingParams
from surefoot.sequence import TokenLogprobs
from surefoot.server.parsing import CLOSE_CALL, ChatParser, Delta

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


@dataclass(frozen=True)
class Finish:
    """How a choice ended: the stop string or stop token that ended it stands in `by`. "abort" (vLLM's word): the server
    closed before it was done."""

    reason: FinishReason
    by: str | int | None = None


@dataclass(frozen=True)
class Update:
    """What an event brought to choice `index`: pieces of text with the token's origin, the same text parsed, and
    log-probabilities of the tokens, if they were asked for."""

    index: int
    pieces: list[tuple[str, str]]
    deltas: list[Delta]
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: Finish | None = None

    @property
    def text(self) -> str:
        """The pieces put together."""
        return "".join(text for text, _ in self.pieces)


@dataclass
class Choice:
    """One choice of a request while it runs. Everything a client sees of it goes through `take` and `end`."""

    index: int
    ticket: Ticket
    params: SamplingParams
    tokenizer: Tokenizer
    prompt_tokens: int
    parser: ChatParser | None = None
    stats: Stats = field(init=False, default_factory=Stats)
    prompt_logprobs: list[TokenLogprobs | None] | None = field(init=False, default=None)
    tokens: list[int] = field(init=False, default_factory=list)
    reasoning_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._text = OutputText(self.tokenizer, self.params.stop, self.params.min_new_tokens)
        self._called = False
        self._origin = "plain"

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not read again."""
        return self.ticket.stats.cached_tokens

    def take(self, record: StepRecord) -> Update:
        """What a step brought."""
        pieces: list[tuple[str, str]] = []
        deltas: list[Delta] = []
        self.stats.add(record)
        if record.sequence.prompt is not None:
            self.prompt_logprobs = record.sequence.prompt.logprobs
        for token, origin in zip(record.tokens, origins(record), strict=True):
            self._origin = origin
            self.reasoning_tokens += self.parser is not None and self.parser.in_reasoning
            if piece := self._text.push((token,)):
                pieces.append((piece, origin))
                deltas += self._parse(piece)
        self.tokens += record.tokens
        return Update(self.index, pieces, deltas, record.tokens, record.logprobs)

    def end(self) -> Update:
        """What was held back, and how it ended. Raises the request's own error if that ended it."""
        if self.ticket.error is not None:
            raise self.ticket.error
        rest, by = self._text.flush(), self._ended_by()
        deltas = self._parse(rest)
        if by == CLOSE_CALL and self.parser is not None:  # where no second call may come, that is a stop string
            deltas += self._parse(CLOSE_CALL)
        deltas += [] if self.parser is None else self.parser.finish()
        self._called |= any(delta.tool is not None for delta in deltas)
        finish = Finish("length")
        if self.ticket.finish_reason == "cancelled":
            finish = Finish("abort")
        elif self.ticket.finish_reason != "length":
            finish = Finish("tool_calls", None if by == CLOSE_CALL else by) if self._called else Finish("stop", by)
        return Update(self.index, [(rest, self._origin)] if rest else [], deltas, finish=finish)

    def _parse(self, text: str) -> list[Delta]:
        if not text:
            return []
        deltas = [Delta(content=text)] if self.parser is None else self.parser.feed(text)
        self._called |= any(delta.tool is not None for delta in deltas)
        return deltas

    def _ended_by(self) -> str | int | None:
        if self._text.stopped:
            return self._text.found
        if self.tokens and self.tokens[-1] in self.params.stop_token_ids:
            return self.tokens[-1]
        return None


def origins(record: StepRecord) -> list[str]:
    """Where each of a step's tokens came from: the drafter that proposed it ("mtp", "ngram", ...), "bonus" behind a
    draft that was kept whole, "replaced" where a draft token was refused, "plain" where there was no draft."""
    drafted = len(record.draft.tokens)
    last = "plain" if not drafted else "bonus" if record.verdict.accepted == drafted else "replaced"
    return [*[record.draft.source] * record.verdict.accepted, last][: record.emitted]


async def follow(choices: Seq[Choice]) -> AsyncGenerator[tuple[Choice, StepRecord | None, Update], None]:
    """Every event of the choices as it comes: its step (None at a choice's end) and what that brought. Raises the
    error of a choice that ends by one."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[tuple[Choice, TicketEvent]] = asyncio.Queue()

    def listen(choice: Choice) -> None:
        def post(event: TicketEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, (choice, event))

        choice.ticket.on_event(post)

    for choice in choices:
        listen(choice)
    left = len(choices)
    while left:
        choice, event = await events.get()
        if isinstance(event, StepRecord):
            yield choice, event, choice.take(event)
        else:
            left -= 1
            yield choice, None, choice.end()
