"""Gathering rows: embeddings of a pass's tokens, and the inputs of the MTP head.

A pass's tokens are known to the device only: row i of sequence b stands for the token at `start[slot] + shift + i`,
which is an emitted one (`tokens` [S, L], known up to index `length[slot]`) or one of the drafts behind it (`drafts`
[B, K]; -1 where there is none, read as token 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from surefoot.kernels.fused.launch import launch_options, let_next_start, wait_for_inputs
from surefoot.kernels.fused.linear import Feed, feed_reference, shrink_of

SIZES = ("window", "depth", "longest", "room")  # unknown to the compiler, so that one binary serves them all


@dataclass(frozen=True)
class Text:
    """Where the tokens stand. `slots` [B], `length` [S], `tokens` [S, L], `drafts` [B, K], all int32."""

    slots: Tensor
    length: Tensor
    tokens: Tensor
    drafts: Tensor

    def ids(self, start: Tensor, shift: int, window: int) -> Tensor:
        """Token ids of a pass's rows [B * window] (the reference)."""
        listed = []
        for b, slot in enumerate(self.slots.tolist()):
            known = self.tokens[slot, : int(self.length[slot]) + 1].tolist() + self.drafts[b].tolist()
            for index in range(int(start[slot]) + shift, int(start[slot]) + shift + window):
                listed.append(max(known[index], 0) if slot >= 0 and 0 <= index < len(known) else 0)
        return torch.tensor(listed, device=self.tokens.device)


def embed_reference(
    table: Tensor, text: Text, start: Tensor, out: Tensor, scale: Tensor, feed: Feed, *, window: int
) -> None:
    """table [V, H] -> out [B * window, H] float32, the embeddings of the tokens at start[slot] + i, prepared in `feed`
    for the norm of `scale` [H]."""
    out.copy_(table[text.ids(start, 0, window)])
    feed_reference(out, scale, feed)


