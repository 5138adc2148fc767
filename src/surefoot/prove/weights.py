"""A checkpoint's tensors as its files have them, for the reference: past the engine's loading, where that is plain."""

from __future__ import annotations

from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from surefoot.kernels.quantise import dense_of
from surefoot.loading.checkpoint import EIGHT_BITS, load_checkpoint
from surefoot.loading.files import inventory, open_safetensors
from surefoot.loading.names import Place, place
from surefoot.prove.reference import Read

KEPT_TENSORS = 4  # read ones that are kept: the embedding is asked for twice


def stored_weights(folder: Path, stack: ExitStack) -> tuple[Read, str]:
    """A function from canonical names to float32 tensors, read one by one from files that stay open as long as the
    `stack`, and a sentence on where they come from."""
    found = [(spot, stored) for stored in inventory(folder) if (spot := place(stored.name)) is not None]
    if any(spot != Place(spot.name) or stored.dtype == EIGHT_BITS for spot, stored in found):
        whole = load_checkpoint(folder, mtp="if-present").tensors
        note = "weights as the engine loads them: the files have them in 8 bits or expert by expert"
        return (lambda name: dense_of(whole[name]).float()), note
    by_name = {spot.name: stored for spot, stored in found}
    readers = {file: stack.enter_context(open_safetensors(file)) for file in {s.file for s in by_name.values()}}

    @lru_cache(maxsize=KEPT_TENSORS)
    def read(name: str) -> Tensor:
        stored = by_name[name]
        tensor: Tensor = readers[stored.file].get_tensor(stored.name)
        return tensor.to(torch.float32)

    return read, "weights read from the files, past the engine's loading"
