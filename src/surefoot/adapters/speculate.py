"""Speculative decoding for any model that a function can run."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import cast

import torch

from surefoot.adapters.callable_target import CallableTarget, Forward
from surefoot.drafters.ngram import NgramDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.engine import Engine, Generation
from surefoot.errors import InputError
from surefoot.sampling import SamplingParams
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
    if isinstance(drafter, str):
        if drafter not in named:
            raise InputError(f"drafter: expected one of {', '.join(named)} or a Drafter, found {drafter!r}")
        drafter = named[drafter]
    target = as_target(forward, max_len, vocab_size)
    eos = tuple(eos_token_ids) or tuple(getattr(target, "eos_token_ids", ()))
    prompt = prompt_tokens.tolist() if isinstance(prompt_tokens, torch.Tensor) else list(prompt_tokens)
    return Engine(target, drafter, draft_length, eos_token_ids=eos).generate([prompt], params)[0]


def as_target(forward: Forward | Target, max_len: int | None, vocab_size: int | None) -> Target:
    """A function as a Target, a Target as it is. Raises InputError for anything else, and for sizes of a Target."""
    if hasattr(forward, "verify") and hasattr(forward, "commit"):
        target = cast(Target, forward)
        if max_len is not None or vocab_size is not None:
            raise InputError("max_len, vocab_size: expected for a function only; a Target has its own")
        return target
    if not callable(forward):
        raise InputError(f"forward: expected a function or a Target, found {type(forward).__name__}")
    return CallableTarget(forward, max_len=4096 if max_len is None else max_len, vocab_size=vocab_size)
