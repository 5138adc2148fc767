"""Surefoot: lossless speculative decoding for Qwen3.5/3.6-family models.

Public names are imported when they are first used, so that `import surefoot` and `surefoot --help` do not wait for
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot import verify
    from surefoot.adapters import TransformersTarget, speculate
    from surefoot.engine import Engine, Generation, Stats
    from surefoot.sampling import SamplingParams

_HOMES = {
    "Engine": "surefoot.engine",
    "Generation": "surefoot.engine",
    "SamplingParams": "surefoot.sampling",
    "Stats": "surefoot.engine",
    "TransformersTarget": "surefoot.adapters",
    "speculate": "surefoot.adapters",
}

__all__ = ["Engine", "Generation", "SamplingParams", "Stats", "TransformersTarget", "speculate", "verify"]


def __getattr__(name: str) -> Any:
    if name == "verify":
        return importlib.import_module("surefoot.verify")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'surefoot' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
