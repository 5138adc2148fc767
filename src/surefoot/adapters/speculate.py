"""Speculative decoding for any model that a function can run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, cast

import torch

from surefoot.adapters.callable_target import CallableTarget, Forward
from surefoot.drafters.ngram import NgramDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.engine import Engine, Generation
from surefoot.engine.drafting import check_drafter
from surefoot.errors import InputError, shown
from surefoot.sampling import SamplingParams, check_token_ids
from surefoot.types import Drafter, Target


def speculate(
    forward: Forward | Target,
    prompt_tokens: Seq[int] | torch.Tensor,
    params: SamplingParams | None = None,
    *,
    drafter: str | Drafter = "ngram",
    draft_length: int = 10,
    max_len: int | None = None,
    eos_token_ids: Seq[int] = (),
    vocab_size: int | None = None,
) -> Generation:
    """Decode a prompt with `forward(token_ids, position) -> logits` (see `CallableTarget`) or any other `Target`.

    `drafter` is "ngram", "none" (plain decoding through the same loop) or a Drafter, a `DraftModelDrafter` for example.
    `eos_token_ids` end the output; a target that knows its own (`eos_token_ids`) needs none. `max_len` bounds prompt
    and output of a function (4096 if not given), `vocab_size` is the width of its logits if that is to be checked.

    Raises InputError for bad arguments or logits of the wrong shape, NumericalError for logits that are not numbers.
    """
    named: dict[str, Drafter] = {"ngram": NgramDrafter(min_ngram=1), "none": NoDrafter()}
    check_drafter(drafter, tuple(named))
    target = as_target(forward, max_len, vocab_size)
    prompt = check_token_ids("prompt", prompt_tokens, target.vocab_size)
    chosen = named[drafter] if isinstance(drafter, str) else drafter
    engine = Engine(target, chosen, draft_length, eos_token_ids=eos_token_ids)
    engine.eos_token_ids = engine.eos_token_ids or tuple(getattr(target, "eos_token_ids", ()))
    return engine.generate([prompt], params)[0]


def as_target(forward: Forward | Target, max_len: int | None, vocab_size: int | None) -> Target:
    """A function as a Target, a Target as it is. Raises InputError for anything else, and for sizes of a Target."""
    if hasattr(forward, "verify") and hasattr(forward, "commit"):
        target = cast(Target, forward)
        if max_len is not None or vocab_size is not None:
            raise InputError("max_len, vocab_size: expected for a function only; a Target has its own")
        return target
    if not callable(forward) or isinstance(forward, type):
        raise InputError(f"forward: expected a function or a Target, found {shown(forward)}")
    if hasattr(forward, "get_output_embeddings"):
        found = type(forward).__name__
        raise InputError(f"forward: expected a function or a Target, such as TransformersTarget(model), found {found}")
    _check_parameters(forward)
    return CallableTarget(forward, max_len=4096 if max_len is None else max_len, vocab_size=vocab_size)


def _check_parameters(forward: Callable[..., Any]) -> None:
    """Raise InputError unless the function can be called with (token_ids, position)."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # some written in C have none to show
        return
    try:
        signature.bind([], 0)
    except TypeError as error:
        raise InputError(f"forward: expected a function of (token_ids, position), found {signature}") from error
