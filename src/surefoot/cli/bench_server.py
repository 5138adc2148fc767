"""`surefoot bench --server`: a server of its own, or one that runs already, with clients of ours."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import IO

from surefoot.bench.machine import Watch, versions
from surefoot.bench.report import save
from surefoot.bench.server import Address, ServerReport, ServerSettings, measure_server
from surefoot.bench.settings import Settings
from surefoot.bench.show import served
from surefoot.cli.console import OutputConsole
from surefoot.cli.files import check_writable
from surefoot.cli.options import BenchOptions, listed, number_or_file
from surefoot.cli.progress import LateBar
from surefoot.errors import InputError

MODEL = ("model", "device", "dtype", "weights", "draft_vocab")  # of options, what a server of ours is started with
USED = (*MODEL, "server", "url", "api_key", "concurrency", "requests", "drafters", "depths", "tokens", "rounds", "json")
SERVE = [sys.executable, "-c", "from surefoot.cli.main import run; run()", "serve", "--port", "0"]
ROOM = 4096  # tokens of a prompt, more than any of the texts has


@dataclass(frozen=True)
class Server:
    """Where a server listens, and its process."""

    url: str
    process: subprocess.Popen[str]


def bench_server(options: BenchOptions) -> None:
    """Measure, print, save. What was asked for is checked before anything is started."""
    for field in fields(options):
        unused = field.name not in USED or (options.url is not None and field.name in MODEL)
        if unused and (found := getattr(options, field.name)) != field.default:
            name = field.name.replace("_", "-")
            raise InputError(f"--{name}: expected it without {'--url' if field.name in USED else '--server'}, "
                             f"found {found}")  # fmt: skip
    settings = ServerSettings(
        drafters=listed("--drafters", options.drafters, str),
        depths=listed("--depths", options.depths, int),
        concurrency=listed("--concurrency", options.concurrency, int),
        requests=options.requests,
        tokens=options.tokens,
        rounds=options.rounds,
    )
    if options.json is not None:
        check_writable("--json", options.json)
    report = _measure(options, settings)
    console = OutputConsole()
    for part in served(report):
        console.print(part)
    if options.json is not None:
        save(options.json, [report])


def _measure(options: BenchOptions, settings: ServerSettings) -> ServerReport:
    with LateBar("asking the server") as bar:
        if options.url is not None:
            return measure_server(Address(options.url, options.api_key), settings, bar)
        own = Settings(model=options.model or "surefoot-demo", device=options.device, dtype=options.dtype,
                       weights=options.weights, draft_vocab=number_or_file(options.draft_vocab))  # fmt: skip
        watch = Watch()
        with started(_arguments(own, settings)) as server:
            report = measure_server(Address(server.url), settings, bar)
    # The server's processor time is known now that it has ended.
    config = {name: own.without_paths.get(name, getattr(own, name)) for name in MODEL}
    return replace(report, model=own.label, config=config | report.config,
                   machine=watch.machine(settings.command(config), versions()))  # fmt: skip


def _arguments(own: Settings, settings: ServerSettings) -> list[str]:
    """Of the server: room for all requests, and no prompt that it has read before."""
    given = {
        "model": own.model, "device": own.device, "dtype": own.dtype, "weights": own.weights,
        "slots": max(settings.concurrency), "max-len": ROOM + settings.tokens, "prefix-cache": 0,
    }  # fmt: skip
    if own.draft_vocab is not None:
        given["draft-vocab"] = own.draft_vocab
    if settings.drafters:
        given["drafter"] = settings.drafters[-1]  # on a GPU, the only one that it has
    if settings.depths:
        given["draft-length"] = settings.depths[-1]
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


@contextmanager
def started(arguments: Seq[str]) -> Iterator[Server]:
    """A server with these arguments in a process of its own (clients in the server's would take its time), until the
    block ends; then it is told to end. What it says before it listens is passed on. Raises InputError if it does not
    come to that."""
    with subprocess.Popen([*SERVE, *arguments], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        rest = threading.Thread(target=process.stderr.read)  # its log, lest the pipe fills up
        try:
            address = _address(process.stderr)
            rest.start()
            yield Server(address, process)
        finally:
            process.terminate()
            if rest.ident is not None:
                rest.join()


def _address(said: IO[str]) -> str:
    last = ""
    for last in said:
        if last.startswith("serving ") and " at http" in last:
            return last.rsplit(" at ", 1)[1].strip()
        if last.startswith("note: "):
            print(last.rstrip(), file=sys.stderr)
    raise InputError(last.removeprefix("error: ").strip() or "server: expected it to start, found it ended")
