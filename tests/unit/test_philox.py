import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import InputError
from surefoot.verify.philox import Purpose, _rounds, gumbel, philox, uniforms

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox(counter, key) == expected
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), key)) == expected
    even, odd = _rounds(torch.stack((c0, c2)), torch.stack((c3, c1)), key)
    assert (*even[:, 0].tolist(), *odd[:, 0].tolist()) == (expected[0], expected[2], expected[3], expected[1])


word = st.integers(0, ONES)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(word, word, word, word), min_size=1, max_size=5), word, word)
def test_vectorised_equals_the_definition(counters: list[tuple[int, int, int, int]], k0: int, k1: int) -> None:
    expected = [philox(counter, (k0, k1)) for counter in counters]
    c0, c1, c2, c3 = torch.tensor(counters).unbind(1)
    assert torch.stack(philox((c0, c1, c2, c3), (k0, k1)), 1).tolist() == [list(words) for words in expected]
    even, odd = _rounds(torch.stack((c0, c2)), torch.stack((c3, c1)), (k0, k1))
    assert torch.stack((even[0], odd[1], even[1], odd[0]), 1).tolist() == [list(words) for words in expected]


def test_philox_broadcasts() -> None:
    zero = torch.tensor(0)
    words = philox((torch.arange(3), torch.arange(2)[:, None], zero, zero), (1, 2))
    assert words[0].shape == (2, 3)
    assert int(words[3][1, 2]) == philox((2, 1, 0, 0), (1, 2))[3]


def test_uniforms_are_built_from_the_documented_counter() -> None:
    seed, position, start = 2**63 + 12345, 77, 70
    w0, w1, _, _ = philox((0, position, int(Purpose.DRAFT), start), (seed & ONES, seed >> 32))
    expected = ((w0 << 20 | w1 >> 12) + 0.5) / 2**52
    assert uniforms(seed, [position], Purpose.DRAFT, start).item() == expected


