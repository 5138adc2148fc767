"""The report as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table

from surefoot.bench.report import Report
from surefoot.bench.turns import Spread


def renderables(report: Report) -> Iterator[RenderableType]:
    """Heading, verdict, cost card, passes, speeds; in this order."""
    config, machine = report.config, report.machine
    weights = " shape, random weights" if report.random_weights else ""
    yield (
        f"[bold]{report.model}[/bold]{weights}, {config['dtype']}, context {config['context']}, "
        f"batch {config['batch']}, {config['tokens']} tokens, greedy"
    )
    versions = ", ".join(" ".join(pair) for pair in machine.versions.items())
    yield f"{report.device}, threads: {machine.threads}; {versions}"
    yield (
        f"load {machine.load[0]:.2f} before, {machine.load[1]:.2f} after; other processes used "
        f"{machine.elsewhere:.0%} of the cores meanwhile"
    )
    yield _verdict(report)
    for note in report.notes:
        yield f"note: {note}"
    yield _cost(report)
    yield _passes(report)
    yield _speeds(report)


def _verdict(report: Report) -> str:
    v = report.lossless
    theirs = "" if report.library_equal is None else f"; transformers gave them for {report.library_equal}"
    return (
        f"lossless: {len(v.methods)} ways to decode gave plain decoding's {v.tokens} tokens for {v.prompts} of "
        f"{v.prompts} prompts{theirs}; windows of {v.window_sizes[0]} to {v.window_sizes[-1]} tokens equal single "
        f"steps bit for bit over {v.positions} positions"
    )


def _cost(report: Report) -> Table:
    step, ceiling = report.step_bytes, report.ceiling
    table = _table("a step must move", "MB", "share")
    for name, size in (("weights", step.weights), ("recurrent state, read and written", step.state),
                       ("keys and values", step.kv), ("all", step.total)):  # fmt: skip
        table.add_row(name, f"{size / 1e6:.1f}", f"{size / step.total:.0%}")
    if step.draft:
        table.add_row("a draft step of the MTP head", f"{step.draft / 1e6:.1f}", f"{step.draft_share:.0%}")
    table.caption = (
        f"read at {ceiling.bandwidth / 1e9:.1f} GB/s: {ceiling.step_ms:.3f} ms a step, at most "
        f"{ceiling.tokens_per_second:.1f} tokens/s; plain decoding reaches {report.share_of_ceiling:.0%} of that"
    )
    return table


def _passes(report: Report) -> Table:
    table = _table("pass", "ms", "least to most", "/ T_v(1)")
    base = report.passes["verify 1"].median
    for name, spread in report.passes.items():
        label = "T_d" if name == "draft" else f"T_v({name.removeprefix('verify ')})"
        table.add_row(label, f"{spread.median:.3f}", _ends(spread, 3), f"{spread.median / base:.3f}")
    return table


def _speeds(report: Report) -> Table:
    library = any(row.to_library is not None for row in report.rows)
    columns = ["tokens/s", "least to most", "× plain", *(["× transformers"] if library else []), "tokens/step",
               "kept by position", "draft s", "verify s", "commit s"]  # fmt: skip
    table = _table("", *columns)
    for row in report.rows:
        spread = row.tokens_per_second
        ratio = [] if row.to_library is None else [f"{row.to_library:.2f}"]
        table.add_row(
            f"{row.name}, set" if row.acceptance_set else row.name,
            f"{spread.median:.1f}", _ends(spread, 1), f"{row.to_plain:.2f}", *ratio,
            f"{row.tokens_per_step:.2f}", " ".join(f"{share:.2f}" for share in row.kept_by_position),
            *(f"{row.seconds[name]:.2f}" if row.seconds[name] else "" for name in ("draft_s", "verify_s", "commit_s")),
        )  # fmt: skip
    rounds = report.config["rounds"]
    table.caption = f"medians of {rounds} rounds in which all took turns; decoding alone, the prompt's reading left out"
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, caption_justify="left", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _ends(spread: Spread, digits: int) -> str:
    return f"{spread.least:.{digits}f} to {spread.most:.{digits}f}"
