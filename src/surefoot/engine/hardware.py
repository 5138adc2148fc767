"""What the work runs on, by name."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def cpu_name() -> str:
    """The processor, and its matrix extensions: a name alone is not telling in a virtual machine."""
    if not (file := Path("/proc/cpuinfo")).exists():
        return platform.processor() or platform.machine()
    info = dict(line.replace("\t", "").split(": ", 1) for line in file.read_text().split("\n") if ": " in line)
    wanted = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in info.get("flags", "").split()]
    model = f"family {info.get('cpu family', '?')} model {info.get('model', '?')}"
    return f"{info.get('model name', platform.machine())} ({model}; {', '.join(wanted)})"


def device_name(device: torch.device) -> str:
    """What the work ran on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
