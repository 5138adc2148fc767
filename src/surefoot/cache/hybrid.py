"""The target's caches, layer by layer, and the lengths they share.

Commit is an integer: it is noted here, and each layer settles its own part at the start of the next window.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from surefoot.cache.kv import KVCache
from surefoot.cache.recurrent import MAX_WINDOW, RecurrentCache
from surefoot.errors import InputError


@dataclass(frozen=True)
class Snapshot:
    """A slot's committed state apart from its keys and values, which roll back by length."""

    length: int
    states: list[tuple[Tensor, Tensor]]


class HybridCache:
    """One cache per layer. `length[slot]` counts committed tokens; an open window is read but not counted."""

    def __init__(self, layers: list[KVCache | RecurrentCache], slots: int) -> None:
        self.layers = layers
        self.length = [0] * slots
        self._window = [0] * slots  # tokens of the window that waits for commit
        self._keep = [0] * slots  # committed tokens of the last window, not yet settled in the layers

    @property
    def slots(self) -> int:
        """Sequences that fit at once."""
        return len(self.length)

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one sequence's place in all layers."""
        return sum(layer.bytes_per_slot for layer in self.layers)

    def reset(self, slot: int) -> None:
        """Empty the slot."""
        self.check_slot(slot)
        self.length[slot] = self._window[slot] = self._keep[slot] = 0
        for layer in self._recurrent():
            layer.reset(slot)

    def open_window(self, slot: int, tokens: int) -> None:
        """A window of `tokens` tokens is about to be read; the last one must have been committed."""
        self.check_closed(slot)
        if not 1 <= tokens <= MAX_WINDOW:
            raise InputError(f"window of slot {slot}: expected 1 to {MAX_WINDOW} tokens, found {tokens}")
        self.settle(slot)
        self._window[slot] = tokens

    def commit(self, slot: int, keep: int) -> None:
        """Make the open window's first `keep` tokens permanent."""
        self.check_slot(slot)
        if not 1 <= keep <= self._window[slot]:
            raise InputError(f"commit of slot {slot}: expected 1 to {self._window[slot]} tokens, found {keep}")
        self.length[slot] += keep
        self._window[slot] = 0
        self._keep[slot] = keep

    def settle(self, slot: int) -> None:
        """Apply the last commit to every layer, so that their tensors show the committed tokens and nothing else."""
        if self._keep[slot]:
            for layer in self._recurrent():
                layer.settle(slot, self._keep[slot])
            self._keep[slot] = 0

    def extend(self, slot: int, tokens: int) -> None:
        """`tokens` tokens were read for good (prefill)."""
        self.length[slot] += tokens

    def snapshot(self, slot: int) -> Snapshot:
        """What `restore` needs to return to the tokens committed now. No window may be open."""
        self.check_closed(slot)
        self.settle(slot)
        return Snapshot(self.length[slot], [layer.snapshot(slot) for layer in self._recurrent()])

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Forget what was committed since the snapshot of this slot was taken."""
        self._window[slot] = self._keep[slot] = 0
        self.length[slot] = snapshot.length
        for layer, state in zip(self._recurrent(), snapshot.states, strict=True):
            layer.restore(slot, state)

    def _recurrent(self) -> list[RecurrentCache]:
        return [layer for layer in self.layers if isinstance(layer, RecurrentCache)]

    def check_closed(self, slot: int) -> None:
        """Raise InputError for a slot that does not exist, or whose window waits for commit."""
        self.check_slot(slot)
        if self._window[slot]:
            raise InputError(
                f"slot {slot}: expected a commit first, found {self._window[slot]} tokens of a window open"
            )

    def check_slot(self, slot: int) -> None:
        """Raise InputError for a slot that does not exist."""
        if not 0 <= slot < self.slots:
            raise InputError(f"slot: expected 0 to {self.slots - 1}, found {slot}")
