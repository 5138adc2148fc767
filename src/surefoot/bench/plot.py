"""The report as a picture: speed by drafter and draft length, and what a pass over N tokens costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.bench.report import Report
from surefoot.errors import InputError

COLOURS = {"none": "#5f6368", "ngram": "#e8a33d", "mtp": "#2f7ed8", "mtp+ngram": "#3a9e5c", "auto": "#8e44ad",
           "": "#9aa0a6"}  # fmt: skip


def require_matplotlib() -> Any:
    """Its `Figure`, which draws without a screen. Raises InputError naming the extra that brings it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("plot: expected matplotlib to be installed (pip install 'surefoot[plot]'), "
                         f"found: {error}") from error  # fmt: skip
    return Figure


def draw(report: Report, path: Path) -> None:
    """Write the picture; the ending of the name decides the format. Raises InputError for one that is not known."""
    figure = require_matplotlib()(figsize=(11, 0.3 * len(report.rows) + 2.2))
    speeds, passes = figure.subplots(1, 2, width_ratios=(3, 2))
    _speeds(speeds, report)
    _passes(passes, report)
    weights = " shape, random weights" if report.random_weights else ""
    figure.suptitle(f"{report.model}{weights}, {report.config['dtype']}, context {report.config['context']}, "
                    f"batch {report.config['batch']}, {report.device.split(' (')[0]}", fontsize=10)  # fmt: skip
    figure.tight_layout()
    save_picture(figure, path)


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure. Raises InputError for a name whose ending is no format's."""
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise InputError(f"plot: expected a name ending in a format that matplotlib writes, found: {error}") from error


def _speeds(axes: Any, report: Report) -> None:
    rows = report.rows
    middle = [row.tokens_per_second.median for row in rows]
    below = [row.tokens_per_second.median - row.tokens_per_second.least for row in rows]
    above = [row.tokens_per_second.most - row.tokens_per_second.median for row in rows]
    bars = axes.barh([row.name for row in rows], middle, xerr=[below, above], ecolor="#202124",
                     color=[COLOURS[row.drafter] for row in rows])  # fmt: skip
    axes.bar_label(bars, [f"{row.tokens_per_second.median:.0f}  (×{row.to_plain:.2f})" for row in rows], padding=8,
                   fontsize=8)  # fmt: skip
    axes.axvline(report.ceiling.tokens_per_second, color="#c5221f", linestyle=":", label="bandwidth, plain")
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s (× plain decoding); lines from the slowest to the fastest round")
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.2)


def _passes(axes: Any, report: Report) -> None:
    sizes = {int(name.removeprefix("verify ")): s for name, s in report.passes.items() if name != "draft"}
    axes.plot(list(sizes), [spread.median for spread in sizes.values()], "o-", label="T_v(N)")
    if (draft := report.passes.get("draft")) is not None:
        axes.axhline(draft.median, color=COLOURS["mtp"], linestyle="--", label="T_d")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N, tokens of a verify pass")
    axes.set_ylabel("ms")
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
