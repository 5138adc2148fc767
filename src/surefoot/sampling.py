"""What a request asks for. Checked once, here; everything below can rely on it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

from surefoot.errors import InputError, shown

Acceptance = Literal["coupled", "rejection"]
MAX_FLOAT = sys.float_info.max
MAX_SEED = 2**64 - 1


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
        object.__setattr__(self, "stop_token_ids", check_stop_ids("stop_token_ids", self.stop_token_ids))
        require_int("max_new_tokens", self.max_new_tokens, low=1)
        require_int("top_k", self.top_k, low=0)
        require_int("seed", self.seed, low=0, high=MAX_SEED)
        _require_real("temperature", self.temperature, low=0.0, high=math.inf)
        _require_real("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _require_real("min_p", self.min_p, low=0.0, high=1.0)
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos: expected True or False, found {shown(self.ignore_eos)}")
        if not isinstance(self.acceptance, str) or self.acceptance not in get_args(Acceptance):
            raise InputError(f"acceptance: expected one of {get_args(Acceptance)}, found {shown(self.acceptance)}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise InputError unless the value is an integer from `low` to `high`."""
    top = "" if high is None else f" and at most {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise InputError(f"{name}: expected an integer of at least {low}{top}, found {shown(value)}")


def check_token_ids(name: str, value: object, vocab_size: int | None = None) -> list[int]:
    """The token ids of a list, an array or a tensor, as Python integers.

    Raises InputError for anything else, and for an entry that is no integer from 0 to `vocab_size` - 1.
    """
    listed = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not listed or isinstance(value, (str, bytes, bytearray, Mapping)) or getattr(value, "ndim", 1) != 1:
        raise InputError(f"{name}: expected a list of token ids, found {shown(value)}")
    try:
        ids = value.tolist() if hasattr(value, "tolist") else list(value)  # type: ignore[call-overload]  # it is listed
    except RuntimeError as error:  # a tensor without data
        raise InputError(f"{name}: expected a list of token ids, found {shown(value)}") from error
    for index, token in enumerate(ids):
        # numbers.Integral takes NumPy's integers in.
        whole = isinstance(token, Integral) and not isinstance(token, bool)
        if not whole or token < 0 or (vocab_size is not None and token >= vocab_size):
            expected = "of at least 0" if vocab_size is None else f"from 0 to {vocab_size - 1}"
            raise InputError(f"{name}[{index}]: expected a token id {expected}, found {shown(token)}")
    return [int(token) for token in ids]


def check_stop_ids(name: str, value: object) -> tuple[int, ...]:
    """`check_token_ids` for ids whose order says nothing: a set will do, too."""
    return tuple(check_token_ids(name, list(value) if isinstance(value, Set) else value))


def _require_real(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    bounds = f"{'above' if open_low else 'at least'} {low}" + ("" if high == math.inf else f" and at most {high}")
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    # Comparisons, unlike conversions, take integers of any size; NaN compares with nothing.
    if (
        not ok
        or not low <= value <= min(high, MAX_FLOAT)  # type: ignore[operator]  # `ok` has seen to the type
        or (open_low and value == low)
    ):
        raise InputError(f"{name}: expected a number {bounds}, found {shown(value)}")
