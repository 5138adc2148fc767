"""The fused linear layer against its reference, and its rows against one another."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from surefoot.kernels.fused.linear import Epilogue, Tiling, Workspace, linear, linear_reference

EPILOGUES: list[Epilogue] = ["store", "add", "swiglu"]
TILINGS = [Tiling(16, 64), Tiling(32, 32), Tiling(16, 32, parts=3)]
SHAPES = [(5, 70, 100), (1, 33, 64), (16, 16, 96), (17, 40, 192), (35, 96, 250)]  # rows, outputs, inputs


def random(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def run(function: object, x: Tensor, weight: Tensor, features: int, **options: object) -> Tensor:
    base = random(x.shape[0], features, device=x.device, seed=9)
    out = base.clone() if options.get("epilogue") == "add" else torch.full_like(base, torch.nan)
    workspace = Workspace.allocate(x.shape[0], weight.shape[0], 4, x.device)
    workspace.sums.fill_(torch.nan)
    workspace.squares.fill_(torch.nan)
    function(x, weight, out, workspace, **options)  # type: ignore[operator]
    assert not workspace.counters.any()
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda t: f"{t.block_n}x{t.block_k}/{t.parts}")
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("normed", [False, True], ids=["bare", "normed"])
def test_parity(
    device: torch.device, shape: tuple[int, int, int], tiling: Tiling, epilogue: Epilogue, normed: bool
) -> None:
    rows, features, inner = shape
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
        x = random(rows, inner, device=device)
        weight = (random(features * (1 + (epilogue == "swiglu")), inner, device=device, seed=1) / inner**0.5).to(dtype)
        norm = random(inner, device=device, seed=2) if normed else None
        if not normed:
            x = x.to(dtype)
        options = {"norm": norm, "eps": 1e-6, "epilogue": epilogue}
        expected = run(linear_reference, x, weight, features, **options)
        found = run(linear, x, weight, features, tiling=tiling, **options)
        error = (found - expected).norm() / expected.norm()
        assert error < tolerance


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda t: f"{t.block_n}x{t.block_k}/{t.parts}")
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_do_not_depend_on_their_number(
    device: torch.device, dtype: torch.dtype, tiling: Tiling, epilogue: Epilogue
) -> None:
    features, inner = 48, 130
    x = random(20, inner, device=device)
    weight = random(features * (1 + (epilogue == "swiglu")), inner, device=device, seed=1).to(dtype)
    options = {"norm": random(inner, device=device, seed=2), "eps": 1e-6, "epilogue": epilogue, "tiling": tiling}
    full = run(linear, x, weight, features, **options)
    base = random(20, features, device=device, seed=9) if epilogue == "add" else torch.zeros(20, features).to(device)
    for start, count in itertools.product((0, 7, 19), (1, 2, 5, 16)):
        part = x[start : start + count].contiguous()
        out = base[start : start + count].clone()
        linear(part, weight, out, Workspace.allocate(20, weight.shape[0], 4, device), **options)  # type: ignore[arg-type]
        assert torch.equal(out, full[start : start + count])


def test_narrow_weights_are_scaled_by_row(device: torch.device) -> None:
    weight = random(24, 64, device=device).to(torch.float8_e4m3fn)
    scale = random(24, device=device, seed=3).abs()
    x = random(3, 64, device=device, seed=1).to(torch.bfloat16)
    out, expected = (torch.full((3, 24), torch.nan, device=device) for _ in range(2))
    linear_reference(x, weight, expected, row_scale=scale)
    linear(x, weight, out, row_scale=scale, tiling=Tiling(16, 32))
    assert (out - expected).norm() / expected.norm() < 1e-2


def test_rows_may_lie_apart(device: torch.device) -> None:
    weight, x = random(24, 64, device=device), random(3, 5, 64, device=device, seed=1)
    out, expected = (torch.full((6, 24), torch.nan, device=device) for _ in range(2))
    linear(x[:, :2], weight, out)
    linear(x[:, :2].flatten(0, 1), weight, expected)
    assert torch.equal(out, expected)
