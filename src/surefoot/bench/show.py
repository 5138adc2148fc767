"""The report as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict

from rich import box
from rich.console import RenderableType
from rich.table import Table

from surefoot.bench.machine import Machine
from surefoot.bench.measure import LIBRARY, Row
from surefoot.bench.report import Report
from surefoot.bench.server import ServerReport
from surefoot.bench.turns import Spread


def renderables(report: Report) -> Iterator[RenderableType]:
    """Heading, verdict, start-up and memory, cost card, passes, speeds; in this order."""
    config, machine = report.config, report.machine
    weights = " shape, random weights" if report.random_weights else ""
    yield (
        f"[bold]{report.model}[/bold]{weights}, {config['dtype']}, context {config['context']}, "
        f"batch {config['batch']}, {config['tokens']} tokens, greedy"
    )
    yield f"{report.device}, threads: {machine.threads}; {_versions(machine)}"
    yield _load(machine)
    yield _verdict(report)
    for note in report.notes:
        yield f"note: {note}"
    yield _start_up(report)
    yield _memory(report)
    yield _cost(report)
    yield _passes(report)
    yield _speeds(report)
    took = [f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items() if seconds >= 0.05]
    yield f"time: {', '.join(took)}"


def summary(reports: Seq[Report]) -> Table:
    """A line for every cell."""
    table = _table("context", "batch", "plain tokens/s", "of the ceiling", "best", "tokens/s", "× plain", "tokens/step",
                   "T_v(1) ms", "first token s", "GB")  # fmt: skip
    for report in reports:
        best = max((row for row in report.rows if row.name != LIBRARY), key=lambda row: row.tokens_per_second.median)
        table.add_row(
            f"{report.config['context']:,}", str(report.config["batch"]),
            f"{report.plain.tokens_per_second.median:.1f}", f"{report.share_of_ceiling:.0%}", _name(best),
            f"{best.tokens_per_second.median:.1f}", f"{best.to_plain:.2f}", f"{best.tokens_per_step:.2f}",
            f"{report.passes['verify 1'].median:.3f}", f"{report.start_up.first_token_s:.2f}",
            f"{report.memory.total / 1e9:.2f}",
        )  # fmt: skip
    return table


def served(report: ServerReport) -> Iterator[RenderableType]:
    """Heading, verdict and speeds of a server."""
    config, machine = report.config, report.machine
    yield (
        f"[bold]{report.model}[/bold], served; {report.requests} requests of {report.prompt_tokens:.0f} tokens on "
        f"average, {config['tokens']} new ones each, greedy"
    )
    if machine is not None:
        yield f"{config['device']}, {config['dtype']}; {machine.cpu}; {_versions(machine)}"
        yield _load(machine)
    yield f"lossless: {report.compared} texts equal those of the same requests alone ({report.alone})"
    if report.cached_tokens:
        yield f"note: {report.cached_tokens} tokens of prompts were not read again, so first tokens came sooner"
    first = config["concurrency"][0]
    table = _table("", "at once", "tokens/s", "least to most", f"× {first} at once", "a request's", "first token ms",
                   "95 %", "token to token ms", "95 %", "accepted")  # fmt: skip
    for row in report.rows:
        table.add_row(
            row.name, str(row.concurrency), f"{row.tokens_per_second.median:.1f}", _ends(row.tokens_per_second, 1),
            f"{row.to_first:.2f}", f"{row.per_request:.1f}", f"{row.first_ms.median:.1f}", f"{row.first_ms.p95:.1f}",
            f"{row.between_ms.median:.2f}", f"{row.between_ms.p95:.2f}",
            "" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}",
        )  # fmt: skip
    table.caption = (
        f"medians of {config['rounds']} rounds in which all took turns; of the latencies, over all requests; a step's "
        "time is shared among its tokens"
    )
    yield table


def _versions(machine: Machine) -> str:
    return ", ".join(" ".join(pair) for pair in machine.versions.items())


def _load(machine: Machine) -> str:
    return (
        f"load {machine.load[0]:.2f} before, {machine.load[1]:.2f} after; other processes used "
        f"{machine.elsewhere:.0%} of the cores meanwhile"
    )


def _start_up(report: Report) -> str:
    start = report.start_up
    recorded = list(start.recording_s.values())
    recording = f"recording the steps of {len(recorded)} methods {sum(recorded):.1f} (the first {recorded[0]:.1f}), " \
        if recorded else ""  # fmt: skip
    return (f"start to first token {start.total_s:.1f} s: loading {start.loading_s:.1f}, {recording}first prompt and "
            f"step {start.first_token_s:.2f}")  # fmt: skip


def _memory(report: Report) -> str:
    parts = asdict(report.memory)
    names = {"kv": "keys and values", "recurrent": "recurrent state and tape", "work": "workspaces"}
    listed = ", ".join(f"{names.get(name, name)} {size / 1e9:.3f}" for name, size in parts.items())
    return f"memory {report.memory.total / 1e9:.3f} GB: {listed}"


def _name(row: Row) -> str:
    return f"{row.name}, set" if row.acceptance_set else row.name


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
    phases = [name for name in ("draft_s", "verify_s", "commit_s") if any(row.seconds[name] for row in report.rows)]
    columns = ["tokens/s", "least to most", "× plain", *(["× transformers"] if library else []), "ms/step",
               "tokens/step", "kept by position", *(name.replace("_", " ") for name in phases)]  # fmt: skip
    table = _table("", *columns)
    for row in report.rows:
        spread = row.tokens_per_second
        ratio = [] if row.to_library is None else [f"{row.to_library:.2f}"]
        table.add_row(
            _name(row), f"{spread.median:.1f}", _ends(spread, 1), f"{row.to_plain:.2f}", *ratio, f"{row.step_ms:.3f}",
            f"{row.tokens_per_step:.2f}", " ".join(f"{share:.2f}" for share in row.kept_by_position),
            *(f"{row.seconds[name]:.2f}" if row.seconds[name] else "" for name in phases),
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
