"""The target's caches, layer by layer, and the lengths they share.

Commit is an integer: it is noted here, and each layer settles its own part at the start of the next window.
"""

from __future__ import annotations

from surefoot.cache.kv import KVCache
from surefoot.cache.recurrent import RecurrentCache
from surefoot.errors import InputError


class HybridCache:
    """One cache per layer. `length[slot]` counts committed tokens; an open window is read but not counted."""

    def __init__(self, layers: list[KVCache | RecurrentCache], slots: int) -> None:
        self.layers = layers
        self.length = [0] * slots
        self._window = [0] * slots  # tokens of the window that waits for commit
        self._keep = [0] * slots  # committed tokens of the last window, not yet settled in the layers

    @property
    def slots(self) -> int:
        return len(self.length)

    @property
    def bytes_per_slot(self) -> int:
        return sum(layer.bytes_per_slot for layer in self.layers)

    def reset(self, slot: int) -> None:
        """Empty the slot."""
        self.check_slot(slot)
        self.length[slot] = self._window[slot] = self._keep[slot] = 0
        for layer in self.layers:
            if isinstance(layer, RecurrentCache):
                layer.reset(slot)

    def open_window(self, slot: int, tokens: int) -> None:
        """A window of `tokens` tokens is about to be read; the last one must have been committed."""
        self.check_slot(slot)
        if self._window[slot]:
            raise InputError(f"slot {slot}: expected commit before the next window, found {self._window[slot]} tokens open")
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
            for layer in self.layers:
                if isinstance(layer, RecurrentCache):
                    layer.settle(slot, self._keep[slot])
            self._keep[slot] = 0

    def extend(self, slot: int, tokens: int) -> None:
        """`tokens` tokens were read for good (prefill)."""
        self.length[slot] += tokens

    def check_slot(self, slot: int) -> None:
        """Raise InputError for a slot that does not exist."""
        if not 0 <= slot < self.slots:
            raise InputError(f"slot: expected 0 to {self.slots - 1}, found {slot}")
