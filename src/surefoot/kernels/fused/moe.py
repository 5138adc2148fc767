"""One layer's mixture of experts for few rows: norm, routing, experts and residual in three launches.

The shared expert is expert number E: every row chooses it, with weight sigmoid(normed . gate). Its cost is bytes.
One row of the 35B-A3B shape (H 2048, width 512, top 8 of 256, bfloat16) reads 1 MB of router, 38 MB of gate and up rows
and 19 MB of down rows. So a chosen expert's weights are read once for up to 16 rows, by many small programs:

1. route: (expert block and slice of H, tile of 16 rows) -> partial router logits; the last program of a tile to arrive
   adds them up and chooses. 17 x 4 programs of 16 KB.
2. gate, up: (block of the width, slot) -> silu(gate) * up. 32 x 9 programs of 128 KB.
3. down: (block of H, slot) -> one weighted output per row and choice; the last program of a block to arrive adds them
   to x. 32 x 9 programs of 64 KB.

A slot is an expert to run. While rows * top_k < E there is one for every routed (row, choice), run if no earlier row
chose the same expert, and one for the shared expert; beyond, one for every expert. A row's choices are kept in
ascending order of expert, so the sum over them needs neither sorting nor other rows. Which row shares a tile with which
changes no bits: a 16-row product treats its rows alike, and everything else is elementwise, an exact maximum, or a
reduction within the row.

"The last to arrive" is counted with an integer atomic, set back to zero by that program; what is added up was stored,
and is added in a fixed order.

One long file: the three kernels share the slots' layout and order, and are read against the one reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from surefoot.kernels.fused.launch import (
    INTERPRET,
    TILE_ROWS,
    launch_options,
    let_next_start,
    product,
    wait_for_inputs,
)  # fmt: skip
from surefoot.kernels.fused.linear import Feed, feed_reference, scaled_by_group, shrink_of
from surefoot.kernels.quantise import GROUP, Weight, dense_of, scales_of

ROUTE_EXPERTS = 16  # router rows of a program: the narrowest tile product
WIDTH_BLOCK = 16  # gate rows, and as many up rows, of a program
WIDTH_SPAN = 128  # 16-bit elements of H of a step of its loop
HIDDEN_BLOCK = 64  # down rows of a program
WIDE, NARROW = 512, 64  # elements along the summed axis held in registers at once: 16-bit and 8-bit weights; float32
NEVER = tl.constexpr(-(2**63))  # below every key of `_choose`


@dataclass(frozen=True)
class MoEWorkspace:
    """What the launches hand to one another; may serve all layers in turn. K = top_k + 1, the shared expert included.

    Only the counters have a value between calls: zero.
    """

    normed: Tensor  # [R, H], the activations' dtype
    logits: Tensor  # [R, slices of H, E + 1] float32, to be summed over slices
    chosen: Tensor  # [R, K] int32, ascending; the last is E
    weight: Tensor  # [R, K] float32
    act: Tensor  # [R, K, I], the activations' dtype
    partial: Tensor  # [R, K, H] float32, weighted expert outputs
    routed: Tensor  # [tiles of 16 rows] int32, programs arrived
    summed: Tensor  # [blocks of H] int32, programs arrived


def moe_workspace(
    rows: int, hidden: int, experts: int, width: int, top_k: int, dtype: torch.dtype, device: torch.device
) -> MoEWorkspace:
    """For up to `rows` rows; `experts` counts the routed ones (E), `width` is I, `dtype` that of the activations."""
    choices = top_k + 1

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return MoEWorkspace(
        normed=empty(rows, hidden, dtype=dtype),
        logits=empty(rows, triton.cdiv(hidden, _span(hidden, dtype)), experts + 1),
        chosen=empty(rows, choices, dtype=torch.int32), weight=empty(rows, choices),
        act=empty(rows, choices, width, dtype=dtype), partial=empty(rows, choices, hidden),
        routed=torch.zeros(triton.cdiv(rows, TILE_ROWS.value), dtype=torch.int32, device=device),
        summed=torch.zeros(feed_parts(hidden), dtype=torch.int32, device=device),
    )  # fmt: skip


def feed_parts(hidden: int) -> int:
    """How many sums of squares of a row `moe` leaves in a `Feed`."""
    return -(-hidden // HIDDEN_BLOCK)


def moe_reference(
    x: Tensor, scale: Tensor, router: Tensor, gate_up: Weight, down: Weight, workspace: MoEWorkspace, *, top_k: int,
    eps: float, feed: tuple[Tensor, Feed] | None = None,
) -> None:  # fmt: skip
    """What `moe` computes, the workspace's `logits` and counters left alone."""
    rows = x.shape[0]
    dtype = workspace.normed.dtype
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale).to(dtype)
    logits = normed.float() @ router.float().T
    best, chosen = logits[:, :-1].softmax(-1).sort(dim=-1, descending=True, stable=True)  # stable: the lowest expert
    chosen, order = chosen[:, :top_k].sort(dim=-1)
    weight = best[:, :top_k].gather(1, order)
    weight = torch.cat([weight / weight.sum(-1, keepdim=True), logits[:, -1:].sigmoid()], dim=1)
    chosen = F.pad(chosen, (0, 1), value=router.shape[0] - 1)
    all_gate_up, all_down = dense_of(gate_up, torch.float32), dense_of(down, torch.float32)
    act, partial = workspace.act[:rows], workspace.partial[:rows]
    for expert in chosen.unique().tolist():
        row, rank = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (normed[row].float() @ all_gate_up[expert].T).chunk(2, dim=-1)
        act[row, rank] = (F.silu(gate) * up).to(dtype)
        out = act[row, rank].float() @ all_down[expert].T
        partial[row, rank] = out * weight[row, rank].unsqueeze(-1)
    workspace.normed[:rows] = normed
    workspace.chosen[:rows] = chosen
    workspace.weight[:rows] = weight
    total = torch.zeros_like(x)
    for rank in range(top_k + 1):
        total += partial[:, rank]
    x += total
    if feed is not None:
        feed_reference(x, *feed)


