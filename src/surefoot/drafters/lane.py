"""An MTP head's lane as prompts fill it: a row per position, made of the target's hidden state there and the token that
follows.

The row behind the last position known waits for its token, and for a pass that wants its output: it stays pending.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from surefoot.cache import KVCache
from surefoot.cache.kv import copied
from surefoot.errors import InputError
from surefoot.model import MTPHead
from surefoot.sequence import Sequence
from surefoot.types import Kept


class Lane:
    """Keys and values of every slot in `cache`, and the hidden states that are not in there yet: `pending[slot]` is the
    position of the first one and the states [n, H], or None. More than `most_pending` of them enter the lane at once,
    but for the last."""

    part = "mtp"

    def __init__(self, head: MTPHead, cache: KVCache, slots: int, most_pending: int) -> None:
        self._head, self.cache, self._most = head, cache, most_pending
        self.pending: list[tuple[int, Tensor] | None] = [None] * slots

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Take in the target's hidden states [n, H] from `position` on. Raises InputError if there are none."""
        if hidden is None:
            raise InputError("drafter 'mtp': expected a target that gives hidden states, found none")
        slot, pending = sequence.slot, self.pending[sequence.slot]
        if pending is not None and position > 0:
            position, hidden = pending[0], torch.cat([pending[1], hidden])
        self.pending[slot] = (position, hidden)
        self.fill(sequence, self._most)

    def fill(self, sequence: Sequence, most: int) -> None:
        """Take what is pending into the lane, if that is more than `most` rows; the last row stays: its output is the
        next draft."""
        if (pending := self.pending[sequence.slot]) is None or len(pending[1]) <= most:
            return
        position, hidden = pending
        done = len(hidden) - 1
        following = sequence.tokens[position + 1 : position + 1 + done]
        self._head.prefill(hidden[:done], following, self.cache, sequence.slot, position)
        self.pending[sequence.slot] = (position + done, hidden[done:])

    def keep(self, slot: int, start: int, stop: int) -> Kept:
        """Copies of the rows that may not have been in the lane after `start` tokens, and of the pending states."""
        pending = self.pending[slot]
        assert pending is not None
        assert pending[0] + len(pending[1]) == stop
        rows = self.cache.copy_out(slot, max(0, start - self._most), pending[0])
        return Kept(start, stop, (*rows, copied(pending[1])))

    def resume(self, slot: int, kept: Seq[Kept]) -> None:
        """Put copies back that follow one another."""
        for copy in kept:
            keys, values, hidden = copy.tensors
            end = copy.stop - len(hidden)
            self.cache.copy_in(slot, end - keys.shape[1], keys, values)
            self.pending[slot] = (end, hidden.to(self.cache.keys.device, copy=True))

    def release(self, slot: int) -> None:
        """Forget the slot's sequence; its rows are overwritten by the next one."""
        self.pending[slot] = None
