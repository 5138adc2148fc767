"""Large allocations that a caller's numbers decide, and the error when there is no room for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from surefoot.errors import InputError


class _Slotted(Protocol):
    @property
    def bytes_per_slot(self) -> int: ...


Cache = TypeVar("Cache", bound=_Slotted)


def allocate(build: Callable[[int, torch.device], Cache], slots: int, device: torch.device) -> Cache:
    """`build(slots, device)`, a cache, if there is room for it; the bytes of a slot are taken from one without memory.

    Raises InputError naming the bytes. They are counted before anything is allocated: memory that an operating system
    only promises would run out in the middle of the work.
    """
    per_slot = build(1, torch.device("meta")).bytes_per_slot
    with room_for(f"slots: {slots} caches of {per_slot:,} bytes", slots * per_slot, device):
        return build(slots, device)


@contextmanager
def room_for(what: str, needed: int, device: torch.device) -> Iterator[None]:
    """Allocate `needed` bytes inside. Raises InputError if the device has less memory than that, all of it counted, or
    if the allocator refuses."""
    total = memory_of(device)
    if total is not None and needed > total:
        raise InputError(f"{what}: expected at most the {total:,} bytes of {device}'s memory, found {needed:,}")
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{what}: expected {needed:,} bytes to be free on {device}, found: {reason}") from error


def memory_of(device: torch.device) -> int | None:
    """All the memory of a device in bytes, free or not; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
