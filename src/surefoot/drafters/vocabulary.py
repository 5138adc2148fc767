"""Which tokens are worth drafting: those that occur most often in text of the kind that is to be written."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from surefoot.errors import InputError
from surefoot.sampling import check_token_ids


def count_tokens(texts: Iterable[Seq[int]], vocab_size: int) -> list[int]:
    """All ids below `vocab_size`, the most frequent in `texts` (lists or arrays of ids) first; of equals the lowest.

    Raises InputError for an id outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for number, text in enumerate(texts):
        ids = np.asarray(text, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise InputError(f"texts[{number}]: expected token ids from 0 to {vocab_size - 1}, "
                             f"found {ids.min()} to {ids.max()}")  # fmt: skip
        counts += np.bincount(ids, minlength=vocab_size)
    return [int(token) for token in np.argsort(-counts, kind="stable")]


def ranked(first: Seq[int], vocab_size: int) -> list[int]:
    """All ids below `vocab_size`: those of `first` in their order, then the others in theirs."""
    known = set(first)
    return [*first, *(token for token in range(vocab_size) if token not in known)]


def check_vocabulary(name: str, ids: object, vocab_size: int) -> list[int]:
    """A list of different token ids, at least one. Raises InputError otherwise."""
    checked = check_token_ids(name, ids, vocab_size)
    if not checked:
        raise InputError(f"{name}: expected at least one token id, found none")
    seen: set[int] = set()
    for index, token in enumerate(checked):
        if token in seen:
            raise InputError(f"{name}[{index}]: expected every token id once, found {token} again")
        seen.add(token)
    return checked
