"""From logits to the distribution that a request asked for. The only place where sampling parameters meet logits.

The target's rows and a sampling drafter's rows both pass through here, so p and q are processed alike. Every row is
processed on its own and gives the same bits in whatever company it comes; coupled acceptance rests on that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral

import torch
from torch import Tensor

from surefoot.errors import InputError, NumericalError, shown
from surefoot.sampling import SamplingParams
from surefoot.verify.arrays import check_dense

_TINY = torch.finfo(torch.float32).tiny
_ONE = 2**40  # probability 1 as an integer


def process(logits: Tensor, params: SamplingParams, position: int = 0) -> Tensor:
    """Processed logits of every row: [n, V] of any float type to float32 [n, V], excluded tokens at -inf.

    In this order: temperature, top_k, top_p over what top_k left (renormalised), typical_p over what these left, min_p.
    min_p compares with the most probable token that is left; only typical_p may have dropped the most probable of all.
    Where equal logits straddle the border of top_k or top_p, the lowest ids stay. At least one token always stays. The
    largest logit of a row is moved to 0, so no temperature overflows; temperature 0 leaves the first largest logit
    alone. Filters that are off cost nothing. What depends on the history comes before all this: `verify.rules`.

    Row i belongs to `position + i`. Raises NumericalError naming the position of a row that holds NaN or +inf, or that
    excludes every token, InputError for what is no logits or no SamplingParams.
    """
    check_request(logits, params, position)
    scaled, largest = process_unchecked(logits, params)
    check_finite(largest.tolist(), position)
    return scaled


def probabilities(logits: Tensor, params: SamplingParams, position: int = 0) -> Tensor:
    """The distribution of every row: [n, V] to float32 [n, V], each row summing to 1. One-hot at temperature 0.

    Raises what `process` raises.
    """
    return process(logits, params, position).softmax(dim=-1)


def process_unchecked(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """`process` without its check: (processed [n, V], largest logit of each row [n]), both float32.

    For callers that hand the second to `check_finite` themselves, along with what else they copy from the device.
    """
    rows = logits.float()
    if params.greedy:
        largest, tokens = rows.max(dim=-1, keepdim=True)
        return torch.full_like(rows, -math.inf).scatter_(-1, tokens, 0.0), largest[:, 0]
    largest = rows.amax(dim=-1, keepdim=True)
    scaled = rows - largest
    if params.temperature != 1.0:
        scaled /= max(params.temperature, _TINY)  # smaller ones would be 0 in float32
    top_k = params.top_k if 0 < params.top_k < rows.shape[-1] else None
    if top_k is not None or params.top_p < 1.0:
        scaled = torch.cat([_keep_best(part, top_k, params.top_p) for part in _apart(scaled)])
    if params.typical_p < 1.0:
        scaled = torch.cat([_keep_typical(part, params.typical_p) for part in _apart(scaled)])
    if params.min_p > 0.0:
        scaled = scaled.masked_fill(scaled < math.log(params.min_p), -math.inf)
    return scaled, largest[:, 0]


def check_request(logits: Tensor, params: SamplingParams, position: int, shape: str = "[n, V]") -> None:
    """Raise InputError unless `logits` is a tensor of real numbers in this shape, V at least 1, and the other two are
    what they are called."""
    if not isinstance(logits, Tensor):
        raise InputError(f"logits: expected a tensor {shape}, found {type(logits).__name__}")
    check_dense("logits", logits, shape)
    if logits.dim() != shape.count(",") + 1 or logits.shape[-1] == 0:
        raise InputError(f"logits: expected {shape}, found {list(logits.shape)}")
    if not isinstance(params, SamplingParams):
        raise InputError(f"params: expected SamplingParams, found {shown(params)}")
    if not isinstance(position, Integral):
        raise InputError(f"position: expected an integer, found {shown(position)}")


def check_finite(largest: Iterable[float], position: int) -> None:
    """Raise NumericalError if a row's largest logit is not a finite number; row i belongs to `position + i`.

    The maximum tells all: NaN passes through it, and it is -inf only where every entry is.
    """
    for row, value in enumerate(largest):
        if not math.isfinite(value):
            what = "every token at -inf" if value == -math.inf else "NaN" if math.isnan(value) else "+inf"
            raise NumericalError(f"logits at position {position + row}: expected finite numbers or -inf, found {what}")


def _apart(rows: Tensor) -> list[Tensor]:
    """Rows as they can be summed: on a GPU a batched softmax may split a long row by how many there are, so there they
    go one by one, each in memory of its own, since alignment can choose a kernel too."""
    return [row.clone() for row in rows.split(1)] if rows.is_cuda else [rows]


def _keep_best(scaled: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Keep each row's first m tokens by (logit descending, id ascending): [n, V] → [n, V].

    m comes from the sorted logits alone, on which ties have no influence. The nucleus is summed in integers, since a
    sum that depended on how a device splits a batch would let a token in or out by the rows beside it.
    """
    ranked = scaled.sort(dim=-1, descending=True) if top_k is None else scaled.topk(top_k, dim=-1)
    best = ranked.values  # [n, k or V], descending
    count = torch.full_like(scaled[:, :1], best.shape[-1], dtype=torch.int64)  # [n, 1]
    if top_p < 1.0:
        mass = (best.softmax(dim=-1) * _ONE).to(torch.int64)
        before = mass.cumsum(dim=-1) - mass
        limit = max(1, math.ceil(top_p * _ONE))
        count = (before < limit).sum(dim=-1, keepdim=True).clamp_(min=1)  # a row of NaN would count nothing
    border = best.gather(-1, count - 1)  # [n, 1]
    at_border = scaled == border
    room = count - (best > border).sum(dim=-1, keepdim=True)
    keep = (scaled > border) | (at_border & (at_border.cumsum(dim=-1) <= room))
    return scaled.masked_fill(~keep, -math.inf)


def _keep_typical(scaled: Tensor, mass: float) -> Tensor:
    """Locally typical sampling (Meister et al. 2023, arXiv 2202.00666), as transformers has it: [n, V] → [n, V].

    Tokens go by how far their surprisal -log p lies from the row's entropy, nearest first; the first whose
    probabilities reach `mass` stay, with all that are as near as the last of them. Sums are of integers, as in
    `_keep_best`. The largest logit left is moved to 0.
    """
    logs = scaled.log_softmax(dim=-1)
    probs = logs.exp()
    # Entropy in units of 2^-40; a term is at most 1 / e. A token that is excluded adds nothing and is infinitely far.
    terms = torch.where(probs > 0, -logs * probs, 0.0)
    entropy = (terms.double() * _ONE).to(torch.int64).sum(dim=-1, keepdim=True).double() / _ONE
    far = (-logs.double() - entropy).abs()
    near, order = far.sort(dim=-1)
    reached = (probs.double() * _ONE).to(torch.int64).gather(-1, order).cumsum(dim=-1)
    last = (reached < math.ceil(mass * _ONE)).sum(dim=-1, keepdim=True).clamp_(max=scaled.shape[-1] - 1)
    kept = scaled.masked_fill(far > near.gather(-1, last), -math.inf)
    return kept - kept.amax(dim=-1, keepdim=True)