def moe(
    x: Tensor, scale: Tensor, router: Tensor, gate_up: Weight, down: Weight, workspace: MoEWorkspace, *, top_k: int,
    eps: float, feed: tuple[Tensor, Feed] | None = None,
) -> None:  # fmt: skip
    """x += experts(norm(x)), in place: x [R, H] float32, the residual stream; R at most the workspace's rows.

    scale [H] float32 is 1 + w of the RMS norm. router [E + 1, H] is in the activations' dtype, its last row the shared
    expert's gate. The top_k largest of E logits are chosen, the lowest expert first among equals, and weighted by the
    softmax over the chosen, which is the softmax over all renormalised. gate_up [E + 1, 2 * I, H] (gate rows first) and
    down [E + 1, H, I] are `pack_experts`', of the activations' dtype or standing for it in 8 bits. All contiguous.

    With `feed` (the next norm's scale [H], the Feed to fill, of `feed_parts` squares) x is prepared for that norm.
    """
    rows, hidden = x.shape
    next_scale, into = feed if feed is not None else (x, Feed(x, x))
    assert feed is None or into.squares.shape[1] == feed_parts(hidden), "a Feed with as many parts as H has blocks"
    experts = router.shape[0] - 1
    options = launch_options(x.device)
    _route(x, scale, router, workspace, top_k, eps)

    width = down.shape[2]
    dtype = workspace.normed.dtype
    by_expert = rows * top_k >= experts
    slots = experts + 1 if by_expert else rows * top_k + 1
    shape = {
        "H": hidden,
        "EW": width,
        "E": experts,
        "TOP_K": top_k,
        "CHOICES_PADDED": triton.next_power_of_2(top_k + 1),
        "ROWS_PADDED": max(TILE_ROWS.value, triton.next_power_of_2(rows)),
        "BY_EXPERT": by_expert,
        "INTERPRETED": INTERPRET,
    }
    full = dtype == torch.float32
    gate_up, gate_up_scale, gate_up_groups = scales_of(gate_up)
    down, down_scale, down_groups = scales_of(down)
    step, down_step = NARROW if full else 2 * WIDTH_SPAN // gate_up.element_size(), _span(width, dtype)
    _gate_up_kernel[(triton.cdiv(width, WIDTH_BLOCK), slots)](
        workspace.normed,
        workspace.chosen,
        gate_up,
        gate_up_scale,
        workspace.act,
        rows,
        GROUPS=gate_up_groups,
        GROUP=GROUP,
        BLOCK_I=WIDTH_BLOCK,
        BLOCK_K=min(step, GROUP) if gate_up_groups > 1 else step,
        num_warps=4,
        num_stages=3 if full else 5,  # four of 12 KB in flight: four programs fit a multiprocessor, 288 are one wave
        **shape,
        **options,
    )
    _down_kernel[(feed_parts(hidden), slots)](
        workspace.act, workspace.chosen, workspace.weight, down, down_scale, workspace.partial, x, next_scale,
        into.scaled, into.squares, workspace.summed, rows, GROUPS=down_groups, GROUP=GROUP, FEED=feed is not None,
        SHRINK=shrink_of(into.scaled.dtype), BLOCK_H=HIDDEN_BLOCK,
        BLOCK_K=min(down_step, GROUP) if down_groups > 1 else down_step, num_warps=4, num_stages=2, **shape,
        **options,
    )  # fmt: skip


