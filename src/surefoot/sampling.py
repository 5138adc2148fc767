"""What a request asks for. Checked once, here; everything below can rely on it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from surefoot.errors import InputError, shown

if TYPE_CHECKING:
    from torch import Tensor

Acceptance = Literal["coupled", "rejection"]
MAX_FLOAT = sys.float_info.max
MAX_SEED = 2**64 - 1
MAX_CHOICES = 2**14


class LogitsProcessor(Protocol):
    """A caller's own change to one row of logits."""

    def __call__(self, tokens_so_far: Seq[int], logits: Tensor, /) -> Tensor:
        """The logits [V] that take the place of `logits` [V] float32 for the token behind `tokens_so_far`, prompt
        included. Called for every position of a draft, in any order and more than once: it must depend on its
        arguments alone."""


@dataclass(frozen=True)
class StructuredOutput:
    """What the output's text must match, in exactly one form: a JSON schema (a dict, or JSON text), a regular
    expression, one of some strings, or a grammar (Lark, or EBNF as llama.cpp has it). Schemas are kept as JSON text.

    Raises InputError for none or several, and for what cannot be one; whether a grammar holds is checked by the engine.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            raise InputError(f"structured: expected one of json_schema, regex, choice, grammar, found {given}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _check_texts("choice", self.choice))
            if not self.choice:
                raise InputError("choice: expected at least one string, found none")
        for name in ("regex", "grammar"):
            if (value := getattr(self, name)) is not None:
                _check_text(name, value)


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling settings, under vLLM's names. docs/sampling.md says in which order they act.

    `temperature` 0 is greedy decoding (ties go to the lowest token id). `top_k` 0, `top_p` 1, `typical_p` 1 and `min_p`
    0 are off. `acceptance` chooses the rule at temperature > 0: "coupled" (token-exact: the seed alone decides the
    tokens, whatever the drafter) or "rejection" (Leviathan et al. 2023: exact in law). `stop_token_ids` end the output
    as the model's own end-of-sequence ids do; `ignore_eos` switches off the model's own ids, not these. Text ends in
    front of the first `stop` string.

    `repetition_penalty` counts prompt and output, `presence_penalty` and `frequency_penalty` the output. `logit_bias`
    takes a mapping and keeps pairs (id, bias) by id. A word of `bad_words_ids` is never completed, nor does any stop id
    come before `min_new_tokens` tokens, or any id outside `allowed_token_ids`. `processors` are functions of one's own.
    `structured` keeps the text to a grammar, `thinking_budget` ends `<think>` after so many tokens.

    `logprobs` asks for the log-probability of every emitted token and of the so many most probable ones,
    `prompt_logprobs` for the prompt's; both are the model's own, before any of this. `n` choices come from one prompt.

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
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    processors: tuple[LogitsProcessor, ...] = ()
    structured: StructuredOutput | None = None
    thinking_budget: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", check_stop_ids("stop_token_ids", self.stop_token_ids))
        require_int("max_new_tokens", self.max_new_tokens, low=1)
        require_int("min_new_tokens", self.min_new_tokens, low=0, high=self.max_new_tokens)
        require_int("top_k", self.top_k, low=0)
        require_int("seed", self.seed, low=0, high=MAX_SEED)
        require_int("n", self.n, low=1, high=MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs", "thinking_budget"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), low=0)
        _require_real("temperature", self.temperature, low=0.0, high=math.inf)
        _require_real("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _require_real("typical_p", self.typical_p, low=0.0, high=1.0, open_low=True)
        _require_real("min_p", self.min_p, low=0.0, high=1.0)
        _require_real("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        _require_real("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _require_real("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))
        object.__setattr__(self, "bad_words_ids", _check_words(self.bad_words_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", check_stop_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InputError("allowed_token_ids: expected at least one token id, or None, found none")
        object.__setattr__(
            self, "stop", _check_texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        )
        object.__setattr__(self, "processors", _check_processors(self.processors))
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise InputError(f"structured: expected a StructuredOutput or None, found {shown(self.structured)}")
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos: expected True or False, found {shown(self.ignore_eos)}")
        if not isinstance(self.acceptance, str) or self.acceptance not in get_args(Acceptance):
            raise InputError(f"acceptance: expected one of {get_args(Acceptance)}, found {shown(self.acceptance)}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def by_ratio(self) -> bool:
        """Whether drafts are judged by the p/q rule."""
        return self.acceptance == "rejection" and not self.greedy

    @property
    def ruled(self) -> bool:
        """Whether the history has a say in the logits, or anything else that `process` does not know."""
        return self.penalised or bool(
            self.logit_bias
            or self.bad_words_ids
            or self.min_new_tokens
            or self.allowed_token_ids is not None
            or self.processors
            or self.structured is not None
            or self.thinking_budget is not None
        )

    @property
    def penalised(self) -> bool:
        """Whether the counts of tokens matter."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_host(self) -> bool:
        """Whether it asks for more than a step that runs on a GPU alone can do (engine.device)."""
        return self.ruled or self.typical_p < 1.0 or self.logprobs is not None or self.prompt_logprobs is not None

    def choices(self) -> list[SamplingParams]:
        """Those of each of the `n` choices: choice i has the stream of `seed` + i modulo 2^64, so the first is what a
        request for one would have got."""
        return [replace(self, n=1, seed=(self.seed + i) % (MAX_SEED + 1)) for i in range(self.n)]


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


def _check_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{name}: expected a string of at least one character, found {shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{name}: expected characters that UTF-8 can hold, found {error}") from error
    return value


def _check_texts(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise InputError(f"{name}: expected a list of strings, found {shown(value)}")
    return tuple(_check_text(f"{name}[{index}]", text) for index, text in enumerate(value))


def _check_bias(value: object) -> tuple[tuple[int, float], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        raise InputError(f"logit_bias: expected a mapping of token ids to numbers, found {shown(value)}")
    ids = check_token_ids("logit_bias", [token for token, _ in pairs])
    for token, (_, bias) in zip(ids, pairs, strict=True):
        _require_real(f"logit_bias[{token}]", bias, low=-100.0, high=100.0)
    biases = dict(zip(ids, (float(bias) for _, bias in pairs), strict=True))
    if len(biases) != len(ids):
        raise InputError(f"logit_bias: expected each token id once, found {shown(value)}")
    return tuple(sorted(biases.items()))


def _check_words(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, (list, tuple)):
        raise InputError(f"bad_words_ids: expected a list of lists of token ids, found {shown(value)}")
    words = tuple(tuple(check_token_ids(f"bad_words_ids[{index}]", word)) for index, word in enumerate(value))
    if () in words:
        raise InputError(f"bad_words_ids[{words.index(())}]: expected at least one token id, found none")
    return words


def _check_processors(value: object) -> tuple[LogitsProcessor, ...]:
    if not isinstance(value, (list, tuple)) or not all(callable(processor) for processor in value):
        raise InputError(f"processors: expected a list of functions (tokens_so_far, logits), found {shown(value)}")
    return tuple(value)


def _schema_text(schema: object) -> str:
    """A JSON schema as JSON text."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False, ensure_ascii=False)
        text.encode("utf-8")
        kind = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"json_schema: expected a JSON schema, found {shown(schema)}: {error}") from error
    if not isinstance(kind, (dict, bool)):
        raise InputError(f"json_schema: expected an object, found {shown(schema)}")
    return text
