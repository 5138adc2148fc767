"""Attention of a decode window: parity with the reference, and rows whose bits depend on nothing but themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.cache import KVCache
from surefoot.errors import InputError
from surefoot.kernels.fused.attention import attend, attend_reference, workspaces
from surefoot.kernels.linear import LinearFactory
from surefoot.kernels.rope import RopeTable
from surefoot.loading.tiny import tiny_config
from surefoot.model.attention import Attention
from surefoot.model.spans import Layout

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}
GROUPS = [(1, 1), (4, 2), (4, 1), (6, 1)]  # query heads, key heads: 1, 2, 4 and 6 query heads a key head


@dataclass
class Case:
    """Arguments of one call, and the lengths that its sequences begin with."""

    merged: Tensor
    weights: tuple[Tensor, Tensor]
    rope: tuple[Tensor, Tensor]
    keys: Tensor
    values: Tensor
    slots: Tensor
    length: Tensor
    window: int

    def run(self, function: Any = attend, **changes: Any) -> Tensor:
        """The output; the caches are written in place. All that the call must overwrite is NaN before it."""
        case = replace(self, **changes)
        rows, width = case.merged.shape
        head_dim, kv_heads = case.keys.shape[-1], case.keys.shape[1]
        heads = width // head_dim // 2 - kv_heads
        out = torch.full((rows, heads * head_dim), torch.nan, dtype=case.merged.dtype, device=case.merged.device)
        spaces = workspaces(rows, heads, head_dim, case.keys.shape[2], case.merged.device)
        for space in spaces:
            space.fill_(torch.nan)
        tensors = (case.keys, case.values, case.slots, case.length, out, *spaces)
        function(case.merged, *case.weights, *case.rope, *tensors, window=case.window, eps=EPS)
        return out

    def copy(self) -> Case:
        """The same call on caches of its own (strides kept)."""
        return replace(self, keys=self.keys.clone(), values=self.values.clone())

    def sequence(self, b: int) -> Tensor:
        """The rows of sequence b."""
        return self.merged[b * self.window : (b + 1) * self.window]


def case(
    device: torch.device,
    lengths: list[int],
    window: int,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    rotary: int = 4,
    max_len: int = 192,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    padding: int = 0,
) -> Case:
    """Sequences of these lengths in a permutation of more slots than needed, then `padding` inactive ones. NaN lies in
    the caches wherever nothing was committed."""
    torch.manual_seed(1)
    hq, hkv = heads
    slots = [2 * b + 1 for b in reversed(range(len(lengths)))]
    count = 2 * len(lengths) + 1
    # One tensor that interleaves keys and values: both are strided views.
    caches = torch.full((count, 2, hkv, max_len, head_dim), torch.nan)
    length = torch.full((count,), 7, dtype=torch.int32)
    for slot, tokens in zip(slots, lengths, strict=True):
        length[slot] = tokens
        caches[slot, :, :, :tokens] = torch.randn(2, hkv, tokens, head_dim)[:, :, :max_len]
    caches = caches.to(device, cache or dtype)
    table = RopeTable(rotary, 10_000.0, max_len, device)
    merged = torch.randn((len(lengths) + padding) * window, 2 * (hq + hkv) * head_dim)
    scales = 1 + 0.3 * torch.randn(2, head_dim, device=device)
    return Case(
        merged.to(device, dtype),
        (scales[0], scales[1]),
        (table.cos.squeeze(1), table.sin.squeeze(1)),
        caches[:, 0],
        caches[:, 1],
        torch.tensor(slots + [-1] * padding, dtype=torch.int32, device=device),
        length.to(device),
        window,
    )


def assert_parity(made: Case) -> None:
    tolerance = max(TOLERANCE[made.merged.dtype], TOLERANCE[made.keys.dtype])
    expected, found = made.copy(), made.copy()
    reference, out = expected.run(attend_reference), found.run()
    assert out.isfinite().all()
    torch.testing.assert_close(out, reference, atol=tolerance, rtol=tolerance)
    for mine, theirs in ((found.keys, expected.keys), (found.values, expected.values)):
        assert torch.equal(mine.isnan(), theirs.isnan())
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("heads", GROUPS)
@pytest.mark.parametrize("window", [1, 3, 4, 8])
def test_parity(device: torch.device, heads: tuple[int, int], window: int) -> None:
    assert_parity(case(device, [127, 0] if window < 8 else [123], window, heads=heads, max_len=140))


@pytest.mark.parametrize("tokens", [1, 63, 120, 121, 127, 128, 129, 300])
def test_parity_around_the_borders_of_splits(device: torch.device, tokens: int) -> None:
    assert_parity(case(device, [tokens], 8, heads=(2, 1), max_len=320))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache", [torch.float16, torch.bfloat16, torch.float32])
def test_parity_of_16_bit_models(device: torch.device, dtype: torch.dtype, cache: torch.dtype) -> None:
    assert_parity(case(device, [126], 3, heads=(3, 1), head_dim=32, rotary=32, dtype=dtype, cache=cache))


def test_parity_at_the_size_of_a_real_head(device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16):
        assert_parity(case(device, [127], 2, heads=(4, 1), head_dim=256, rotary=64, max_len=256, dtype=dtype))


def test_a_window_longer_than_a_tile(device: torch.device) -> None:
    assert_parity(case(device, [100], 40, heads=(1, 1)))


@pytest.mark.parametrize("max_len", [36 * 128, 67 * 128 + 5])
def test_contexts_of_many_splits(device: torch.device, max_len: int) -> None:
    """More splits than the second kernel adds up at a time, then more than there are programs for."""
    assert_parity(case(device, [max_len - 2], 2, heads=(1, 1), max_len=max_len))


@pytest.mark.parametrize(
    "dtype, heads, window",
    [
        (torch.float32, (4, 2), 3),
        (torch.float32, (6, 1), 3),
        (torch.float16, (6, 1), 4),
        (torch.float16, (1, 1), 17),
        (torch.bfloat16, (2, 1), 5),
    ],
)
def test_a_window_is_its_rows_one_after_the_other(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], window: int
) -> None:
    together = case(device, [126], window, heads=heads, dtype=dtype)
    single, length = together.copy(), together.length.clone()
    out = together.run()
    for i in range(window):
        row = single.run(merged=together.merged[i : i + 1], length=length, window=1)
        assert torch.equal(row[0], out[i])
        length[together.slots.long()] += 1
    assert_same_bits(single, together)


def test_a_sequence_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    crowd = case(device, [126, 3, 64], 3, heads=(2, 1), dtype=torch.float16)
    alone, other = crowd.copy(), crowd.copy()
    out = crowd.run()
    for b in range(3):
        found = alone.run(merged=alone.sequence(b), slots=alone.slots[b : b + 1])
        assert torch.equal(found, out[3 * b : 3 * b + 3])
    order = torch.tensor([2, 0, 1], device=device)
    rows = (3 * order[:, None] + torch.arange(3, device=device)).flatten()
    assert torch.equal(other.run(merged=other.merged[rows], slots=other.slots[order]), out[rows])
    assert_same_bits(alone, crowd)
    assert_same_bits(other, crowd)


def test_the_length_of_the_caches_does_not_matter(device: torch.device) -> None:
    """Other grids, other workspaces: the same bits."""
    short, long = (case(device, [290], 4, heads=(2, 1), max_len=n) for n in (300, 9000))
    long.keys[:, :, :300], long.values[:, :, :300] = short.keys, short.values
    assert torch.equal(long.run(merged=short.merged, weights=short.weights), short.run())


def test_padding_writes_nothing(device: torch.device) -> None:
    made = case(device, [5], 3, padding=2)
    made.merged[3:] = torch.nan
    before = made.copy()
    assert_parity(made)
    out = made.run()
    assert not out[3:].any()
    rest = [s for s in range(made.keys.shape[0]) if s != int(made.slots[0])]
    for mine, theirs in ((made.keys, before.keys), (made.values, before.values)):
        assert torch.equal(mine[rest].nan_to_num(nan=-9), theirs[rest].nan_to_num(nan=-9))


@pytest.mark.parametrize("max_len, beyond", [(128, 1), (130, 2), (130, 4), (128, 9)])
def test_positions_beyond_the_caches(device: torch.device, max_len: int, beyond: int) -> None:
    """The rows that have room are attended, the others are zero, and what follows in memory stays untouched."""
    made = case(device, [max_len - 4 + beyond if beyond < 9 else max_len + beyond], 4, max_len=max_len)
    assert_parity(made)
    out = made.run()
    room = max(4 - beyond, 0)
    assert out[:room].any(dim=1).all()
    assert not out[room:].any()


def test_the_whole_head_may_turn_or_none_of_it(device: torch.device) -> None:
    for rotary in (0, 2, 16):
        made = case(device, [66], 3, rotary=max(rotary, 2))
        assert_parity(made if rotary else replace(made, rope=(made.rope[0][:, :0], made.rope[1][:, :0])))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter
def test_a_nan_stays_in_its_row(device: torch.device) -> None:
    """A later token's key, and every token's query and gate, are its own affair."""
    made = case(device, [126], 4)
    clean, (hq, hkv, d) = made.copy().run(), (4, 2, 16)
    made.merged[2, : (hq + hkv) * d] = torch.nan
    out = made.run()
    assert torch.equal(out[:2], clean[:2])
    assert out[2].isnan().all()


def test_the_layout_is_that_of_the_eager_model(device: torch.device) -> None:
    """`Attention.decode` on the same weights: the projection's order, the scales, RoPE, head groups and gate."""
    made = case(device, [9, 40], 3, heads=(4, 2), head_dim=16, rotary=4)
    config = tiny_config(num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=4, norm_eps=EPS)
    q, k, v, gate = (torch.randn(n * 16, config.hidden_size, device=device) / 7 for n in (4, 2, 2, 4))
    tensors = {
        "q_proj.weight": torch.cat([q.view(4, 16, -1), gate.view(4, 16, -1)], dim=1).flatten(0, 1),
        "k_proj.weight": k,
        "v_proj.weight": v,
        "o_proj.weight": torch.eye(64, device=device),  # what goes into it comes out
        "q_norm.weight": made.weights[0] - 1,
        "k_norm.weight": made.weights[1] - 1,
    }

    cache = KVCache(made.keys.shape[0], 2, made.keys.shape[2], 16, torch.float32, device)
    cache.keys.copy_(made.keys)
    cache.values.copy_(made.values)
    slots = [int(slot) for slot in made.slots]
    layout = Layout.of([(slot, int(made.length[slot]), 3) for slot in slots], device)
    x = torch.randn(layout.rows, config.hidden_size, device=device)
    rope = RopeTable(4, 10_000.0, made.keys.shape[2], device).at(layout.positions(device))
    eager = Attention(config, tensors, "", LinearFactory()).decode(x, rope, cache, layout)[:6]

    out = made.run(attend_reference, merged=(x @ torch.cat([q, k, v, gate]).T)[:6])
    torch.testing.assert_close(out, eager, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made.keys, cache.keys, atol=1e-5, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(made.values, cache.values, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    made = case(device, [5], 2)
    for changes in (
        {"window": 3},
        {"merged": made.merged[:, :-16]},
        {"values": made.values[:, :, :-1]},
        {"values": made.values.half()},
        {"keys": made.keys.transpose(2, 3).contiguous().transpose(2, 3)},
        {"rope": (made.rope[0][:-1], made.rope[1])},
    ):
        with pytest.raises(InputError):
            made.run(**changes)
    with pytest.raises(InputError, match="power of two"):
        case(device, [5], 2, head_dim=24).run()


def assert_same_bits(one: Case, other: Case) -> None:
    """Both caches, NaN where the other has NaN."""
    for mine, theirs in ((one.keys, other.keys), (one.values, other.values)):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0, equal_nan=True)
