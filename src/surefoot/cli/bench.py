"""`surefoot bench`: options to settings, a report to the terminal and to files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from surefoot.bench.plot import draw, require_matplotlib
from surefoot.bench.report import Report, save
from surefoot.bench.run import run_cells
from surefoot.bench.settings import Settings
from surefoot.bench.show import renderables, summary
from surefoot.cli.console import OutputConsole
from surefoot.cli.options import BenchOptions, number_or_file
from surefoot.cli.progress import LateBar
from surefoot.errors import InputError, shown

Item = TypeVar("Item")


def bench(options: BenchOptions) -> None:
    """Measure, print, save, cell after cell. What was asked for is checked before anything is loaded."""
    cells = cells_of(options)
    for name, file in (("--json", options.json), ("--plot", options.plot)):
        if file is not None:
            _check_writable(name, file)
    if options.plot is not None:
        if len(cells) > 1:
            raise InputError(f"--plot: expected one context and one batch, found {len(cells)} of them")
        require_matplotlib()
    console = OutputConsole()
    reports: list[Report] = []
    for report in run_cells(cells, LateBar):
        reports.append(report)
        for part in renderables(report):
            console.print(part)
        if options.json is not None:
            save(options.json, reports)
        if options.plot is not None:
            draw(report, options.plot)
    if len(reports) > 1:
        console.print(summary(reports))


def cells_of(options: BenchOptions) -> list[Settings]:
    """The settings that the options spell, one for each context and batch. Raises InputError."""
    contexts, batches = _listed("--context", options.context, int), _listed("--batch", options.batch, int)
    for name, listed in (("--context", contexts), ("--batch", batches)):
        if not listed:
            raise InputError(f"{name}: expected at least one number, found none")
    return [
        Settings(
            model="surefoot-demo" if options.model is None and options.shape is None else options.model,
            shape=options.shape,
            device=options.device,
            dtype=options.dtype,
            weights=options.weights,
            context=context,
            batch=batch,
            prompts=options.prompts,
            drafters=_listed("--drafters", options.drafters, str),
            depths=_listed("--depths", options.depths, int),
            draft_vocab=number_or_file(options.draft_vocab),
            synthetic_acceptance=_listed("--synthetic-acceptance", options.synthetic_acceptance, float),
            tokens=options.tokens,
            rounds=options.rounds,
            seconds=options.seconds,
            against=options.against,
            seed=options.seed,
        )
        for context in contexts
        for batch in batches
    ]


def _listed(name: str, text: str, kind: Callable[[str], Item]) -> tuple[Item, ...]:
    try:
        return tuple(kind(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise InputError(f"{name}: expected numbers separated by commas, found {shown(text)}") from None


def _check_writable(name: str, file: Path) -> None:
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise InputError(f"{name}: expected a file in a folder that is there, found {file}")
