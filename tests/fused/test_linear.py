"""The fused linear layer against its reference, and its rows against one another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from surefoot.kernels.fused.linear import (
    Epilogue,
    Feed,
    Tiling,
    Workspace,
    feed_reference,
    linear,
    linear_reference,
)
from surefoot.kernels.quantise import FLOAT8, GROUP, Quantised, Weight, from_stored, in_halves, quantise

EPILOGUES: list[Epilogue] = ["store", "add", "swiglu"]
TILINGS = [Tiling(16, 64), Tiling(32, 32), Tiling(16, 32, parts=3)]
SHAPES = [(5, 70, 100), (1, 33, 64), (17, 40, 250)]  # rows, outputs, inputs


def random(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def run(function: object, x: Tensor, weight: Weight, features: int, **options: object) -> Tensor:
    base = random(x.shape[0], features, device=x.device, seed=9)
    out = base.clone() if options.get("epilogue") == "add" else torch.full_like(base, torch.nan)
    workspace = Workspace.allocate(x.shape[0], weight.shape[0], 4, x.device)
    workspace.sums.fill_(torch.nan)
    function(x, weight, out, workspace, **options)  # type: ignore[operator]
    assert not workspace.counters.any()
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda t: f"{t.block_n}x{t.block_k}/{t.parts}")
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_parity(device: torch.device, shape: tuple[int, int, int], tiling: Tiling, epilogue: Epilogue) -> None:
    rows, features, inner = shape
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
        x = random(rows, inner, device=device)
        scale = random(inner, device=device, seed=2)
        into = Feed(x.to(dtype), torch.full((rows, 3), torch.nan, device=device))
        feed_reference(x, scale, into)
        weight = (random(features * (1 + (epilogue == "swiglu")), inner, device=device, seed=1) / inner**0.5).to(dtype)
        for squares in (None, into.squares):
            options = {"squares": squares, "eps": 1e-6, "epilogue": epilogue}
            expected = run(linear_reference, into.scaled, weight, features, **options)
            found = run(linear, into.scaled, weight, features, tiling=tiling, **options)
            error = (found - expected).norm() / expected.norm()
            assert error < tolerance


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda t: f"{t.block_n}x{t.block_k}/{t.parts}")
def test_the_next_norm_is_prepared(device: torch.device, tiling: Tiling) -> None:
    rows, features, inner = 5, 70, 96
    x, weight = random(rows, inner, device=device), random(features, inner, device=device, seed=1)
    scale = random(features, device=device, seed=2)
    blocks = -(-features // tiling.block_n)
    feeds = [
        Feed(*(torch.full((rows, n), torch.nan, device=device) for n in (features, blocks))) for _ in range(2)
    ]  # fmt: skip
    run(linear_reference, x, weight, features, epilogue="add", feed=(scale, feeds[0]))
    run(linear, x, weight, features, epilogue="add", feed=(scale, feeds[1]), tiling=tiling)
    torch.testing.assert_close(feeds[1].scaled, feeds[0].scaled, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(feeds[1].squares.sum(-1), feeds[0].squares.sum(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda t: f"{t.block_n}x{t.block_k}/{t.parts}")
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_do_not_depend_on_their_number(
    device: torch.device, dtype: torch.dtype, tiling: Tiling, epilogue: Epilogue
) -> None:
    features, inner = 48, 130
    x = random(20, inner, device=device).to(dtype)
    squares = random(20, 5, device=device, seed=4).square()
    weight = random(features * (1 + (epilogue == "swiglu")), inner, device=device, seed=1).to(dtype)
    options = {"eps": 1e-6, "epilogue": epilogue, "tiling": tiling}
    full = run(linear, x, weight, features, squares=squares, **options)
    base = random(20, features, device=device, seed=9) if epilogue == "add" else torch.zeros(20, features).to(device)
    for start, count in ((0, 1), (7, 5), (4, 16), (19, 1)):
        part = slice(start, start + count)
        out = base[part].clone()
        workspace = Workspace.allocate(20, weight.shape[0], 4, device)
        linear(x[part].contiguous(), weight, out, workspace, squares=squares[part].contiguous(), **options)  # type: ignore[arg-type]
        assert torch.equal(out, full[part])


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda t: f"{t.block_n}x{t.block_k}/{t.parts}")
def test_columns_of_a_wider_output(device: torch.device, epilogue: Epilogue, tiling: Tiling) -> None:
    x = random(5, 64, device=device)
    weight = random(33 * (1 + (epilogue == "swiglu")), 64, device=device, seed=1)
    wide = torch.full((5, 50), torch.nan, device=device)
    part = wide[:, 10:43]
    part.copy_(random(5, 33, device=device, seed=9))
    linear(x, weight, part, Workspace.allocate(5, weight.shape[0], 4, device), epilogue=epilogue, tiling=tiling)
    assert torch.equal(part, run(linear, x, weight, 33, epilogue=epilogue, tiling=tiling))
    assert wide[:, :10].isnan().all()
    assert wide[:, 43:].isnan().all()


def in_squares(weight: Tensor, dtype: torch.dtype) -> Quantised:
    """As published checkpoints have it."""
    shape = -(-weight.shape[0] // GROUP), -(-weight.shape[1] // GROUP)
    scale = random(*shape, device=weight.device, seed=3).abs() + 0.1
    return from_stored(weight.to(FLOAT8), scale, dtype)


@pytest.mark.parametrize("inner", [300, 384])  # the second in whole groups: halves that are widened together
@pytest.mark.parametrize("squares", [False, True], ids=["rows", "squares"])
@pytest.mark.parametrize("tiling", [Tiling(16, 64), Tiling(16, 128, parts=3), None], ids=["64", "128/3", "chosen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_narrow_weights(
    device: torch.device, dtype: torch.dtype, tiling: Tiling | None, squares: bool, inner: int
) -> None:
    features = 70
    weight = random(2 * features, inner, device=device, seed=1) / inner**0.5
    narrow = in_squares(weight, dtype) if squares else quantise(weight.to(dtype))
    x = random(5, inner, device=device).to(dtype)
    for epilogue, part in (("store", slice(features)), ("swiglu", slice(None))):
        taken = in_halves(Quantised(narrow.weight[part], narrow.scale[part], dtype))
        assert taken.halved == (inner == 384)
        if taken.halved and tiling is not None and tiling.block_k < GROUP:
            tiling = replace(tiling, block_k=GROUP)
        options = {"squares": random(5, 3, device=device).square(), "eps": 1e-6, "epilogue": epilogue}
        expected = run(linear_reference, x, taken, features, **options)
        found = run(linear, x, taken, features, tiling=tiling, **options)
        assert (found - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 2e-3)
        alone = {**options, "squares": options["squares"][3:4]}  # type: ignore[index]
        assert torch.equal(run(linear, x[3:4], taken, features, tiling=tiling, **alone)[0], found[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_float8_number_is_widened_exactly(device: torch.device, dtype: torch.dtype) -> None:
    """Each of the 254 patterns that are numbers, in both halves of a group, through a product that picks them out."""
    patterns = torch.tensor([p for p in range(256) if p & 0x7F != 0x7F], dtype=torch.uint8)
    rows = patterns[:, None].expand(-1, GROUP).contiguous().to(device).view(FLOAT8)
    weight = in_halves(Quantised(rows, torch.ones(len(patterns), 1, device=device), dtype))
    for one in (0, GROUP // 2 - 1, GROUP // 2, GROUP - 1):
        x = torch.zeros(1, GROUP, dtype=dtype, device=device)
        x[0, one] = 1.0
        found = run(linear, x, weight, len(patterns))
        assert torch.equal(found[0], rows[:, one].float())
