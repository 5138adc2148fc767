"""Draw the losses of a run over the tokens seen: ``python training/plot.py LOG.jsonl OUT.png``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def draw(log: Path, out: Path, marks: list[int]) -> None:
    """Training losses as lines, held-out losses as dots; ``marks`` are steps that were exported."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    training = [row for row in rows if "loss" in row and "held_out" not in row]
    figure, axes = plt.subplots(figsize=(8, 4.5))
    tokens = [row["tokens"] / 1e6 for row in training]
    axes.plot(tokens, [row["loss"] for row in training], label="next token", lw=1)
    axes.plot(tokens, [row["mtp1"] for row in training], label="MTP head, one further", lw=1)
    for name in ("code", "english"):
        held = [row for row in rows if row.get("held_out") == name]
        axes.plot(
            [row["tokens"] / 1e6 for row in held],
            [row["loss"] for row in held],
            "o--",
            ms=4,
            lw=0.6,
            label=f"next token, held-out {name}",
        )
    per_step = training[0]["tokens"] / training[0]["step"] / 1e6
    for step in marks:
        axes.axvline(step * per_step, color="grey", lw=0.8, ls=":")
        axes.text(step * per_step, 4.0, f" exported (step {step})", fontsize=8, color="grey")
    axes.set(xlabel="million tokens", ylabel="cross entropy (nats a token)", ylim=(1.2, 4.5))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]), [int(step) for step in sys.argv[3:]])
