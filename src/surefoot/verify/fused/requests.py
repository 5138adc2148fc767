"""What the requests in the slots asked for, where the kernels read it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.sampling import SamplingParams

_OFF = 2**62  # a nucleus that holds everything
_TINY = torch.finfo(torch.float32).tiny
_HUGE = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Requests:
    """What each slot's request asked for, in the form the kernels read it; `set` alone writes it."""

    temperature: Tensor
    """float32 [S]; 0 is greedy."""
    top_k: Tensor
    """int32 [S]; 0 is off."""
    nucleus: Tensor
    """int64 [S], top_p in units of 2^-40, rounded up; 2^62 is off."""
    floor: Tensor
    """float32 [S], log(min_p); -inf is off."""
    seed: Tensor
    """int64 [S], the seed's 64 bits."""
    rejection: Tensor
    """int32 [S]: 1 for the p/q rule at temperature > 0, else 0."""
    limit: Tensor
    """int32 [S]: tokens of prompt and output at which the sequence is finished."""
    params: list[SamplingParams]
    """The same on the host, by slot. Only the references read it."""

    @staticmethod
    def empty(slots: int, device: torch.device) -> Requests:
        """Greedy requests that are finished already."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((slots,), value, dtype=dtype, device=device)

        return Requests(
            temperature=full(0.0, torch.float32), top_k=full(0, torch.int32), nucleus=full(_OFF, torch.int64),
            floor=full(-math.inf, torch.float32), seed=full(0, torch.int64), rejection=full(0, torch.int32),
            limit=full(0, torch.int32), params=[SamplingParams()] * slots,
        )  # fmt: skip

    def set(self, slot: int, params: SamplingParams, limit: int) -> None:
        """Put a request into a slot, to end at `limit` tokens in all."""
        # What float32 cannot hold would turn into 0, the mark of greedy decoding, or into infinity.
        self.temperature[slot] = 0.0 if params.greedy else min(max(params.temperature, _TINY), _HUGE)
        self.top_k[slot] = min(params.top_k, 2**31 - 1)
        self.nucleus[slot] = max(1, math.ceil(params.top_p * 2**40)) if params.top_p < 1.0 else _OFF
        self.floor[slot] = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        self.seed[slot] = params.seed - 2**64 if params.seed >= 2**63 else params.seed
        self.rejection[slot] = int(params.by_ratio)
        self.limit[slot] = limit
        self.params[slot] = params
