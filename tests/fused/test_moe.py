"""The mixture of experts: parity with plain PyTorch and the eager model, and rows that know nothing of each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.config import ModelConfig, MoEConfig
from surefoot.kernels.experts import pack_down, pack_gate_up
from surefoot.kernels.fused.linear import Feed
from surefoot.kernels.fused.moe import MoEWorkspace, feed_parts, moe, moe_reference, moe_workspace
from surefoot.kernels.linear import LinearFactory
from surefoot.kernels.norm import RMSNorm
from surefoot.kernels.quantise import FLOAT8, GROUP, Quantised
from surefoot.model.ffn import MoE

EPS = 1e-6
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Block:
    """Weights of one block, and its sizes. Many experts for few choices: slots by row; few experts: slots by expert."""

    hidden: int = 30
    experts: int = 5
    width: int = 13
    top_k: int = 3
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    weight_dtype: torch.dtype | None = None
    grouped: bool = False  # a scale for every GROUP inputs, not for every row

    @lru_cache(maxsize=4)  # noqa: B019 - a block is a plain value
    def tensors(self) -> dict[str, Any]:  # they are passed on as keywords
        g = torch.Generator().manual_seed(self.hidden + self.experts)
        H, E, I = self.hidden, self.experts + 1, self.width  # noqa: E741
        weight_dtype = self.weight_dtype or self.dtype
        tensors: dict[str, Any] = {
            "scale": 1 + 0.1 * torch.randn(H, generator=g),
            "router": (2 * torch.randn(E, H, generator=g) / H**0.5).to(self.dtype),
            "gate_up": (2 * torch.randn(E, 2 * I, H, generator=g) / H**0.5).to(weight_dtype),
            "down": (2 * torch.randn(E, H, I, generator=g) / I**0.5).to(weight_dtype),
        }
        tensors = {name: t.to(self.device) for name, t in tensors.items()}
        if weight_dtype != FLOAT8:
            return tensors
        for name in ("gate_up", "down"):
            weight = tensors[name]
            groups = -(-weight.shape[-1] // GROUP) if self.grouped else 1
            scale = 0.5 + torch.rand(*weight.shape[:-1], groups, generator=g)
            tensors[name] = Quantised(weight, scale.to(self.device), self.dtype)
        return tensors

    def rows(self, count: int, seed: int = 0) -> Tensor:
        x = torch.randn(count, self.hidden, generator=torch.Generator().manual_seed(seed))
        return (3 * x).to(self.device)

    def workspace(self, rows: int) -> MoEWorkspace:
        """One that holds nonsense, but for its counters."""
        space = moe_workspace(rows, self.hidden, self.experts, self.width, self.top_k, self.dtype, self.device)
        for t in (space.normed, space.logits, space.weight, space.act, space.partial):
            t.fill_(float("nan"))
        space.chosen.fill_(-7)
        return space

    def fused(self, x: Tensor, space: MoEWorkspace | None = None, router: Tensor | None = None) -> Tensor:
        """x after the block."""
        x = x.clone()
        space = space or self.workspace(x.shape[0])
        tensors = self.tensors() if router is None else {**self.tensors(), "router": router}
        moe(x, **tensors, workspace=space, top_k=self.top_k, eps=EPS)
        return x

    def compare(self, x: Tensor, tolerance: float) -> None:
        """The launches against the reference, step by step and as a whole."""
        got, expected = x.clone(), x.clone()
        ours, theirs = self.workspace(x.shape[0]), self.workspace(x.shape[0])
        moe(got, **self.tensors(), workspace=ours, top_k=self.top_k, eps=EPS)
        moe_reference(expected, **self.tensors(), workspace=theirs, top_k=self.top_k, eps=EPS)
        assert (expected - x).abs().mean() > 0.2  # there is something to see
        assert torch.equal(ours.chosen, theirs.chosen)
        for name in ("normed", "weight", "act", "partial"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert not ours.routed.any()
        assert not ours.summed.any()


SHAPES = {
    "few experts": Block(),
    "many experts": Block(hidden=32, experts=37, width=16, top_k=2),
    "one choice": Block(hidden=16, experts=2, width=5, top_k=1),
    "every expert": Block(hidden=16, experts=4, width=8, top_k=4),
}


@pytest.mark.parametrize("rows", range(1, 21))
def test_parity(rows: int, device: torch.device) -> None:
    block = Block(device=device)
    block.compare(block.rows(rows, seed=rows), 2e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [3, 18])
def test_parity_of_shapes(shape: str, rows: int, device: torch.device) -> None:
    block = replace(SHAPES[shape], device=device)
    block.compare(block.rows(rows), 2e-5)


def test_parity_of_several_slices_and_blocks(device: torch.device) -> None:
    block = Block(hidden=150, width=70, device=device)  # 3 slices of H in the router, 2 steps in the others
    block.compare(block.rows(3), 2e-5)


def test_parity_of_more_tiles(device: torch.device) -> None:
    block = Block(hidden=32, width=16, device=device)
    block.compare(block.rows(40), 2e-5)


# bfloat16 is that loose for the interpreter, which cuts it short instead of rounding.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 4e-3), (torch.bfloat16, 0.15)])
def test_parity_in_half_precision(dtype: torch.dtype, tolerance: float, device: torch.device) -> None:
    block = Block(hidden=48, dtype=dtype, device=device)
    block.compare(block.rows(6), tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 4e-3), (torch.bfloat16, 0.15)])
def test_parity_with_8_bit_weights(dtype: torch.dtype, tolerance: float, device: torch.device) -> None:
    block = Block(hidden=48, width=22, dtype=dtype, weight_dtype=FLOAT8, device=device)
    block.compare(block.rows(5), tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.float16, 4e-3)])
def test_parity_with_a_scale_for_every_group(dtype: torch.dtype, tolerance: float, device: torch.device) -> None:
    block = Block(150, 5, 140, 3, dtype, device, FLOAT8, grouped=True)
    x = block.rows(5)
    block.compare(x, tolerance)
    assert torch.equal(block.fused(x[3:4])[0], block.fused(x)[3])


@pytest.mark.parametrize("shape, dtype", [("few experts", torch.float32), ("many experts", torch.float16)])
def test_a_row_alone_has_the_same_bits(shape: str, dtype: torch.dtype, device: torch.device) -> None:
    block = replace(SHAPES[shape], dtype=dtype, device=device)
    x = block.rows(18)
    together = block.fused(x)
    for i in (0, 7, 17):
        assert torch.equal(block.fused(x[i : i + 1])[0], together[i])
    assert torch.equal(block.fused(x[5:8]), together[5:8])
    assert torch.equal(block.fused(x.flip(0)).flip(0), together)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [None, FLOAT8])
@pytest.mark.parametrize("sizes", [(2048, 64, 512, 8), (1024, 256, 128, 8)])
def test_rows_of_a_large_block(
    sizes: tuple[int, int, int, int], weight_dtype: torch.dtype | None, dtype: torch.dtype, device: torch.device
) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    block = Block(*sizes, dtype, device, weight_dtype)
    x = block.rows(64)
    together = block.fused(x)
    for rows in (1, 2, 5, 8, 16, 17, 31, 32):
        assert torch.equal(torch.cat([block.fused(part) for part in x.split(rows)]), together)


@pytest.mark.parametrize("top_k", [1, 3])
def test_equal_rows_fill_more_than_a_tile(top_k: int, device: torch.device) -> None:
    block = Block(hidden=32, width=16, top_k=top_k, device=device)
    one = block.rows(1)
    many = block.fused(one.repeat(35, 1))
    assert torch.equal(many, block.fused(one).expand(35, -1))
    near = one + 1e-3 * block.rows(20, seed=1)  # all choose the same experts
    block.compare(near, 2e-5)
    assert torch.equal(block.fused(near)[17], block.fused(near[17:18])[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's arithmetic is numpy's
def test_neighbours_that_are_not_numbers(device: torch.device) -> None:
    block = Block(device=device)
    x = block.rows(4)
    expected = block.fused(x)[[0, 3]]
    x[1:3] = torch.tensor([float("nan"), float("inf")], device=device)[:, None]
    assert torch.equal(block.fused(x)[[0, 3]], expected)


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_lowest_of_equal_experts(top_k: int, device: torch.device) -> None:
    block = Block(top_k=top_k, device=device)
    router = block.tensors()["router"].clone()
    router[1:4] = router[1]
    router[0] = router[4] = 0.0  # between the equal ones' signs: never a tie with them
    x = block.rows(6)
    space = block.workspace(6)
    block.fused(x, space, router)
    score = space.normed.float() @ router[1].float()
    for row, positive in enumerate((score > 0).tolist()):
        expected = ([1, 2, 3] if positive else [0, 1, 4])[:top_k]
        assert space.chosen[row].tolist() == [*expected, 5]
    shares = space.weight[score > 0, :top_k]
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / top_k))
    assert 0 < len(shares) < 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_next_norm_is_prepared(dtype: torch.dtype, device: torch.device) -> None:
    block = Block(hidden=70, dtype=dtype, device=device)
    scale = block.rows(1, seed=5)[0, :70].contiguous()

    def feed(rows: int) -> Feed:
        kinds = (70, dtype), (feed_parts(70), torch.float32)
        return Feed(*(torch.full((rows, n), torch.nan, dtype=kind, device=device) for n, kind in kinds))

    x = block.rows(18)
    found, expected = x.clone(), x.clone()
    ours, theirs = feed(18), feed(18)
    options: dict[str, Any] = {"workspace": block.workspace(18), "top_k": block.top_k, "eps": EPS}
    moe(found, **block.tensors(), **options, feed=(scale, ours))
    moe_reference(expected, **block.tensors(), **options, feed=(scale, theirs))
    assert torch.equal(found, block.fused(x))
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(ours.scaled, theirs.scaled, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.squares.sum(-1), theirs.squares.sum(-1), rtol=tolerance, atol=tolerance)
    alone, own = x[17:].clone(), feed(1)
    moe(alone, **block.tensors(), **options, feed=(scale, own))
    assert torch.equal(own.scaled[0], ours.scaled[17])
    assert torch.equal(own.squares[0], ours.squares[17])


def test_a_workspace_serves_again(device: torch.device) -> None:
    block = Block(device=device)
    space = block.workspace(18)
    for seed, rows in enumerate((18, 1, 7)):
        x = block.rows(rows, seed)
        assert torch.equal(block.fused(x, space), block.fused(x))
        assert not space.routed.any()
        assert not space.summed.any()


@pytest.mark.parametrize("width, shared_width", [(12, 20), (20, 12), (16, 16)])
def test_parity_with_the_model(width: int, shared_width: int, device: torch.device) -> None:
    H, E, k = 32, 6, 2
    g = torch.Generator().manual_seed(width)

    def weight(*shape: int) -> Tensor:
        values = 2 * torch.randn(*shape, generator=g)
        return values.div(shape[-1] ** 0.5).to(device)

    tensors = {
        "gate.weight": weight(E, H),
        "shared_expert_gate.weight": weight(1, H),
        "shared_expert.gate_proj.weight": weight(shared_width, H),
        "shared_expert.up_proj.weight": weight(shared_width, H),
        "shared_expert.down_proj.weight": weight(H, shared_width),
        "experts.gate_up_proj": weight(E, 2 * width, H),
        "experts.down_proj": weight(E, H, width),
    }
    config = ModelConfig(  # only the mixture's sizes matter here
        vocab_size=1,
        hidden_size=H,
        layer_types=(),
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        rotary_dim=1,
        rope_theta=1.0,
        linear_key_heads=1,
        linear_value_heads=1,
        linear_key_dim=1,
        linear_value_dim=1,
        moe=MoEConfig(E, k, width, shared_width),
    )
    scale = 1 + 0.1 * weight(H)
    x = weight(5, H)
    expected = x + MoE(config, dict(tensors), "", LinearFactory()).decode(RMSNorm(scale, EPS)(x))
    layer = MoE(config, tensors, "", LinearFactory(pack=False))
    assert not tensors  # the packed ones took their place
    torch.testing.assert_close(x + layer.decode(RMSNorm(scale, EPS)(x)), expected, rtol=2e-5, atol=2e-5)

    packed = layer.packed
    assert packed is not None
    space = moe_workspace(5, H, E, max(width, shared_width), k, torch.float32, device)
    moe(x, scale, packed.router, packed.gate_up, packed.down, space, top_k=k, eps=EPS)
    torch.testing.assert_close(x, expected, rtol=2e-5, atol=2e-5)


def test_packing_pads_with_zeros(device: torch.device) -> None:
    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, device=device).to(FLOAT8)

    gate_up = pack_gate_up(ones(3, 4, 8), ones(5, 8), ones(5, 8))
    down = pack_down(ones(3, 8, 2), ones(8, 5))
    assert gate_up.dtype == down.dtype == FLOAT8
    routed, shared = [1.0, 1.0, 0.0, 0.0, 0.0], [1.0] * 5
    assert gate_up.float()[:, :, 3].tolist() == [routed * 2] * 3 + [shared * 2]
    assert down.float()[:, 3].tolist() == [routed] * 3 + [shared]
