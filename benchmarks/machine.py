"""The machine that a run is on, and what else it was doing. Linux."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Machine:
    """Where and how a section was measured. `load` is the one-minute load average before and after (our own work is in
    the second), `elsewhere` the share of all cores that other processes used meanwhile."""

    command: str
    cpu: str
    cores: int
    threads: int
    versions: dict[str, str]
    load: list[float]
    elsewhere: float


class Watch:
    """Watches the machine from here until `machine` is called."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._busy, self._total = busy_ticks()
        self._own = own_seconds()

    def machine(self) -> Machine:
        """The machine, and what went on since the start."""
        busy, total = busy_ticks()
        own = (own_seconds() - self._own) * os.sysconf("SC_CLK_TCK")
        elsewhere = max(0.0, busy - self._busy - own) / max(1, total - self._total)
        command = " ".join(["python", *sys.argv])
        load = [self._load, os.getloadavg()[0]]
        return Machine(command, cpu_name(), os.cpu_count() or 0, torch.get_num_threads(), versions(), load, elsewhere)


def own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def busy_ticks() -> tuple[int, int]:
    """Clock ticks of all cores so far: at work, and all (user, nice, system, idle, iowait, irq, softirq, steal)."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def cpu_name() -> str:
    """The processor, and its matrix extensions: a name alone is not telling in a virtual machine."""
    lines = Path("/proc/cpuinfo").read_text().split("\n")
    info = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    wanted = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in info.get("flags", "").split()]
    model = f"family {info.get('cpu family', '?')} model {info.get('model', '?')}"
    return f"{info.get('model name', platform.machine())} ({model}; {', '.join(wanted)})"


def versions() -> dict[str, str]:
    """Of what was measured; ours with the checkout's commit, marked if files differ from it."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    packages = {name: version(name) for name in ("surefoot", "torch", "transformers")}
    packages["surefoot"] += f" ({found.stdout.strip() or 'no commit known'})"
    return {**packages, "Python": platform.python_version()}
