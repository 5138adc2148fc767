"""How probable the model itself found a token: log-softmax of its own logits, before sampling parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.sequence import TokenLogprobs


def token_logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Of a row of logits [V]: the token's log-probability, and the `count` most probable tokens with theirs. The row is
    taken alone, in memory of its own, so its bits are the same in whatever window it came."""
    logs = logits.to(torch.float32, copy=True).log_softmax(dim=-1)
    count = min(count, len(logs))
    if count == 0:
        return TokenLogprobs(token, logs[token].item())
    border = logs.topk(count).values[-1]
    ids = (logs >= border).nonzero()[:, 0]  # ties at the border included; a sort decides among them
    best = sorted(zip(ids.tolist(), logs[ids].tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token, logs[token].item(), tuple(best[:count]))