def embed(table: Tensor, text: Text, start: Tensor, out: Tensor, scale: Tensor, feed: Feed, *, window: int) -> None:
    """See `embed_reference`."""
    rows, hidden = out.shape
    block = triton.next_power_of_2(-(-hidden // feed.squares.shape[1]))
    _embed_kernel[(rows, feed.squares.shape[1])](
        table, *_pointers(text), start, out, scale, feed.scaled, feed.squares, window, *_sizes(text),
        H=hidden, BLOCK=block, SHRINK=shrink_of(feed.scaled.dtype), num_warps=1 if block <= 128 else 4,
        **launch_options(out.device),
    )  # fmt: skip


def head_inputs_reference(
    table: Tensor, text: Text, start: Tensor, hidden: Tensor, norms: tuple[Tensor, Tensor], out: Tensor,
    *, window: int, eps: float,
) -> None:  # fmt: skip
    """out [B * window, 2 H]: per row the normed embedding of the token at start[slot] + 1 + i, then the normed hidden
    state of the position before it.

    `hidden` [S, 2^n, H] float32 is post-norm, that of position p in row p mod 2^n of its slot; `norms` are the scales
    (1 + w) for the embedding's half and for the hidden state's.
    """

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale

    embedded = norm(table[text.ids(start, 1, window)].float(), norms[0])
    states = [
        hidden[slot, ring_rows(start, slot, window, hidden.shape[1])] for slot in text.slots.clamp(min=0).tolist()
    ]
    out.copy_(torch.cat([embedded, norm(torch.cat(states), norms[1])], dim=-1))


def ring_rows(start: Tensor, slot: int, window: int, ring: int) -> Tensor:
    """Rows [window] of a ring that hold the positions from start[slot] on."""
    return (int(start[slot]) + torch.arange(window, device=start.device)) % ring


def head_inputs(
    table: Tensor, text: Text, start: Tensor, hidden: Tensor, norms: tuple[Tensor, Tensor], out: Tensor,
    *, window: int, eps: float,
) -> None:  # fmt: skip
    """See `head_inputs_reference`."""
    width = hidden.shape[-1]
    _head_inputs_kernel[(text.slots.shape[0] * window, 2)](
        table, *_pointers(text), start, hidden, *norms, out, eps, window, *_sizes(text), hidden.shape[1], H=width,
        BLOCK=triton.next_power_of_2(width), num_warps=8, **launch_options(out.device),
    )  # fmt: skip


def final_norm_reference(x: Tensor, scale: Tensor, slots: Tensor, start: Tensor, out: Tensor, narrow: Tensor, *,
                         window: int, eps: float, last: bool = False) -> None:  # fmt: skip
    """x [B * window, H] -> x / sqrt(mean(x^2) + eps) * scale, row by row, side by side in `narrow` [rows, H], of the
    weights' type, and in float32 where their slots keep them: in `out` [S, 2^n, H] at row (start[slot] + i) mod 2^n.
    A sequence without a slot (-1) leaves `out` alone.

    With `last` only one row of each sequence: the last of its first start[slot] rows (the first, if 0), into row 0.
    """
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale).view(-1, window, x.shape[1])
    for b, slot in enumerate(slots.tolist()):
        row = max(int(start[max(slot, 0)]) - 1, 0)
        narrow.view(len(normed), -1, x.shape[1])[b] = normed[b, row] if last else normed[b]
        if slot >= 0 and last:
            out[slot, 0] = normed[b, row]
        elif slot >= 0:
            out[slot, ring_rows(start, slot, window, out.shape[1])] = normed[b]


def final_norm(x: Tensor, scale: Tensor, slots: Tensor, start: Tensor, out: Tensor, narrow: Tensor, *,
               window: int, eps: float, last: bool = False) -> None:  # fmt: skip
    """See `final_norm_reference`."""
    rows, width = x.shape
    _final_norm_kernel[(rows // window if last else rows,)](
        x, scale, slots, start, out, narrow, eps, window, out.shape[1], PICK=last, H=width,
        BLOCK=triton.next_power_of_2(width), num_warps=8, **launch_options(out.device),
    )  # fmt: skip


def _pointers(text: Text) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return text.slots, text.length, text.tokens, text.drafts


def _sizes(text: Text) -> tuple[int, int]:
    return text.drafts.shape[1], text.tokens.shape[1]


@triton.jit
def _token(slots, length, tokens, drafts, start, row, shift, window, depth, longest):
    b = row // window
    slot = tl.load(slots + b).to(tl.int64)
    there = slot >= 0
    slot = tl.maximum(slot, 0)
    index = tl.load(start + slot) + shift + row % window
    ahead = index - tl.load(length + slot) - 1
    known = tl.load(tokens + slot * longest + index, there & (ahead < 0) & (index >= 0), 0)
    draft = tl.load(drafts + b * depth + ahead, there & (ahead >= 0) & (ahead < depth), 0)
    return tl.maximum(tl.where(ahead < 0, known, draft), 0).to(tl.int64)


@triton.jit(do_not_specialize=SIZES)
def _embed_kernel(table, slots, length, tokens, drafts, start, out, scale, scaled, squares, window, depth, longest,
                  H: tl.constexpr, BLOCK: tl.constexpr, SHRINK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    row = tl.program_id(0)
    token = _token(slots, length, tokens, drafts, start, row, 0, window, depth, longest)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(table + token * H + at, at < H, 0.0).to(tl.float32)
    tl.store(out + row * H + at, x, at < H)
    tl.store(squares + row * tl.num_programs(1) + tl.program_id(1), tl.sum(x * x, 0))
    x *= tl.load(scale + at, at < H, 0.0) * SHRINK
    tl.store(scaled + row * H + at, x.to(scaled.dtype.element_ty), at < H)


@triton.jit
def _normed(x, scale, eps, H: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * scale


@triton.jit(do_not_specialize=SIZES)
def _head_inputs_kernel(table, slots, length, tokens, drafts, start, hidden, embedding, second, out, eps, window,
                        depth, longest, room, H: tl.constexpr, BLOCK: tl.constexpr,
                        DEPENDENT: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    half = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < H
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    if half == 0:
        token = _token(slots, length, tokens, drafts, start, row, 1, window, depth, longest)
        x = tl.load(table + token * H + at, inside, 0.0).to(tl.float32)
        x = _normed(x, tl.load(embedding + at, inside, 0.0), eps, H)
    else:
        slot = tl.maximum(tl.load(slots + row // window), 0).to(tl.int64)
        position = tl.load(start + slot) + row % window
        x = tl.load(hidden + (slot * room + (position & (room - 1))) * H + at, inside, 0.0)
        x = _normed(x, tl.load(second + at, inside, 0.0), eps, H)
    tl.store(out + row * (2 * H) + half * H + at, x.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=SIZES)
def _final_norm_kernel(x, scale, slots, start, out, narrow, eps, window, room, PICK: tl.constexpr, H: tl.constexpr,
                       BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < H
    factor = tl.load(scale + at, inside, 0.0)
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    into_narrow = row
    if PICK:
        slot = tl.load(slots + row).to(tl.int64)
        kept = tl.load(start + tl.maximum(slot, 0))
        into = 0
        row = row * window + tl.maximum(kept - 1, 0)
    else:
        slot = tl.load(slots + row // window).to(tl.int64)
        into = (tl.load(start + tl.maximum(slot, 0)) + row % window) & (room - 1)
    normed = _normed(tl.load(x + row * H + at, inside, 0.0), factor, eps, H)
    if slot >= 0:
        tl.store(out + (slot * room + into) * H + at, normed, inside)
    tl.store(narrow + into_narrow * H + at, normed.to(narrow.dtype.element_ty), inside)
