"""The `surefoot` command: its subcommands, one-line errors, and exit codes.

0 done; 2 bad input (any error of ours about what was given); 1 the model misbehaved, or `doctor` found an error in it;
130 interrupted; 141 the reader of our output went away. Nothing here may import torch: `surefoot --help` has to answer
at once.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated, Any

import typer

from surefoot.cli.options import (
    BenchOptions,
    ChatOptions,
    DoctorOptions,
    Options,
    ProveOptions,
    ServeOptions,
    TuneOptions,
    takes,
)
from surefoot.errors import NumericalError, SurefootError

BAD_INPUT, FAILED, INTERRUPTED, NO_READER = 2, 1, 130, 141

# The class of all usage errors. It is click's own, and typer brings a copy of click from some version on.
USAGE_ERROR: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="surefoot",
    help="Lossless speculative decoding for Qwen3.5-family models.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        with _one_line_errors():
            print(f"surefoot {metadata.version('surefoot')}")
        raise typer.Exit()


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Lossless speculative decoding for Qwen3.5-family models: the tokens of plain decoding, sooner."""


@app.command()
@takes(Options)
def generate(
    options: Options,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Decode plainly too, and compare speed and tokens.", rich_help_panel="Output"),
    ] = False,
) -> None:
    """Continue a prompt; the text appears as it is accepted, statistics follow on standard error."""
    with _one_line_errors():
        from surefoot.cli import generate as command

        if not compare:
            command.generate(options)
        elif not command.compare(options):
            raise NumericalError("tokens: expected those of plain decoding, found others")


@app.command()
@takes(Options)
def trace(options: Options) -> None:
    """Continue a prompt and show every step: what was drafted, what was kept, what came instead of the rest."""
    with _one_line_errors():
        from surefoot.cli import trace as command

        command.trace(options)


@app.command()
@takes(ChatOptions)
def chat(options: ChatOptions) -> None:
    """Talk with a model in the terminal; /help there lists what else can be said."""
    with _one_line_errors():
        from surefoot.cli import chat as command

        command.chat(options)


@app.command()
@takes(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Check that no drafter changes a token; then measure what a step costs and how fast each drafter is."""
    with _one_line_errors():
        from surefoot.cli import bench as command

        command.bench(options)


@app.command()
@takes(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Measure every drafter by kind of prompt on this machine, beside what the speed-up model foretells, and keep what
    --drafter auto goes by."""
    with _one_line_errors():
        from surefoot.cli import tune as command

        command.run_tune(options)


@app.command()
@takes(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Say what is in a checkpoint and what is wrong with it; exit code 1 if there is an error among the findings."""
    with _one_line_errors():
        from surefoot.cli import doctor as command

        if not command.doctor(options):
            raise typer.Exit(FAILED)


@app.command()
@takes(ProveOptions)
def prove(options: ProveOptions) -> None:
    """Prove on this machine that drafting changes nothing: tokens, laws, caches, and the model itself by a textbook."""
    with _one_line_errors():
        from surefoot.cli import prove as command

        command.run_prove(options)


@app.command()
@takes(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model over HTTP, in the forms of OpenAI's and Anthropic's APIs."""
    with _one_line_errors():
        from surefoot.cli import serve as command

        command.serve(options)


def run() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the run
    command = typer.main.get_command(app)
    try:
        code = command.main(args=sys.argv[1:] or ["--help"], prog_name="surefoot", standalone_mode=False)
    except USAGE_ERROR as error:
        _complain(error.format_message())
        code = BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
        sys.stdout.flush()
    except SurefootError as error:
        _complain(str(error))
        raise typer.Exit(FAILED if isinstance(error, NumericalError) else BAD_INPUT) from error
    except BrokenPipeError as error:
        # Python flushes stdout once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(NO_READER) from error


def _complain(message: str) -> None:
    sys.stdout.flush()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
