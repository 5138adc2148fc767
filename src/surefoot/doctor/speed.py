"""What a step reads and a slot takes, and how fast this machine could be at best."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.bench.cost import Ceiling, StepBytes, reader, step_bytes
from surefoot.bench.run import dtype_in_memory
from surefoot.bench.turns import nothing, take_turns
from surefoot.cache import KVCache
from surefoot.config import ModelConfig
from surefoot.engine.loaded import takes_eight_bits
from surefoot.kernels.linear import LinearFactory
from surefoot.kernels.quantise import FLOAT8
from surefoot.model.decoder import build_kv, cache_builder

CONTEXT = 1024  # tokens in front of the step that is counted
SLOT = 4096  # tokens that a slot has room for, as the commands have it by default


@dataclass(frozen=True)
class SlotBytes:
    """Of one sequence with room for `max_len` tokens: keys and values, DeltaNet states, the MTP head's lane;
    `per_token` is what one token adds, the lane included."""

    max_len: int
    kv: int
    recurrent: int
    lane: int
    per_token: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.kv + self.recurrent + self.lane


@dataclass(frozen=True)
class Speed:
    """A step behind `context` tokens at batch 1 in `dtype`, with linear weights in memory as `held`. `ceiling` is None
    where the bandwidth could not be measured."""

    device: str
    dtype: str
    held: str
    context: int
    step: StepBytes
    slot: SlotBytes
    ceiling: Ceiling | None


def held_dtype(dtype: torch.dtype, device: torch.device, narrow: bool) -> torch.dtype:
    """Of linear layers' weights in memory; `narrow`: the files have them in 8 bits."""
    if device.type == "cuda":
        return FLOAT8 if narrow and takes_eight_bits(device) else dtype
    return dtype_in_memory(LinearFactory()(torch.zeros(8, 8, dtype=dtype)), dtype)


def speed_of(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, narrow: bool, bandwidth: float | None
) -> Speed:
    """From sizes alone; `bandwidth` in bytes/s."""
    held = held_dtype(dtype, device, narrow)
    head = dtype if held == FLOAT8 else held
    kv_dtype = torch.float32 if device.type == "cpu" else dtype
    step = step_bytes(config, CONTEXT, 1, held, head_dtype=head, kv_dtype=kv_dtype)
    ceiling = None if bandwidth is None else Ceiling.of(step, bandwidth, 1)
    return Speed(str(device), _name(dtype), _name(held), CONTEXT, step, slot_bytes(config, dtype, device), ceiling)


def slot_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device, max_len: int = SLOT) -> SlotBytes:
    """Counted on caches without memory: those of the loop that the host runs."""
    meta = torch.device("meta")
    layers = cache_builder(config, max_len, dtype, device)(1, meta).layers
    kv = sum(layer.bytes_per_slot for layer in layers if isinstance(layer, KVCache))
    whole = sum(layer.bytes_per_slot for layer in layers)
    lane = 0
    if config.mtp_layers:
        kept = torch.float32 if device.type == "cpu" else dtype
        lane = build_kv(config, 1, max_len, kept, meta).bytes_per_slot
    return SlotBytes(max_len, kv, whole - kv, lane, (kv + lane) // max_len)


def bandwidth_of(device: torch.device) -> float:
    """Read bandwidth in bytes/s. Raises InputError if memory has no room for what is read."""
    read, size = reader(device)
    times = take_turns({"read": read}, rounds=2, wait=torch.cuda.synchronize if device.type == "cuda" else nothing)
    return 1000 * size / times["read"].median


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
