"""Speculative decoding for models of other kinds: a function, or any `transformers` model whose cache can be cropped.

`TransformersTarget` is imported when it is first used, because it needs `transformers`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from surefoot.adapters.callable_target import CallableTarget
from surefoot.adapters.speculate import speculate

if TYPE_CHECKING:
    from surefoot.adapters.transformers_target import InexactWarning, TransformersTarget

__all__ = ["CallableTarget", "InexactWarning", "TransformersTarget", "speculate"]


def __getattr__(name: str) -> Any:
    if name in ("InexactWarning", "TransformersTarget"):
        return getattr(importlib.import_module("surefoot.adapters.transformers_target"), name)
    raise AttributeError(f"module 'surefoot.adapters' has no attribute {name!r}")
