"""A server's speed as its clients see it: streams of greedy requests, so many at once.

Nothing is measured unless every text is that of the same request alone: what one client reads must not depend on the
others, on the drafter, or on whether there is one.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from surefoot.bench.lossless import NotLosslessError
from surefoot.bench.machine import Machine
from surefoot.bench.prompts import held_out
from surefoot.bench.settings import Method
from surefoot.bench.turns import Spread, median_ratio
from surefoot.engine.arguments import parse_device
from surefoot.engine.drafting import NAMES, check_draft_length
from surefoot.errors import InputError, shown
from surefoot.sampling import require_int

PATIENCE_S = 600  # without a word from the server
CUT = 8  # characters that a text is shorter by when it comes again
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ServerSettings:
    """Options of a run: `requests` of `tokens` tokens each at each `concurrency`, by each drafter and draft length, in
    `rounds` rounds. Without `drafters`: plainly and by the server's own, where requests may choose. Raises InputError.
    """

    drafters: tuple[str, ...] = ()
    depths: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = (1, 8)
    requests: int = 16
    tokens: int = 128
    rounds: int = 3

    def __post_init__(self) -> None:
        if not self.concurrency:
            raise InputError("concurrency: expected at least one number, found none")
        for name, value in (("requests", self.requests), ("rounds", self.rounds),
                            *(("concurrency", most) for most in self.concurrency)):  # fmt: skip
            require_int(name, value, low=1)
        require_int("tokens", self.tokens, low=2)  # between two there is a time
        for drafter in self.drafters:
            if drafter not in NAMES:  # which of them it has, the server knows
                raise InputError(f"drafters: expected one of {', '.join(NAMES)}, found {shown(drafter)}")
        for depth in self.depths:
            check_draft_length("mtp", depth, parse_device("cpu"))  # a GPU's server may refuse more

    def methods(self, card: dict[str, Any]) -> list[Method]:
        """The ways to decode, by a server whose own drafter and draft length its `card` tells."""
        depths = self.depths or (card.get("draft_length") or 1,)
        own = card.get("drafter", "none")
        drafters = self.drafters or ((own,) if card.get("drafter_is_fixed") else tuple(dict.fromkeys(("none", own))))
        return [
            Method(drafter, depth) for drafter in drafters for depth in (depths if drafter != "none" else (0,))
        ]  # fmt: skip

    def command(self, model: Mapping[str, Any]) -> str:
        """The command line of these settings, for a server of ours that was started with `model`."""
        values = {**model, **vars(self)}
        words = [
            word
            for name, value in values.items()
            if value not in (None, ())
            for word in ("--" + name.replace("_", "-"), _spelt(value))
        ]
        return " ".join(["surefoot bench --server", *words])


@dataclass(frozen=True)
class Address:
    """Where a server listens, http://host:port, and the key that it asks of its clients, if it asks for one."""

    url: str
    api_key: str | None = None


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it: moments in seconds of one clock, `gaps` as pairs (seconds, tokens): how long a
    piece of the stream let itself be waited for behind the one before it, and how many tokens it had."""

    text: str
    tokens: int
    prompt_tokens: int
    cached: int
    drafted: int
    accepted: int
    sent: float
    first: float
    ended: float
    gaps: list[tuple[float, int]]


@dataclass(frozen=True)
class Latency:
    """Milliseconds: the median, and what 95 of 100 do not exceed."""

    median: float
    p95: float

    @classmethod
    def of(cls, seconds: Seq[float]) -> Latency:
        """Of at least one."""
        ordered = sorted(1000 * value for value in seconds)
        return cls(statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1])


@dataclass(frozen=True)
class ServedRow:
    """One way to decode at one concurrency. `tokens_per_second`: of all requests together, over the rounds;
    `to_first`: the median ratio to the first concurrency's of the same method, round by round; `per_request`: the
    median request's tokens per second, its prompt's reading included. `between_ms`: from token to token, a step's time
    shared among its tokens."""

    name: str
    drafter: str
    depth: int
    concurrency: int
    tokens_per_second: Spread
    to_first: float
    per_request: float
    first_ms: Latency
    between_ms: Latency
    acceptance_rate: float | None


@dataclass(frozen=True)
class ServerReport:
    """A run whose texts were all right. `compared` of them, with those of `requests` requests alone, decoded by
    `alone`; `prompt_tokens` of a request, on average; `cached_tokens` of all prompts that the server did not read;
    `machine` is None where the server is another's."""

    model: str
    config: dict[str, Any]
    alone: str
    requests: int
    compared: int
    prompt_tokens: float
    cached_tokens: int
    rows: list[ServedRow]
    machine: Machine | None = None
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return asdict(self)


def measure_server(address: Address, settings: ServerSettings, progress: Progress) -> ServerReport:
    """Ask the server until all is known. Raises NotLosslessError for a text that is not that of the same
    request alone, InputError for what the server refuses or a server that is none."""
    card = _model(address)
    methods = settings.methods(card)
    texts = prompts(settings.requests)
    cells = [(method, most) for method in methods for most in settings.concurrency]
    waves, done = 1 + settings.rounds * len(cells), 0

    def wave(method: Method, most: int) -> tuple[list[Answer], float]:
        nonlocal done
        bodies = [_body(text, method, settings.tokens, card) for text in texts]
        found = send(address, bodies, most)
        done += 1
        progress(done, waves)
        return found

    right, _ = wave(methods[0], 1)
    found: dict[tuple[Method, int], list[tuple[list[Answer], float]]] = {cell: [] for cell in cells}
    for _ in range(settings.rounds):
        for cell in cells:
            answers, seconds = wave(*cell)
            check_texts(cell[0].name, cell[1], right, answers)
            found[cell].append((answers, seconds))
    answers = [answer for rounds in found.values() for answers, _ in rounds for answer in answers]
    return ServerReport(
        model=card["id"],
        config=asdict(settings) | {"temperature": 0.0, "ignore_eos": True},
        alone=methods[0].name,
        requests=len(texts),
        compared=len(answers),
        prompt_tokens=statistics.mean(answer.prompt_tokens for answer in right),
        cached_tokens=sum(answer.cached for answer in answers),
        rows=[
            _row(method, most, found[method, most], found[method, settings.concurrency[0]]) for method, most in cells
        ],
    )


