"""A mixture of experts for many rows (prefill): two products over all experts at once.

A row's choices are sorted by expert, and each expert's choices are cut into tiles. How many these are only the device
knows; so as many programs are launched as there can be tiles, each finds its own by where the experts' choices end, and
those that are left over have nothing to do. The host waits for nothing.

The first product gathers its rows, and ends in SwiGLU; the second puts its rows, weighted, where the choices stand, so
that a row's own lie together and are added up in one order. Weights in 8 bits are read as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from surefoot.kernels.fused.launch import INTERPRET, product, silu
from surefoot.kernels.fused.linear import scaled_by_group
from surefoot.kernels.quantise import GROUP, Weight, dense_of, scales_of

LEAST_ROWS, MOST_ROWS = 16, 128  # of a tile


def mix_experts_reference(x: Tensor, gate_up: Weight, down: Weight, chosen: Tensor, share: Tensor, out: Tensor) -> None:
    """out [T, H] = the sum over a row's choices of share * (silu(x gate^T) * (x up^T)) down^T. x [T, H]; gate_up
    [E, 2 I, H], gate rows first, and down [E, H, I]; chosen [T, K] int64, share [T, K] float32."""
    parts = x.new_zeros(*chosen.shape, x.shape[1])
    all_gate_up, all_down = dense_of(gate_up, torch.float32), dense_of(down, torch.float32)
    for expert in chosen.unique().tolist():
        row, rank = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[row].float() @ all_gate_up[expert].T).chunk(2, dim=-1)
        act = (F.silu(gate) * up).to(x.dtype).float()
        parts[row, rank] = (act @ all_down[expert].T * share[row, rank, None]).to(x.dtype)
    out.copy_(parts.float().sum(1))


def mix_experts(x: Tensor, gate_up: Weight, down: Weight, chosen: Tensor, share: Tensor, out: Tensor) -> None:
    """See `mix_experts_reference`. All contiguous."""
    (tokens, hidden), (experts, _, width), choices = x.shape, down.shape, chosen.shape[1]
    expert_of, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(expert_of, torch.arange(experts, device=x.device), right=True, out_int32=True)
    act, parts = x.new_empty(len(order), width), x.new_empty(tokens, choices, hidden)
    _product(x, order, ends, gate_up, share, act, choices, paired=True)
    _product(act, order, ends, down, share, parts.view(-1, hidden), choices, paired=False)
    torch.sum(parts, 1, out=out)


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile for so many choices in all: about half of what an expert has on average, as its last tile is half
    empty."""
    return min(MOST_ROWS, max(LEAST_ROWS, 1 << max(0, (rows // experts).bit_length() - 2)))


def _product(
    x: Tensor, order: Tensor, ends: Tensor, weight: Weight, share: Tensor, out: Tensor, choices: int, paired: bool
) -> None:
    (rows, features), inner, experts = out.shape, x.shape[1], len(ends)
    numbers, scale, groups = scales_of(weight)
    block_m, full = tile_rows(rows, experts), x.element_size() == 4
    block_n, block_k = (64 if paired else 128) // (1 + full), 64 // (1 + full)
    tiles = rows // block_m + experts  # every expert's last tile may be partly empty
    _grouped_kernel[(triton.cdiv(features, block_n), tiles)](
        x, order, ends, numbers, scale, share, out, N=features, K=inner, E=experts,
        EXPERTS_PADDED=triton.next_power_of_2(experts), CHOICES=choices, PAIRED=paired, GROUPS=groups, GROUP=GROUP,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, INTERPRETED=INTERPRET,
        num_warps=8 if block_m == MOST_ROWS else 4, num_stages=2 if full else 3,
    )  # fmt: skip


@triton.jit
def _tile(ends, tile, E: tl.constexpr, EXPERTS_PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """The tile's expert (E or more: none), its first choice in the sorted order, where that expert's choices end."""
    expert = tl.arange(0, EXPERTS_PADDED)
    end = tl.load(ends + expert, mask=expert < E, other=0)
    start = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    tiles = tl.where(expert < E, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    last = tl.cumsum(tiles, axis=0)
    own = tl.sum((last <= tile).to(tl.int32), axis=0)
    first = tl.sum(tl.where(expert == own, start + (tile - last + tiles) * BLOCK_M, 0), axis=0)
    return own, first, tl.sum(tl.where(expert == own, end, 0), axis=0)


@triton.jit
def _columns(rows, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """BLOCK_K columns of the rows from `start` on, zeros past the last one."""
    k = start + tl.arange(0, BLOCK_K)[None, :]
    if K % BLOCK_K == 0:
        return tl.load(rows + k)
    return tl.load(rows + k, k < K, 0.0)


@triton.jit
def _grouped_kernel(
    x, order, ends, weight, scale, share, out,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EXPERTS_PADDED: tl.constexpr, CHOICES: tl.constexpr,
    PAIRED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`PAIRED`: rows of x by the tokens of the choices, out in the sorted order; else the other way round."""
    expert, first, stop = _tile(ends, tl.program_id(1), E, EXPERTS_PADDED, BLOCK_M)
    if expert >= E:
        return
    place = first + tl.arange(0, BLOCK_M)
    valid = place < stop
    place = tl.where(valid, place, first).to(tl.int64)  # rows of no choice are computed with another's, and not stored
    choice = tl.load(order + place)
    source = place
    target = choice
    if PAIRED:
        source = choice // CHOICES
        target = place
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = expert.to(tl.int64) * (2 * N if PAIRED else N) + n % N  # past the end they wrap around, and are not stored
    a_row = x + source[:, None] * K
    w_row = weight + line[:, None] * K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = _columns(a_row, start, K, BLOCK_K)
        w = _columns(w_row, start, K, BLOCK_K).to(a.dtype)
        total += scaled_by_group(product(a, tl.trans(w), INTERPRETED), scale, line, start // GROUP, GROUPS)
        if PAIRED:
            w = _columns(w_row + N * K, start, K, BLOCK_K).to(a.dtype)
            up += scaled_by_group(product(a, tl.trans(w), INTERPRETED), scale, line + N, start // GROUP, GROUPS)
    if GROUPS == 1:
        total *= tl.load(scale + line)[None, :]
        if PAIRED:
            up *= tl.load(scale + line + N)[None, :]
    if PAIRED:
        total = silu(total) * up
    else:
        total *= tl.load(share + choice)[:, None]
    mask = valid[:, None] & (n < N)[None, :]
    tl.store(out + target[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask)
