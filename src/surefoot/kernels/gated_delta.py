"""The gated delta rule (Yang et al., Gated Delta Networks, arXiv 2412.06464), float32.

Per value head, with state S [Dk, Dv], decay a = exp(g), and unit-norm key k and scaled query q of its key head:

    S <- a S;   delta = beta (v - k^T S);   S <- S + k delta^T;   o = q^T S

`recurrent_reference` is that, word for word; `window` is that in few operations, and keeps what each token did; `chunk`
is the parallel form for prefill (the paper's chunkwise algorithm).

Heads are grouped: value heads h with the same key head h // r stand side by side, so states are [Hk, Dk, r * Dv], a
key head's product serves its r value heads, and nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = Seq[Tensor]  # by token
BLOCK = 128  # tokens whose chunks are prepared together: what that leaves lies in a core's cache still


def recurrent_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [T, Hk, Dk] (normalised, q scaled), v [T, Hv, Dv], log_decay, beta [T, Hv], state [Hk, Dk, r * Dv] ->
    (o [T, Hv, Dv], the new state). The formula, for tests."""
    tokens, value_heads, value_dim = v.shape
    ratio = value_heads // k.shape[1]
    s = state.view(*state.shape[:2], ratio, value_dim).permute(0, 2, 1, 3).flatten(0, 1)  # [Hv, Dk, Dv]
    q, k = (x.repeat_interleave(ratio, dim=1) for x in (q, k))
    out = []
    for t in range(tokens):
        s = s * log_decay[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], s))
        s = s + k[t][:, :, None] * delta[:, None, :]
        out.append(torch.einsum("hk,hkv->hv", q[t], s))
    s = s.view(-1, ratio, *s.shape[1:]).permute(0, 2, 1, 3).flatten(2)
    return torch.stack(out), s.contiguous()


@dataclass(frozen=True)
class Tape:
    """What a window leaves behind so that any number of its tokens can be applied to the state later: per token the
    key [Hk, Dk, 1], delta and decay [Hk, 1, r * Dv]. All that a partial acceptance needs, without a state copy."""

    keys: tuple[Tensor, ...]
    deltas: tuple[Tensor, ...]
    decays: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.keys)

    def replay_(self, state: Tensor, start: int, stop: int) -> None:
        """Apply tokens start .. stop - 1 to the state in place, by the operations that the window used."""
        for t in range(start, stop):
            state.mul_(self.decays[t]).addcmul_(self.keys[t], self.deltas[t])


def window(q: Rows, k: Rows, v: Rows, decay: Rows, beta: Rows, state: Tensor, ahead: Tensor, out: Rows) -> Tape:
    """Run one sequence's window, whose first token is certain and the others a draft.

    By token: q, k [Hk, 1, Dk] (normalised), v, decay, beta [Hk, 1, r * Dv]; o is left in `out`, of v's shape. The first
    token is applied to `state` in place; the state after all of them is left in `ahead` (untouched by a window of one).
    """
    keys, deltas = [], []
    current = state
    for t, (key, fade) in enumerate(zip(k, decay, strict=True)):
        current = torch.mul(state, fade, out=ahead) if t == 1 else current.mul_(fade)
        column = key.mT
        delta = torch.baddbmm(v[t], key, current, alpha=-1).mul_(beta[t])
        current.addcmul_(column, delta)
        torch.bmm(q[t], current, out=out[t])
        keys.append(column)
        deltas.append(delta)
    return Tape(tuple(keys), tuple(deltas), tuple(decay))


def chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, size: int = 32
) -> tuple[Tensor, Tensor]:
    """`recurrent_reference` in chunks of `size` tokens: the same arguments and results, equal up to rounding.

    Within a chunk the deltas solve a unit lower triangular system; between chunks the state carries on.
    """
    outputs = []
    for start in range(0, len(q), BLOCK):
        part = slice(start, start + BLOCK)
        out, state = _chunks(q[part], k[part], v[part], log_decay[part], beta[part], state, size)
        outputs.append(out)
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0], state


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """`chunk` of at most BLOCK tokens, all of whose chunks are prepared together."""
    tokens, value_heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    ratio = value_heads // key_heads
    count = -(-tokens // size)

    def split(x: Tensor) -> Tensor:  # [T, heads, ...] -> [heads, count, size, ...], zero padded (beta 0: no effect)
        padding = x.new_zeros(count * size - tokens, *x.shape[1:])
        return torch.cat([x, padding]).view(count, size, *x.shape[1:]).movedim(2, 0)

    q, k = (split(x).repeat_interleave(ratio, dim=0) for x in (q, k))
    v, log_decay, beta = split(v), split(log_decay), split(beta).unsqueeze(-1)
    total = log_decay.cumsum(-1)  # [Hv, count, size]
    mask = torch.ones(size, size, dtype=torch.bool, device=v.device).tril_()
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~mask, -torch.inf).exp()  # decay from j to i
    system = (beta * k) @ k.transpose(-1, -2) * between  # its diagonal is read as one
    sources = torch.cat([beta * v, beta * k * total.exp().unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(system, sources, upper=False, unitriangular=True)
    fresh, pulled = solved.split([value_dim, key_dim], dim=-1)
    scores = q @ k.transpose(-1, -2) * between
    read = q * total.exp().unsqueeze(-1)
    last = total[..., -1:]
    write = (k * (last - total).exp().unsqueeze(-1)).transpose(-1, -2)
    fade = last.exp().unsqueeze(-1)

    s = state.view(key_heads, key_dim, ratio, value_dim).permute(0, 2, 1, 3).flatten(0, 1)  # [Hv, Dk, Dv]
    out = torch.empty(value_heads, count, size, value_dim, device=v.device)
    for c in range(count):
        delta = fresh[:, c] - pulled[:, c] @ s
        out[:, c] = read[:, c] @ s + scores[:, c] @ delta
        s = fade[:, c] * s + write[:, c] @ delta
    s = s.view(key_heads, ratio, key_dim, value_dim).permute(0, 2, 1, 3).flatten(2)
    return out.flatten(1, 2)[:, :tokens].transpose(0, 1), s.contiguous()
