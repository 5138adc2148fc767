"""The README's picture from a saved demo run: `python -m benchmarks.plot benchmarks/results/cpu-demo.json OUT.png`."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.report import Demo, load

COLOURS = {
    "transformers": "#9aa0a6",
    "plain": "#5f6368",
    "n-gram": "#e8a33d",
    "MTP": "#2f7ed8",
    "MTP + n-gram": "#3a9e5c",
}


def draw(sections: list[Demo], out: Path) -> None:
    """One panel a dtype: tokens per second of every setting."""
    figure, panels = plt.subplots(1, len(sections), figsize=(10, 3.6), sharex=True, squeeze=False)
    for panel, demo in zip(panels[0], sections, strict=True):
        names = [row.name for row in demo.rows]
        colours = [COLOURS[name.split(",")[0]] for name in names]
        bars = panel.barh(names, [row.rate for row in demo.rows], color=colours)
        panel.bar_label(bars, [f"{row.rate:.0f}  (×{row.to_plain:.2f})" for row in demo.rows], padding=3, fontsize=8)
        panel.invert_yaxis()
        panel.set_title(f"{demo.model}, {demo.dtype}, {demo.machine.threads} threads", fontsize=10)
        panel.set_xlabel("tokens/s (× plain decoding)")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.25)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    draw([section for section in load(Path(sys.argv[1])) if isinstance(section, Demo)], Path(sys.argv[2]))
