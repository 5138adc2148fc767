"""What a request asks for. Checked once, here; everything below can rely on it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from surefoot.errors import InputError

Acceptance = Literal["coupled", "rejection"]
MAX_FLOAT = sys.float_info.max


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling settings.

    `temperature` 0 is greedy decoding (ties go to the lowest token id). `top_k` 0, `top_p` 1 and `min_p` 0 are off.
    `acceptance` chooses the rule at temperature > 0: "coupled" (token-exact: the seed alone decides the tokens,
    whatever the drafter) or "rejection" (Leviathan et al. 2023: exact in law). `stop_token_ids` end the output as the
    model's own end-of-sequence ids do; `ignore_eos` switches off the model's own ids, not these.

    Raises InputError naming the field, what it may be, and what was given.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    acceptance: Acceptance = "coupled"
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.stop_token_ids, Iterable) or isinstance(self.stop_token_ids, str):
            raise InputError(f"stop_token_ids: expected token ids, found {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require_int("max_new_tokens", self.max_new_tokens, low=1)
        _require_int("top_k", self.top_k, low=0)
        _require_int("seed", self.seed, low=0, high=2**64 - 1)
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, low=0)
        _require_real("temperature", self.temperature, low=0.0, high=math.inf)
        _require_real("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _require_real("min_p", self.min_p, low=0.0, high=1.0)
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos: expected True or False, found {self.ignore_eos!r}")
        if not isinstance(self.acceptance, str) or self.acceptance not in get_args(Acceptance):
            raise InputError(f"acceptance: expected one of {get_args(Acceptance)}, found {self.acceptance!r}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    top = "" if high is None else f" and at most {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise InputError(f"{name}: expected an integer of at least {low}{top}, found {value!r}")


def _require_real(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    bounds = f"{'above' if open_low else 'at least'} {low}" + ("" if high == math.inf else f" and at most {high}")
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    # Comparisons, unlike conversions, take integers of any size; NaN compares with nothing. `ok` has seen to the type.
    if not ok or not low <= value <= min(high, MAX_FLOAT) or (open_low and value == low):  # type: ignore[operator]
        raise InputError(f"{name}: expected a number {bounds}, found {value!r}")
