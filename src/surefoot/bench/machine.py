"""The machine that a run is on, and what else it was doing meanwhile."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from surefoot.engine.hardware import cpu_name

PACKAGES = ("surefoot", "torch", "triton", "transformers")


@dataclass(frozen=True)
class Machine:
    """Where and how something was measured. `load` is the one-minute load average before and after (our own work is in
    the second), `elsewhere` the share of all cores that other processes used meanwhile (0 where the system does not
    tell)."""

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
        self._load = load_average()
        self._busy, self._total = busy_ticks()
        self._own = own_seconds()

    def machine(self, command: str, versions: dict[str, str]) -> Machine:
        """The machine, and what went on since the start."""
        busy, total = busy_ticks()
        own = (own_seconds() - self._own) * os.sysconf("SC_CLK_TCK") if total else 0.0
        elsewhere = max(0.0, busy - self._busy - own) / max(1, total - self._total)
        load = [self._load, load_average()]
        return Machine(command, cpu_name(), os.cpu_count() or 0, torch.get_num_threads(), versions, load, elsewhere)


def load_average() -> float:
    """Of the last minute; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def own_seconds() -> float:
    """Processor time of this process, and of those that it started and that have ended."""
    return sum(os.times()[:4])


def busy_ticks() -> tuple[int, int]:
    """Clock ticks of all cores so far: at work, and all (user, nice, system, idle, iowait, irq, softirq, steal)."""
    if not (file := Path("/proc/stat")).exists():
        return 0, 0
    ticks = [int(word) for word in file.read_text().split("\n")[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def versions() -> dict[str, str]:
    """Of Python, of the installed packages that matter, and of the NVIDIA driver if there is one."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists() and (match := re.search(r"Module\s+(?:for \S+\s+)?(\d[\d.]+)", driver.read_text())):
        found["NVIDIA driver"] = match[1]
    return found
