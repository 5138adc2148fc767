"""A row's bits do not depend on how many rows are computed with it: each kernel alone, at awkward sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.kernels import linear, norm, rows
from surefoot.kernels.causal_conv import causal_conv
from surefoot.kernels.rope import RopeTable, apply_rope_

WIDTHS = [1, 7, 20, 32, 33, 64, 100, 704, 4099, 12288]
COUNTS = [2, 3, 4, 5, 8, 9, 17]


def assert_rows_agree(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    full = function(x)
    for count in COUNTS:
        assert torch.equal(function(x[:count]), full[:count]), f"{count} rows"
        assert torch.equal(function(x[-count:].contiguous()), full[-count:]), f"last {count} rows"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("function", [F.silu, torch.sigmoid, torch.exp, F.softplus], ids=lambda f: f.__name__)
def test_by_row(function: Callable[[Tensor], Tensor], width: int) -> None:
    assert_rows_agree(lambda x: rows.by_row(function, x), 4 * random(17, width))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int) -> None:
    scale = random(width, seed=1)
    assert_rows_agree(norm.RMSNorm(scale, 1e-6), random(17, width))
    assert_rows_agree(norm.L2Norm(torch.device("cpu")), random(17, width))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("heads,dim", [(2, 32), (3, 20), (8, 64), (5, 7)])
def test_gated_norm(heads: int, dim: int) -> None:
    both, scale = random(17, 2 * heads * dim), random(dim, seed=1)
    assert_rows_agree(lambda x: norm.GatedRMSNorm(scale, 1e-6)(*(h.contiguous() for h in x.chunk(2, -1))), both)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(33, 20), (50, 36), (96, 64), (256, 704), (2064, 256), (300, 3584)], ids=str)
def test_linear(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = (random(*shape, seed=1) * shape[1] ** -0.5).to(dtype)
    built = linear.LinearFactory()(weight)
    x = random(17, shape[1])
    assert_rows_agree(built, x)
    expected = x.to(dtype).double() @ weight.double().T
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for out in (built(x), built.bulk(x)):
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_16_bits_are_packed_on_every_processor(dtype: torch.dtype) -> None:
    """`F.linear` takes ten times as long for them where there are no instructions for their products."""
    weight, x = random(96, 64).to(dtype), random(5, 64, seed=1)
    assert type(linear.LinearFactory()(weight)) is type(linear.LinearFactory()(weight.float()))
    wide = linear.PackedLinear(weight, torch.float32)
    assert torch.equal(wide.rows(torch.arange(96)), weight)
    torch.testing.assert_close(wide(x), (x.to(dtype).float() @ weight.float().T), atol=5e-2, rtol=1e-2)
    assert linear.rows_agree(wide, 64)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_block_linear_counts_rows_right(block: int) -> None:
    weight = random(12, 20)
    built = linear.BlockLinear(weight, block)
    for count in (2, 5, 16, 17, 33):
        x = random(count, 20, seed=count)
        torch.testing.assert_close(built(x), x @ weight.T)


def test_the_probe_can_fail() -> None:
    """A product that changes with the number of rows is not taken for one that does not."""

    class Drifting(linear.BlockLinear):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) + (1e-6 if len(x) > 4 else 0.0)

    assert not linear.rows_agree(Drifting(random(12, 20), 1), 20)


def test_passes_are_wider_where_every_layer_packs() -> None:
    factory = linear.LinearFactory()
    assert factory.least_rows == rows.MIN_ROWS
    packed = isinstance(factory(random(96, 64)), linear.PackedLinear)
    assert factory.least_rows == (linear.PACKED_ROWS if packed else rows.MIN_ROWS)
    factory._packs[0, 0] = False
    assert factory.least_rows == rows.MIN_ROWS


def test_merged_projections_stand_in_order() -> None:
    first, second, x = random(5, 12), random(7, 12, seed=1), random(3, 12, seed=2)
    out = linear.LinearFactory()(first, second)(x)
    torch.testing.assert_close(out, torch.cat([x @ first.T, x @ second.T], -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("channels", [7, 32, 100])
def test_causal_conv(channels: int) -> None:
    strip, taps = random(11, channels), random(4, channels, seed=1)
    whole = causal_conv(strip, taps.unsqueeze(1))
    torch.testing.assert_close(whole, F.conv1d(strip.T[None], taps.T[:, None], groups=channels)[0].T)
    for first, count in ((0, 1), (7, 1), (2, 3), (5, 2)):
        part = causal_conv(strip[first : first + 3 + count], taps.unsqueeze(1))
        assert torch.equal(part, whole[first : first + count])


def test_rope_matches_its_formula_and_depends_on_differences_only() -> None:
    table = RopeTable(8, 10_000.0, 5000, torch.device("cpu"))
    x = random(3, 2, 20)
    positions = torch.tensor([0, 7, 4093])
    out = apply_rope_(x.clone(), *table.at(positions))
    for row, position in enumerate(positions.tolist()):
        for j in range(4):
            angle = torch.tensor(position * 10_000.0 ** (-2 * j / 8), dtype=torch.float64)
            a, b = x[row, :, j].double(), x[row, :, j + 4].double()
            torch.testing.assert_close(out[row, :, j].double(), a * angle.cos() - b * angle.sin(), atol=1e-6, rtol=0)
            torch.testing.assert_close(
                out[row, :, j + 4].double(), b * angle.cos() + a * angle.sin(), atol=1e-6, rtol=0
            )
    assert torch.equal(out[..., 8:], x[..., 8:])
    q, k = random(1, 1, 8, seed=1), random(1, 1, 8, seed=2)

    def score(position: int) -> Tensor:
        here, later = (table.at(torch.tensor([p])) for p in (position, position + 5))
        return (apply_rope_(q.clone(), *later) * apply_rope_(k.clone(), *here)).sum()

    scores = [score(position) for position in (0, 1000, 4900)]
    torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(scores[0], scores[2], atol=1e-5, rtol=0)