def _route(x: Tensor, scale: Tensor, router: Tensor, workspace: MoEWorkspace, top_k: int, eps: float) -> None:
    rows, hidden = x.shape
    experts = router.shape[0] - 1
    span = _span(hidden, workspace.normed.dtype)
    programs = triton.cdiv(experts + 1, ROUTE_EXPERTS) * triton.cdiv(hidden, span)
    _route_kernel[(programs, triton.cdiv(rows, TILE_ROWS.value))](
        x, scale, router, workspace.normed, workspace.logits, workspace.chosen, workspace.weight, workspace.routed,
        rows, eps, H=hidden, E=experts, TOP_K=top_k, EXPERTS_PADDED=triton.next_power_of_2(experts),
        ROWS_PADDED=min(TILE_ROWS.value, triton.next_power_of_2(rows)), BLOCK_E=ROUTE_EXPERTS, BLOCK_K=span,
        INTERPRETED=INTERPRET, num_warps=8, num_stages=1, **launch_options(x.device),
    )  # fmt: skip


def _span(size: int, dtype: torch.dtype) -> int:
    """Elements of a summed axis of `size` that a program holds in registers: its order of summation, so a matter of the
    shape alone."""
    padded: int = triton.next_power_of_2(size)
    return max(16, min(padded, NARROW if dtype == torch.float32 else WIDE))


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    x, scale, router, normed, logits, chosen, weight, arrived, rows, eps, H: tl.constexpr, E: tl.constexpr,
    TOP_K: tl.constexpr, EXPERTS_PADDED: tl.constexpr, ROWS_PADDED: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Reads router[BLOCK_E experts, BLOCK_K of H] before anything else, then 16 whole rows of x for their norm."""
    SLICES: tl.constexpr = (H + BLOCK_K - 1) // BLOCK_K
    part = tl.program_id(0) % SLICES
    block = tl.program_id(0) // SLICES
    tile = tl.program_id(1)
    expert = block * BLOCK_E + tl.arange(0, BLOCK_E)
    k = part * BLOCK_K + tl.arange(0, BLOCK_K)
    w = tl.load(router + expert[None, :] * H + k[:, None], mask=(expert[None, :] <= E) & (k[:, None] < H), other=0.0)
    gain = tl.load(scale + k, mask=k < H, other=0.0)
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)

    row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    squares = tl.zeros([TILE_ROWS, BLOCK_K], tl.float32)
    for start in tl.static_range(0, H, BLOCK_K):  # unrolled, so that one row's loads are in flight together
        column = start + tl.arange(0, BLOCK_K)
        inside = (row[:, None] < rows) & (column[None, :] < H)
        value = tl.load(x + row[:, None] * H + column[None, :], mask=inside, other=0.0)
        squares += value * value
    inverse = tl.rsqrt(tl.sum(squares, axis=1) / H + eps)
    inside = (row[:, None] < rows) & (k[None, :] < H)
    value = tl.load(x + row[:, None] * H + k[None, :], mask=inside, other=0.0)
    value = (value * inverse[:, None] * gain[None, :]).to(normed.dtype.element_ty)
    if block == 0:
        tl.store(normed + row[:, None] * H + k[None, :], value, mask=inside)
    out = logits + (row[:, None] * SLICES + part) * (E + 1) + expert[None, :]
    tl.store(out, product(value, w, INTERPRETED), mask=(row[:, None] < rows) & (expert[None, :] <= E))

    tl.debug_barrier()  # every thread's stores come before the arrival
    if tl.atomic_add(arrived + tile, 1) == tl.num_programs(0) - 1:
        _choose(logits, chosen, weight, tile, rows, E, TOP_K, EXPERTS_PADDED, ROWS_PADDED, SLICES)
        tl.store(arrived + tile, 0)


@triton.jit
def _choose(
    logits, chosen, weight, tile, rows, E: tl.constexpr, TOP_K: tl.constexpr, EXPERTS_PADDED: tl.constexpr,
    ROWS_PADDED: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """The tile's rows choose. Elementwise but for exact maxima and counts, so ROWS_PADDED rows at once change no bits.

    A logit and its expert make one integer, ordered like the logits (of equals, the lowest expert is largest), so that
    one reduction finds both and even a NaN is some expert's.
    """
    row = tile * TILE_ROWS + tl.arange(0, ROWS_PADDED)
    expert = tl.arange(0, EXPERTS_PADDED)
    inside = (row[:, None] < rows) & (expert[None, :] < E)
    logit = tl.zeros([ROWS_PADDED, EXPERTS_PADDED], tl.float32)
    gate = tl.zeros([ROWS_PADDED], tl.float32)
    for part in tl.static_range(SLICES):
        line = logits + (row * SLICES + part) * (E + 1)
        logit += tl.load(line[:, None] + expert[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        gate += tl.load(line + E, mask=row < rows, other=0.0, cache_modifier=".cg")

    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # one zero, not two
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = (ordered << 32) | (EXPERTS_PADDED - expert[None, :]).to(tl.int64)
    key = tl.where(expert[None, :] < E, key, NEVER)
    largest = tl.zeros([ROWS_PADDED], tl.float32)
    total = tl.zeros([ROWS_PADDED], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(key, axis=1)
        key = tl.where(key == best[:, None], NEVER, key)
        bits = (best >> 32).to(tl.int32)
        value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
        if i == 0:
            largest = value
        total += tl.exp(value - largest)

    taken = inside & (key == NEVER)
    place = row[:, None] * (TOP_K + 1) + tl.cumsum(taken.to(tl.int32), axis=1) - 1
    tl.store(chosen + place, tl.broadcast_to(expert[None, :], [ROWS_PADDED, EXPERTS_PADDED]), mask=taken)
    tl.store(weight + place, tl.exp(logit - largest[:, None]) / total[:, None], mask=taken)
    last = row * (TOP_K + 1) + TOP_K
    tl.store(chosen + last, tl.full([ROWS_PADDED], E, tl.int32), mask=row < rows)
    tl.store(weight + last, tl.sigmoid(gate), mask=row < rows)


@triton.jit
def _slot(
    chosen, slot, rows, E: tl.constexpr, TOP_K: tl.constexpr, CHOICES_PADDED: tl.constexpr,
    ROWS_PADDED: tl.constexpr, BY_EXPERT: tl.constexpr,
):  # fmt: skip
    """The slot's expert, where it stands among each row's choices ([ROWS_PADDED], -1: not chosen), and whether this
    slot is the one to run it."""
    if BY_EXPERT:
        expert = slot
        owner = 0
    else:
        shared = slot == rows * TOP_K
        owner = tl.where(shared, 0, slot // TOP_K)
        routed = tl.load(chosen + owner * (TOP_K + 1) + slot % TOP_K, cache_modifier=".cg")
        expert = tl.where(shared, E, routed)
    row = tl.arange(0, ROWS_PADDED)
    rank = tl.arange(0, CHOICES_PADDED)
    inside = (row[:, None] < rows) & (rank[None, :] <= TOP_K)
    place = row[:, None] * (TOP_K + 1) + rank[None, :]
    table = tl.load(chosen + place, mask=inside, other=-1, cache_modifier=".cg")
    ranks = tl.max(tl.where(table == expert, rank[None, :], -1), axis=1)
    # The expert's first row: for a slot of one (row, choice) it has to be that row.
    first = tl.min(tl.where(ranks >= 0, row, ROWS_PADDED), axis=0)
    runs = first < ROWS_PADDED if BY_EXPERT else first == owner
    return expert, ranks, runs


@triton.jit
def _members(ranks, tile, ROWS_PADDED: tl.constexpr):
    """The tile's 16 rows among those with a rank, their ranks, and which of the 16 there are. Up to 16 rows in all stay
    in their places; more are gathered, so that an expert's weights are read for as few tiles as possible."""
    if ROWS_PADDED == TILE_ROWS:
        row = tl.arange(0, TILE_ROWS)
        return row, tl.maximum(ranks, 0), ranks >= 0
    member = ranks >= 0
    place = tl.cumsum(member.to(tl.int32), axis=0) - 1
    wanted = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    here = member[None, :] & (place[None, :] == wanted[:, None])
    row = tl.sum(tl.where(here, tl.arange(0, ROWS_PADDED)[None, :], 0), axis=1)
    rank = tl.sum(tl.where(here, ranks[None, :], 0), axis=1)
    return row, rank, tl.sum(here.to(tl.int32), axis=1) > 0