def prompts(count: int) -> list[str]:
    """So many texts to continue: the built-in ones, which come a little shorter each time that they come again."""
    texts = [line["text"] for line in held_out()]
    return [texts[i % len(texts)][: len(texts[i % len(texts)]) - CUT * (i // len(texts))] for i in range(count)]


def send(address: Address, bodies: Seq[dict[str, Any]], most: int) -> tuple[list[Answer], float]:
    """The answers, `most` requests at a time, and the seconds that all took."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(most) as clients:
        answers = list(clients.map(partial(ask, address), bodies))
    return answers, time.perf_counter() - begun


def check_texts(name: str, most: int, right: Seq[Answer], found: Seq[Answer]) -> None:
    """Raise NotLosslessError unless all texts are the same, naming those that are not."""
    wrong = [
        f"request {number}, character {_differs_at(one.text, other.text)}"
        for number, (one, other) in enumerate(zip(right, found, strict=True))
        if (one.text, one.tokens) != (other.text, other.tokens)
    ]
    if wrong:
        raise NotLosslessError(f"not lossless, so nothing was measured: {name}, {most} at once: {'; '.join(wrong)} "
                               "differs from the same request's alone")  # fmt: skip


def ask(address: Address, body: dict[str, Any]) -> Answer:
    """One streaming request. Raises InputError for an answer that is an error, or none."""
    text, gaps, usage = "", list[tuple[float, int]](), None
    sent = last = time.perf_counter()
    first: float | None = None
    with closing(_connection(address.url)) as connection:
        for event in _events(_answer(connection, address.api_key, "POST", "/v1/completions", body)):
            if "error" in event:
                raise InputError(f"server: expected an answer, found {shown(event['error'])}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if not choice["text"]:
                    continue
                text += choice["text"]
                now = time.perf_counter()
                if first is None:
                    first = now
                else:
                    gaps.append((now - last, max(1, len(event.get("surefoot", ())))))
                last = now
    if usage is None or first is None:
        raise InputError("server: expected a stream with text and usage, found one without")
    prompt, details = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return Answer(text, usage["completion_tokens"], usage["prompt_tokens"], prompt.get("cached_tokens", 0),
                  details.get("drafted_tokens", 0), details.get("accepted_tokens", 0), sent, first, last,
                  gaps)  # fmt: skip


def _body(text: str, method: Method, tokens: int, card: dict[str, Any]) -> dict[str, Any]:
    body = {"model": card["id"], "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "drafter": method.drafter}  # fmt: skip
    return body | ({"draft_length": method.depth} if method.depth else {})


def _row(method: Method, most: int, rounds: Seq[tuple[list[Answer], float]],
         first: Seq[tuple[list[Answer], float]]) -> ServedRow:  # fmt: skip
    answers = [answer for answers, _ in rounds for answer in answers]
    drafted = sum(answer.drafted for answer in answers)
    between = [seconds / tokens for answer in answers for seconds, tokens in answer.gaps for _ in range(tokens)]
    return ServedRow(
        method.name,
        method.drafter,
        method.depth,
        most,
        Spread.of(_rates(rounds)),
        median_ratio(_rates(rounds), _rates(first)),
        statistics.median(answer.tokens / (answer.ended - answer.sent) for answer in answers),
        Latency.of([answer.first - answer.sent for answer in answers]),
        Latency.of(between or [0.0]),
        sum(answer.accepted for answer in answers) / drafted if drafted else None,
    )


def _rates(rounds: Seq[tuple[list[Answer], float]]) -> list[float]:
    return [sum(answer.tokens for answer in answers) / seconds for answers, seconds in rounds]


def _spelt(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _differs_at(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _model(address: Address) -> dict[str, Any]:
    """What the server says of its model."""
    with closing(_connection(address.url)) as connection:
        answer = _answer(connection, address.api_key, "GET", "/v1/models", None)
        try:
            card: dict[str, Any] = json.loads(answer.read())["data"][0]
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(f"url: expected a server with a model, found none at {address.url}") from error
    return card


def _connection(url: str) -> HTTPConnection:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme not in ("http", "https") or host is None:
        raise InputError(f"url: expected http://host:port, found {shown(url)}")
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(host, port, timeout=PATIENCE_S)


def _answer(
    connection: HTTPConnection, key: str | None, verb: str, path: str, body: dict[str, Any] | None
) -> HTTPResponse:
    """An answer without an error."""
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        connection.request(verb, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        said = "" if answer.status == 200 else answer.read().decode(errors="replace")
    except (OSError, HTTPException) as error:
        raise InputError(f"url: expected a server, found none at {connection.host}:{connection.port}: {error}"
                         ) from error  # fmt: skip
    if answer.status != 200:
        raise InputError(f"server: expected an answer, found status {answer.status}: {shown(said, 300)}")
    return answer


def _events(answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream. Raises InputError if it breaks off."""
    try:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
    except (OSError, HTTPException) as error:
        raise InputError(f"server: expected the stream to go on, found {error or type(error).__name__}") from error
