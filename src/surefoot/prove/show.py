"""The report on a terminal, and as one page of HTML."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from surefoot.prove.report import Check, Report, Section

PASSED, FAILED = "[green]passed[/green]", "[bold red]FAILED[/bold red]"


def renderables(report: Report) -> Iterator[RenderableType]:
    """Heading, sections, verdict; in this order."""
    c = report.config
    yield (f"[bold]{escape(report.model)}[/bold], {c['dtype']}, {report.device}, threads: {c['threads']}; "
           f"{', '.join(' '.join(pair) for pair in report.versions.items())}")  # fmt: skip
    yield (f"{c['prompts']} prompts, {c['tokens']} tokens each; drafters {', '.join(c['drafters'])}; K up to "
           f"{c['max_k']}; seed {c['seed']}{'; quick' if c['quick'] else ''}")  # fmt: skip
    for note in report.notes:
        yield f"note: {escape(note)}"
    for number, section in enumerate(report.sections, start=1):
        yield from _section(number, section)
    yield verdict(report)


def verdict(report: Report) -> str:
    """One sentence."""
    if report.passed:
        checks = sum(len(section.checks) for section in report.sections)
        return f"[green]proved[/green]: all {checks} checks of {len(report.sections)} sections hold"
    return f"[bold red]NOT LOSSLESS[/bold red], or not shown to be: {escape('; '.join(report.failures))}"


def spelled(row: dict[str, Any]) -> str:
    """A line of a check's table."""
    return ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
    )


def _section(number: int, section: Section) -> Iterator[RenderableType]:
    yield ""
    yield f"[bold]{number}. {section.title}[/bold]: {PASSED if section.passed else FAILED} ({section.seconds:.1f} s)"
    yield escape(section.claim)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in section.checks:
        table.add_row(PASSED if check.passed else FAILED, escape(check.name), escape(_seen(check)))
    yield table
    for note in section.notes:
        yield f"note: {escape(note)}"


def _seen(check: Check) -> str:
    return "\n".join([check.seen, *(spelled(row) for row in check.table)])


def write_page(report: Report, file: Path) -> None:
    """Write the report as one page that needs nothing else."""
    text = resources.files("surefoot.prove").joinpath("report.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(text).render(report=report, spelled=spelled)
    file.write_text(page, encoding="utf-8")
