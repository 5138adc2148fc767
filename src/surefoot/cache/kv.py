"""Keys and values of one attention layer. It rolls back by length: what lies beyond is overwritten or never read."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """`keys`, `values` [S, Hkv, L, D]. Who reads them knows the length; nothing here does."""

    def __init__(
        self, slots: int, heads: int, max_len: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (slots, heads, max_len, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one sequence's keys and values."""
        return (self.keys.nbytes + self.values.nbytes) // self.keys.shape[0]

    def write(self, slot: int, position: int, keys: Tensor, values: Tensor) -> None:
        """Store keys, values [n, Hkv, D] at positions `position .. position + n - 1`."""
        stop = position + keys.shape[0]
        self.keys[slot, :, position:stop] = keys.transpose(0, 1)
        self.values[slot, :, position:stop] = values.transpose(0, 1)

    def copy_out(self, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copies of positions `start .. stop - 1`, [Hkv, n, D] each, in the CPU's memory."""
        return copied(self.keys[slot, :, start:stop]), copied(self.values[slot, :, start:stop])

    def copy_in(self, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Put such copies back, from position `start` on."""
        self.keys[slot, :, start : start + keys.shape[1]] = keys.to(self.keys.device)
        self.values[slot, :, start : start + keys.shape[1]] = values.to(self.values.device)

    def read(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Views of the first `length` keys and values, [Hkv, length, D]."""
        return self.keys[slot, :, :length], self.values[slot, :, :length]


def copied(tensor: Tensor) -> Tensor:
    """A copy in the CPU's memory that holds on to no more than its own elements."""
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
