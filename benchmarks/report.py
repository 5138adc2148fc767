"""What a benchmark run found, and the page of it, which `python -m benchmarks.report FILE.json...` prints again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from surefoot.bench.machine import Machine


@dataclass(frozen=True)
class Row:
    """One setting of the demo section: rates in tokens/s, ratios of rates taken within each round, medians of rounds.
    `shares[i]` is the share of drafts whose token i was kept; `predicted` what the step times and these shares give."""

    name: str
    rate: float
    to_plain: float
    to_library: float
    kinds: dict[str, float] = field(default_factory=dict)
    tokens_per_step: float = 1.0
    shares: list[float] = field(default_factory=list)
    predicted: float | None = None


@dataclass(frozen=True)
class Demo:
    """A checkpoint in one dtype. `equal` counts the prompts for which `transformers` gave the same tokens."""

    model: str
    dtype: str
    prompts: int
    tokens: int
    rounds: int
    equal: int
    rows: list[Row]
    steps: dict[str, float]
    machine: Machine


@dataclass(frozen=True)
class Shape:
    """Random weights of a shape. `steps` are milliseconds by name (see `steps.py`), `weights` the bytes of weights that
    a token reads, `bandwidth` bytes/s; `together`: `transformers` took turns with us rather than coming after us."""

    shape: str
    dtype: str
    context: int
    rounds: int
    checked: int
    together: bool
    weights: int
    bandwidth: float
    steps: dict[str, float]
    machine: Machine


Section = Demo | Shape


def speedup_model(shares: Seq[float], verify_cost: float, draft_cost: float) -> float:
    """Times plain decoding, if token i of a draft is kept in `shares[i]` of the steps (p1, p1 p2, ...), verifying the
    whole draft costs `verify_cost` plain tokens and drafting one token `draft_cost`."""
    return (1 + sum(shares)) / (verify_cost + len(shares) * draft_cost)


def table(headers: Seq[str], rows: Iterable[Seq[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right, padded to line up."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(headers))]
    cells = [
        [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    rule = ["-" * width if not i else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [cells[0], rule, *cells[1:]])


def page(sections: Iterable[Section]) -> str:
    """All sections, one after the other."""
    return "\n\n".join(render(section) for section in sections) + "\n"


def render(section: Section) -> str:
    """One section: heading, where it was measured, its tables."""
    parts = demo_parts(section) if isinstance(section, Demo) else shape_parts(section)
    return "\n\n".join([parts[0], machine_lines(section.machine), *parts[1:]])


def demo_parts(demo: Demo) -> list[str]:
    kinds = list(demo.rows[0].kinds)
    headers = ["setting", "tokens/s", "× plain", *(f"× plain, {kind}" for kind in kinds), "predicted", "× transformers",
               "tokens/step", "kept by position"]  # fmt: skip
    rows = [
        [row.name, f"{row.rate:.1f}", f"{row.to_plain:.2f}", *(f"{row.kinds[kind]:.2f}" for kind in kinds),
         "" if row.predicted is None else f"{row.predicted:.2f}", f"{row.to_library:.2f}", f"{row.tokens_per_step:.2f}",
         " ".join(f"{share:.2f}" for share in row.shares)]
        for row in demo.rows
    ]  # fmt: skip
    return [
        f"## {demo.model}, {demo.dtype}: {demo.prompts} held-out prompts, {demo.tokens} new tokens each, greedy",
        f"Lossless: the tokens of every setting equal plain decoding's for all {demo.prompts} prompts in all rounds. "
        f"`transformers` gave the same tokens for {demo.equal} of {demo.prompts}. Medians of {demo.rounds} rounds in "
        "which the settings took turns; decoding alone (for `transformers`: the time of a generate minus that of a "
        "generate of one token). Predicted: (1 + p1 + p1 p2 + ...) T_v(1) / (T_v(K+1) + K T_d) from the kept shares "
        "and the step times below.",
        table(headers, rows),
        steps_table(demo.steps),
    ]


def shape_parts(shape: Shape) -> list[str]:
    floor = 1000 * shape.weights / shape.bandwidth
    turns = "took turns with ours" if shape.together else "came after ours (both do not fit into memory), not in turns"
    lines = [
        ["reading the weights (floor)", f"{floor:.2f}", "1.00"],
        *([name, f"{shape.steps[key]:.2f}", f"{shape.steps[key] / floor:.2f}"]
          for name, key in (("plain token", "plain"), ("transformers, a forward of one token", "transformers"))),
    ]  # fmt: skip
    return [
        f"## {shape.shape} shape, random weights, {shape.dtype}, context {shape.context}",
        f"Lossless: logits of windows of 2 to 9 tokens equal those of single steps bit for bit, over {shape.checked} "
        f"positions. Medians of {shape.rounds} rounds; `transformers` {turns}. "
        f"{shape.weights / 1e9:.3f} GB of weights a token, read bandwidth {shape.bandwidth / 1e9:.1f} GB/s (summing a "
        "large tensor in turns with the rest). "
        f"Plain is {shape.steps['transformers'] / shape.steps['plain']:.2f} × as fast as `transformers`.",
        table(["", "ms", "× floor"], lines),
        steps_table(shape.steps),
    ]


def steps_table(steps: dict[str, float]) -> str:
    """Verify passes of N tokens and one draft step, in milliseconds and in plain passes."""
    names = [name for name in steps if name.startswith("verify ")] + ["draft"]
    labels = [*(f"T_v({name.removeprefix('verify ')})" for name in names[:-1]), "T_d"]
    base = steps["verify 1"]
    return table(["", *labels], [
        ["ms", *(f"{steps[name]:.2f}" for name in names)],
        ["/ T_v(1)", *(f"{steps[name] / base:.3f}" for name in names)],
    ])  # fmt: skip


def machine_lines(machine: Machine) -> str:
    versions = ", ".join(" ".join(pair) for pair in machine.versions.items())
    return (
        f"`{machine.command}` · {machine.cpu}, {machine.cores} cores, threads: {machine.threads} · {versions} · load "
        f"{machine.load[0]:.2f} before, {machine.load[1]:.2f} after; other processes used "
        f"{100 * machine.elsewhere:.0f} % of the cores meanwhile"
    )


def save(path: Path, sections: Iterable[Section]) -> None:
    """Write sections as JSON."""
    content = [{"part": type(section).__name__.lower(), **asdict(section)} for section in sections]
    path.write_text(json.dumps(content, indent=1) + "\n")


def load(path: Path) -> list[Section]:
    """Read sections back."""
    return [_section(raw) for raw in json.loads(path.read_text())]


def _section(raw: dict[str, Any]) -> Section:
    part = raw.pop("part")
    raw["machine"] = Machine(**raw["machine"])
    if part == "shape":
        return Shape(**raw)
    raw["rows"] = [Row(**row) for row in raw["rows"]]
    return Demo(**raw)


if __name__ == "__main__":
    print(page(section for name in sys.argv[1:] for section in load(Path(name))), end="")
