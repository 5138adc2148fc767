"""`surefoot bench`: options to settings, a report to the terminal and to files."""

from __future__ import annotations

from dataclasses import fields

from surefoot.bench.plot import draw, require_matplotlib
from surefoot.bench.report import Report, save
from surefoot.bench.run import run_cells
from surefoot.bench.settings import Settings
from surefoot.bench.show import renderables, summary
from surefoot.cli.bench_server import bench_server
from surefoot.cli.console import OutputConsole
from surefoot.cli.files import check_writable
from surefoot.cli.options import BenchOptions, listed, number_or_file
from surefoot.cli.progress import LateBar
from surefoot.errors import InputError

ONLY_SERVER = ("concurrency", "requests")


def bench(options: BenchOptions) -> None:
    """Measure, print, save, cell after cell. What was asked for is checked before anything is loaded."""
    if options.api_key is not None and options.url is None:
        raise InputError("--api-key: expected it with --url, found no server but our own, which asks for none")
    if options.server or options.url is not None:
        bench_server(options)
        return
    for field in fields(options):
        if field.name in ONLY_SERVER and getattr(options, field.name) != field.default:
            raise InputError(f"--{field.name}: expected it with --server, found {getattr(options, field.name)}")
    cells = cells_of(options)
    for name, file in (("--json", options.json), ("--plot", options.plot)):
        if file is not None:
            check_writable(name, file)
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
    contexts, batches = listed("--context", options.context, int), listed("--batch", options.batch, int)
    for name, numbers in (("--context", contexts), ("--batch", batches)):
        if not numbers:
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
            drafters=listed("--drafters", options.drafters, str),
            depths=listed("--depths", options.depths, int),
            draft_vocab=number_or_file(options.draft_vocab),
            synthetic_acceptance=listed("--synthetic-acceptance", options.synthetic_acceptance, float),
            tokens=options.tokens,
            rounds=options.rounds,
            seconds=options.seconds,
            against=options.against,
            seed=options.seed,
        )
        for context in contexts
        for batch in batches
    ]
