"""What is to be proved, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import torch

from surefoot.engine.drafting import NAMES, check_draft_length
from surefoot.errors import InputError
from surefoot.sampling import MAX_SEED, require_int

MAX_TOKENS = 4096
BY_NAME = tuple(name for name in NAMES if name not in ("none", "draft-model"))  # drafters that need no more than a name


@dataclass(frozen=True)
class Settings:
    """`prompts` are texts (None: built-in ones), `drafters` names (none: all that the checkpoint supports), `tokens`
    new ones of a prompt, `samples` short continuations of each way to sample; `level`: the chance with which a section
    of tests may fail on an engine without fault. `quick` proves less in less time.

    Raises InputError for a value out of range.
    """

    model: str | Path = "surefoot-demo"
    device: str = "cpu"
    dtype: str = "float32"
    prompts: tuple[str, ...] | None = None
    drafters: tuple[str, ...] = ()
    max_k: int | None = None
    tokens: int | None = None
    samples: int | None = None
    seed: int = 0
    quick: bool = False
    level: float = field(default=1e-3)

    def __post_init__(self) -> None:
        for name in self.drafters:
            if name not in BY_NAME:
                raise InputError(f"drafters: expected some of {', '.join(BY_NAME)}, found {name!r}")
        if self.max_k is not None:
            check_draft_length("mtp", self.max_k, torch.device("cpu" if self.device == "cpu" else "cuda"))
        if self.tokens is not None:
            require_int("tokens", self.tokens, low=2, high=MAX_TOKENS)
        if self.samples is not None:
            require_int("samples", self.samples, low=50)
        require_int("seed", self.seed, low=0, high=MAX_SEED)
        if self.prompts is not None and not all(self.prompts):
            raise InputError("prompts: expected texts, found an empty one")

    @property
    def depths(self) -> list[int]:
        """Draft lengths to try, the longest last."""
        longest = self.max_k or (3 if self.quick else 4)
        return sorted({1, longest}) if self.quick else list(range(1, longest + 1))

    @property
    def new_tokens(self) -> int:
        """Of a prompt."""
        return self.tokens or (16 if self.quick else 48)

    @property
    def sample_count(self) -> int:
        """Short continuations of each way to sample; two and a half times as many seeds on the table."""
        return self.samples or (200 if self.quick else 600)

    def drafters_among(self, supported: Seq[str], why: str) -> Seq[str]:
        """The drafters to prove, of those that the model supports. Raises InputError for another one."""
        if others := [name for name in self.drafters if name not in supported]:
            raise InputError(f"drafters: expected some of {', '.join(supported)} ({why}), found {', '.join(others)}")
        return self.drafters or tuple(supported)