def test_gumbel_is_built_from_the_documented_counter() -> None:
    seed, position = 2**40 + 3, 9
    noise = gumbel(seed, [position], 10)[0].tolist()
    for token in range(10):
        words = philox((token // 4, position, int(Purpose.COUPLING), 0), (seed & ONES, seed >> 32))
        x = (words[token % 4] + 0.5) / 2**32
        assert noise[token] == pytest.approx(-math.log(-math.log1p(-x)), rel=1e-5, abs=1e-6)


def test_uniforms_are_inside_the_open_interval_with_the_right_moments() -> None:
    u = uniforms(5, range(30_000), Purpose.ACCEPT)
    assert u.dtype == torch.float64
    assert u.min() > 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * len(u))
    counts = torch.histc(u, 100, 0, 1)
    chi2 = float(((counts - 300) ** 2 / 300).sum())
    assert chi2 < 99 + 5 * math.sqrt(2 * 99)


@pytest.mark.parametrize("extreme", [0, ONES])
def test_the_extreme_words_stay_inside(extreme: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def words(*_: object) -> tuple[int, int, int, int]:
        return (extreme,) * 4

    def rounds(even: torch.Tensor, odd: torch.Tensor, _: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(even, extreme), torch.full_like(odd, extreme)

    monkeypatch.setattr("surefoot.verify.philox.philox", words)
    monkeypatch.setattr("surefoot.verify.philox._rounds", rounds)
    assert 0 < uniforms(1, [1], Purpose.LAST).item() < 1
    noise = gumbel(1, [1], 3)
    assert noise.isfinite().all()
    assert noise.min() > -2.9
    assert noise.max() < 22.9


def test_gumbel_has_its_law() -> None:
    noise = gumbel(3, range(500), 400).flatten().double()
    n = len(noise)
    assert abs(noise.mean() - 0.5772156649) < 5 * math.pi / math.sqrt(6 * n)
    cdf = torch.exp(-torch.exp(-noise.sort().values))  # uniform if the law is right
    distance = (cdf - torch.arange(n).double() / n).abs().max()
    assert distance < 2.3 / math.sqrt(n)


@pytest.mark.parametrize("vocab_size", [1, 5, 33, 8191, 10_001])
def test_a_row_has_the_same_bits_alone_and_in_company(vocab_size: int) -> None:
    together = gumbel(9, range(100, 107), vocab_size)
    assert together.shape == (7, vocab_size)
    for row in range(7):
        assert torch.equal(together[row], gumbel(9, [100 + row], vocab_size)[0])
    shorter = max(1, vocab_size // 2)
    assert torch.equal(together[:, :shorter], gumbel(9, range(100, 107), shorter))
    several = uniforms(9, range(100, 107), Purpose.ACCEPT)
    assert several.tolist() == [uniforms(9, [100 + row], Purpose.ACCEPT).item() for row in range(7)]


def test_purposes_seeds_positions_and_starts_are_independent() -> None:
    """Pairs of streams fill the unit square evenly."""
    n = 15_000
    streams = [uniforms(7, range(n), purpose) for purpose in Purpose]
    streams += [uniforms(8, range(n), Purpose.DRAFT), uniforms(7 + 2**32, range(n), Purpose.DRAFT)]
    streams += [uniforms(7, range(1, n + 1), Purpose.DRAFT), uniforms(7, range(n), Purpose.DRAFT, start=1)]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            cell = (one * 8).long() * 8 + (other * 8).long()
            counts = torch.bincount(cell, minlength=64).double()
            assert float(((counts - n / 64) ** 2 / (n / 64)).sum()) < 63 + 6 * math.sqrt(2 * 63)


def test_a_shared_key_would_be_noticed() -> None:
    """Negative control of the test above."""
    u = uniforms(7, range(1000), Purpose.ACCEPT)
    cell = (u * 8).long() * 9
    counts = torch.bincount(cell, minlength=64).double()
    assert float(((counts - 1000 / 64) ** 2 / (1000 / 64)).sum()) > 63 + 6 * math.sqrt(2 * 63)


def test_positions_must_fit_the_counter() -> None:
    assert uniforms(1, [2**32 - 1], Purpose.ACCEPT).shape == (1,)
    assert uniforms(1, [], Purpose.ACCEPT).shape == (0,)
    with pytest.raises(InputError, match="positions: expected 0 to 4294967295, found -1"):
        gumbel(1, [-1], 4)
    with pytest.raises(InputError, match="found 4294967296"):
        uniforms(1, range(2**32, 2**32 + 1), Purpose.ACCEPT)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: uniforms("a", [1], Purpose.ACCEPT), "seed: expected an integer"),  # type: ignore[arg-type]
        (lambda: uniforms(2**64, [1], Purpose.ACCEPT), "seed: expected an integer"),
        (lambda: uniforms(1, 5, Purpose.ACCEPT), "positions: expected a list of integers, found 5"),  # type: ignore[arg-type]
        (lambda: uniforms(1, ["a"], Purpose.ACCEPT), "positions: .*found 'a'"),  # type: ignore[list-item]
        (lambda: uniforms(1, [1.5], Purpose.ACCEPT), "positions: .*found 1.5"),  # type: ignore[list-item]
        (lambda: uniforms(1, [1], 9), "purpose: expected a Purpose, found 9"),  # type: ignore[arg-type]
        (lambda: uniforms(1, [1], Purpose.DRAFT, start=-1), "start: expected an integer"),
        (lambda: gumbel(1, [1], 0), "vocab_size: expected an integer of at least 1"),
        (lambda: gumbel(1, [1], 2.5), "vocab_size: .*found 2.5"),  # type: ignore[arg-type]
        (lambda: gumbel(1, [1], 2**60), "vocab_size: .*at most 17179869184"),
    ],
)
def test_wrong_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
