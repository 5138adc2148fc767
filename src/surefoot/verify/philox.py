"""Randomness as a pure function: Philox4x32-10 in plain torch integer operations, on any device.

Every random number is keyed by (request seed, position, purpose), so it does not depend on the order of the calls, on
the draft length, on the batch, or on the device. Philox is a counter-based generator, built for exactly that: Salmon,
Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3 and its table of constants.
The key is the seed's two 32-bit words, the counter is (block, position, purpose, start).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import IntEnum
from numbers import Integral
from typing import TypeVar

import torch
from torch import Tensor

from surefoot.errors import InputError, shown
from surefoot.sampling import MAX_SEED, require_int

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Word = TypeVar("Word", int, Tensor)


class Purpose(IntEnum):
    """What a random number is for. Numbers of different purposes are independent, whatever else they share."""

    COUPLING = 0
    """Gumbel noise of every token, the same for target and drafter (coupled acceptance)."""
    DRAFT = 1
    """A drafter's own draw from its distribution (rejection acceptance)."""
    ACCEPT = 2
    """The uniform that a draft token's p/q is compared with."""
    LAST = 3
    """The draw from the residual distribution, or of the bonus token."""


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 as the paper states it, on Python integers or on int64 tensors that broadcast to one shape.

    Words are 32 bits wide. A product of two may overflow int64; its low 64 bits are right all the same, and the sign
    that the arithmetic shift drags in is masked away. Tested against the known answers published with Random123.
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in _round_keys(key):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) ^ c1 ^ k0) & _MASK, p1 & _MASK, ((p0 >> 32) ^ c3 ^ k1) & _MASK, p0 & _MASK
    return c0, c1, c2, c3


def uniforms(
    seed: int, positions: Seq[int], purpose: Purpose, start: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """One uniform number per position: float64 [n], strictly between 0 and 1.

    A number is (k + 1/2) / 2^52 with k of 52 bits out of two words. That is exact in float64, symmetric around 1/2, and
    at least 2^-53 away from 0 and from 1: u < p/q keeps a token of p >= q always and one of p = 0 never, and u * total
    stays inside the range of a cumulative sum. `start` tells apart draws for one position in several windows.

    Raises InputError if a position does not fit 32 bits, or for what is no seed.
    """
    _check_key(seed, positions)
    require_int("start", start, low=0, high=_MASK)
    if not isinstance(purpose, Purpose):
        raise InputError(f"purpose: expected a Purpose, found {shown(purpose)}")
    # A window needs a handful of these; Python integers make them faster than a hundred tensor operations would.
    words = [philox((0, int(position), int(purpose), start), _key(seed)) for position in positions]
    return torch.tensor(
        [((first << 20 | second >> 12) + 0.5) * 2.0**-52 for first, second, _, _ in words],
        dtype=torch.float64,
        device=device,
    )


def gumbel(seed: int, positions: Seq[int], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise of every token at every position: float32 [n, V], purpose COUPLING.

    Token v uses word v % 4 of block v // 4, so the noise of a token does not depend on the size of the vocabulary, nor
    a row on the rows beside it. From a word w it is -log(-log(1 - x)) with x = (w + 1/2) / 2^32 in float32. A maximum
    is decided by large noise, that is by small x, and there float32 keeps all 32 bits of the word; written as
    -log(-log(x)) it would keep 24, too few to rank 248,320 tokens. Near 1, x is capped at 1 - 2^-24, the largest
    float32 below 1, so the noise is finite: between -2.9 and 22.9.

    Raises InputError if a position does not fit 32 bits, or for what is no seed.
    """
    _check_key(seed, positions)
    require_int("vocab_size", vocab_size, low=1, high=4 << 32)  # four tokens a block, which is a word of the counter
    blocks = (vocab_size + 3) // 4
    even = torch.empty(2, len(positions), blocks, dtype=torch.int64, device=device)
    even[0] = torch.arange(blocks, device=device)
    even[1] = int(Purpose.COUPLING)
    odd = torch.zeros_like(even)
    if isinstance(positions, range):  # made on the device, without a copy from the host
        odd[1] = torch.arange(positions.start, positions.stop, positions.step, device=device)[:, None]
    else:
        odd[1] = torch.tensor(positions, device=device)[:, None]
    even, odd = _rounds(even, odd, _key(seed))
    noise = torch.empty(len(positions), blocks, 4, dtype=torch.float32, device=device)
    noise[..., 0::2] = even.movedim(0, -1)
    noise[..., 1::2] = odd.flip(0).movedim(0, -1)
    noise = noise.view(len(positions), 4 * blocks)  # [n, V rounded up to blocks]
    noise.mul_(-(2.0**-32)).sub_(2.0**-33).clamp_(min=2.0**-24 - 1)  # -x
    return noise.log1p_().neg_().log_().neg_()[:, :vocab_size]


def _rounds(even: Tensor, odd: Tensor, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`philox` for many counters: their words (0, 2) and their words (3, 1), int64 [2, ...] each, both overwritten.

    Half as many operations as `philox`, since each handles two words. The odd words stand in reverse because each of
    them meets the product of the other pair; they keep their high half until the end, as it never reaches a product.
    Three buffers take turns, since fresh memory for every operation costs more than the arithmetic.
    """
    shape = (-1, 2) + (1,) * (even.dim() - 1)
    reversed_keys = [(k1, k0) for k0, k1 in _round_keys(key)]
    factors, *keys = torch.tensor([_MULTIPLIERS, *reversed_keys], device=even.device).view(shape).unbind()
    product = torch.empty_like(even)
    for words in keys:
        torch.mul(even, factors, out=product)
        torch.bitwise_right_shift(product, 32, out=even)
        even ^= odd
        even ^= words  # the new words (2, 0), to be masked and put in order
        torch.bitwise_and(even[1], _MASK, out=odd[0])
        torch.bitwise_and(even[0], _MASK, out=odd[1])
        even, odd, product = odd, product, even
    return even, odd & _MASK


def _round_keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    return [((key[0] + i * _KEY_STEPS[0]) & _MASK, (key[1] + i * _KEY_STEPS[1]) & _MASK) for i in range(_ROUNDS)]


def _key(seed: int) -> tuple[int, int]:
    return seed & _MASK, seed >> 32 & _MASK


def _check_key(seed: int, positions: Seq[int]) -> None:
    require_int("seed", seed, low=0, high=MAX_SEED)
    if not isinstance(positions, Seq):
        raise InputError(f"positions: expected a list of integers, found {shown(positions)}")
    for position in [*positions[:1], *positions[-1:]] if isinstance(positions, range) else positions:
        if not isinstance(position, Integral) or not 0 <= int(position) <= _MASK:
            raise InputError(f"positions: expected 0 to {_MASK}, found {shown(position)}")