@triton.jit
def _tiles(ranks, ROWS_PADDED: tl.constexpr):
    """How many tiles the rows with a rank fill."""
    if ROWS_PADDED == TILE_ROWS:
        return 1
    return (tl.sum((ranks >= 0).to(tl.int32), axis=0) + TILE_ROWS - 1) // TILE_ROWS


@triton.jit(do_not_specialize=["rows"])
def _gate_up_kernel(
    normed,
    chosen,
    gate_up,
    gate_up_scale,
    act,
    rows,
    H: tl.constexpr,
    EW: tl.constexpr,  # the experts' width
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES_PADDED: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Reads BLOCK_I gate rows and as many up rows of one expert, whole, and its rows of `normed`, for every tile."""
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    # Only now: the next kernel reads `chosen` before its own wait, so it may start once `chosen` is there.
    expert, ranks, runs = _slot(chosen, tl.program_id(1), rows, E, TOP_K, CHOICES_PADDED, ROWS_PADDED, BY_EXPERT)
    if not runs:
        return
    # Gate and up rows alternate along the product's columns: one product, and each pair side by side afterwards.
    column = tl.arange(0, 2 * BLOCK_I)
    i = tl.program_id(0) * BLOCK_I + column // 2
    line = expert.to(tl.int64) * (2 * EW) + (column % 2) * EW + i
    factor = tl.where(i < EW, line, 0)  # the row whose scales are read: some row, where there is none
    for tile in range(_tiles(ranks, ROWS_PADDED)):
        row, rank, valid = _members(ranks, tile, ROWS_PADDED)
        total = tl.zeros([TILE_ROWS, 2 * BLOCK_I], tl.float32)
        for start in range(0, H, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a = tl.load(normed + row[:, None] * H + k[None, :], mask=valid[:, None] & (k[None, :] < H), other=0.0)
            w = tl.load(gate_up + line[None, :] * H + k[:, None], mask=(i[None, :] < EW) & (k[:, None] < H), other=0.0)
            one = product(a, w.to(a.dtype), INTERPRETED)
            total += scaled_by_group(one, gate_up_scale, factor, start // GROUP, GROUPS)
        if GROUPS == 1:
            total *= tl.load(gate_up_scale + factor)[None, :]
        gate, up = tl.split(tl.reshape(total, [TILE_ROWS, BLOCK_I, 2]))
        out = gate * tl.sigmoid(gate) * up
        j = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
        place = (row * (TOP_K + 1) + rank)[:, None] * EW + j[None, :]
        tl.store(act + place, out.to(act.dtype.element_ty), mask=valid[:, None] & (j[None, :] < EW))


@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    act,
    chosen,
    weight,
    down,
    down_scale,
    partial,
    x,
    norm,
    scaled,
    squares,
    arrived,
    rows,
    H: tl.constexpr,
    EW: tl.constexpr,  # the experts' width
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES_PADDED: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FEED: tl.constexpr,
    SHRINK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Reads BLOCK_H down rows of one expert (BLOCK_K columns before the wait, into registers: all there are at the
    published width) and its rows of `act`. Reading `chosen` before the wait is sound because the kernel before this one
    lets it start only once `chosen` is complete.
    """
    expert, ranks, runs = _slot(chosen, tl.program_id(1), rows, E, TOP_K, CHOICES_PADDED, ROWS_PADDED, BY_EXPERT)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    k = tl.arange(0, BLOCK_K)
    line = expert.to(tl.int64) * H + h
    factor = tl.where(h < H, line, 0)  # the row whose scales are read: some row, where there is none
    wanted = h[None, :] < tl.where(runs, H, 0)
    head = tl.load(down + line[None, :] * EW + k[:, None], mask=wanted & (k[:, None] < EW), other=0.0)
    wait_for_inputs(DEPENDENT)
    if runs:
        for tile in range(_tiles(ranks, ROWS_PADDED)):
            row, rank, valid = _members(ranks, tile, ROWS_PADDED)
            choice = row * (TOP_K + 1) + rank
            a = tl.load(act + choice[:, None] * EW + k[None, :], mask=valid[:, None] & (k[None, :] < EW), other=0.0)
            total = scaled_by_group(product(a, head.to(a.dtype), INTERPRETED), down_scale, factor, 0, GROUPS)
            for start in range(BLOCK_K, EW, BLOCK_K):
                column = start + k
                a = tl.load(
                    act + choice[:, None] * EW + column[None, :],
                    mask=valid[:, None] & (column[None, :] < EW),
                    other=0.0,
                )
                w = tl.load(
                    down + line[None, :] * EW + column[:, None], mask=wanted & (column[:, None] < EW), other=0.0
                )
                one = product(a, w.to(a.dtype), INTERPRETED)
                total += scaled_by_group(one, down_scale, factor, start // GROUP, GROUPS)
            if GROUPS == 1:
                total *= tl.load(down_scale + factor)[None, :]
            total *= tl.load(weight + choice, mask=valid, other=0.0)[:, None]
            tl.store(partial + choice[:, None] * H + h[None, :], total, mask=valid[:, None] & (h[None, :] < H))

    let_next_start(DEPENDENT)
    tl.debug_barrier()  # every thread's stores come before the arrival
    if tl.atomic_add(arrived + tl.program_id(0), 1) == tl.num_programs(1) - 1:
        for first in range(0, rows, TILE_ROWS):
            row = first + tl.arange(0, TILE_ROWS)
            inside = (row[:, None] < rows) & (h[None, :] < H)
            total = tl.zeros([TILE_ROWS, BLOCK_H], tl.float32)
            for rank in tl.static_range(TOP_K + 1):
                place = (row * (TOP_K + 1) + rank)[:, None] * H + h[None, :]
                total += tl.load(partial + place, mask=inside, other=0.0, cache_modifier=".cg")
            place = row[:, None] * H + h[None, :]
            total += tl.load(x + place, mask=inside, other=0.0)
            tl.store(x + place, total, mask=inside)
            if FEED:
                part = squares + row * tl.num_programs(0) + tl.program_id(0)
                tl.store(part, tl.sum(total * total, axis=1), mask=row < rows)
                total *= tl.load(norm + h, mask=h < H, other=0.0)[None, :] * SHRINK
                tl.store(scaled + place, total.to(scaled.dtype.element_ty), mask=inside)
        tl.store(arrived + tl.program_id(0), 0)
