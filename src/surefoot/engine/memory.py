"""What an engine's parts take of memory, by what they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from surefoot.cache import KVCache
from surefoot.model import Decoder, DraftHead, MTPHead


@dataclass(frozen=True)
class Memory:
    """Bytes. `weights` with what was made of them for this device; `kv`: keys and values, the MTP head's lane among
    them; `recurrent`: DeltaNet states, tapes and the convolutions' past; `work`: what a step computes in, and the
    requests; `graphs`: what the GPU had less of when steps were recorded, drivers' own memory included."""

    weights: int
    kv: int
    recurrent: int
    work: int
    graphs: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.recurrent + self.work + self.graphs


def memory_of(root: object, graphs: int = 0) -> Memory:
    """Of all tensors that the object leads to through objects of this package, each counted once, by the first of
    `Memory`'s kinds that it belongs to."""
    objects = list(_reachable(root))
    seen: set[int] = set()

    def total(belongs: Callable[[object], bool]) -> int:
        owners = [own for own in objects if belongs(own)]
        storages = dict(_storage(part) for own in owners for part in _reachable(own) if isinstance(part, Tensor))
        own = {address: size for address, size in storages.items() if address not in seen}
        seen.update(own)
        return sum(own.values())

    return Memory(
        weights=total(lambda own: isinstance(own, (Decoder, MTPHead, DraftHead))),
        kv=total(lambda own: isinstance(own, KVCache)),
        recurrent=total(lambda own: hasattr(own, "conv_past")),  # of either device
        work=total(lambda own: own is root),
        graphs=graphs,
    )


def _reachable(root: object) -> Iterator[object]:
    """The object and all that it leads to: attributes of our own objects, items of containers."""
    waiting, seen = [root], {id(root)}
    while waiting:
        own = waiting.pop()
        yield own
        parts: list[object] = []
        if isinstance(own, (list, tuple)):
            parts = list(own)
        elif isinstance(own, dict):
            parts = list(own.values())
        elif type(own).__module__.split(".")[0] == "surefoot" and hasattr(own, "__dict__"):
            parts = list(vars(own).values())
        for part in parts:
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's memory is, and its bytes."""
    if tensor.is_mkldnn:  # opaque: a packed weight
        return id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
