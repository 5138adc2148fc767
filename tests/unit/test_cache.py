"""The caches' protocol: what is refused, what is settled, what a snapshot brings back."""

from __future__ import annotations

import pytest
import torch

from surefoot.cache import HybridCache
from surefoot.cache.recurrent import MAX_WINDOW, STRIP_ROWS
from surefoot.engine.target import DecoderTarget
from surefoot.errors import InputError
from surefoot.loading.tiny import tiny_config
from surefoot.model import Decoder, build_cache
from surefoot.model.tensors import random_tensors
from surefoot.types import Window


def make_target(slots: int = 2, max_len: int = 512) -> DecoderTarget:
    config = tiny_config()
    return DecoderTarget(Decoder(config, random_tensors(config, seed=0), max_len), slots)


def make_cache() -> HybridCache:
    return build_cache(tiny_config(), 2, 64, torch.float32, torch.device("cpu"))


def test_protocol_errors_change_nothing() -> None:
    cache = make_cache()
    with pytest.raises(InputError, match="slot: expected 0 to 1, found 2"):
        cache.open_window(2, 1)
    with pytest.raises(InputError, match="slot: expected 0 to 1, found -1"):
        cache.reset(-1)
    for width in (0, MAX_WINDOW + 1):
        with pytest.raises(InputError, match=f"found {width}"):
            cache.open_window(0, width)
    with pytest.raises(InputError, match="expected 1 to 0 tokens, found 1"):
        cache.commit(0, 1)
    cache.open_window(0, 3)
    for keep in (0, 4, -1):
        with pytest.raises(InputError, match=f"expected 1 to 3 tokens, found {keep}"):
            cache.commit(0, keep)
    with pytest.raises(InputError, match="expected a commit first"):
        cache.open_window(0, 1)
    with pytest.raises(InputError, match="expected a commit first"):
        cache.snapshot(0)
    cache.commit(0, 2)
    assert cache.length == [2, 0]


@torch.inference_mode()
def test_a_window_past_the_context_is_refused_before_anything_is_read() -> None:
    target = make_target(max_len=16)
    list(target.prefill(0, list(range(14))))
    with pytest.raises(InputError, match="expected at most 16 positions, found 17"):
        target.verify([Window(1, (1,)), Window(0, (1, 2, 3))])
    assert len(target.verify([Window(0, (1, 2))])) == 1  # neither slot was left open
    assert len(target.verify([Window(1, (1, 2))])) == 1


@torch.inference_mode()
def test_the_strip_starts_over_without_a_trace() -> None:
    """More convolution inputs than the strip has rows, in windows of every width."""
    ours, alone = make_target(), make_target()
    tokens = [i * 7 % 260 for i in range(STRIP_ROWS + 150)]
    done, width = 0, 1
    while done + width <= len(tokens):
        keep = 1 + done % width
        ours.verify([Window(1, tuple(tokens[done : done + width]))])
        ours.commit(1, keep)
        done += keep
        width = width % 9 + 1
    for token in tokens[:done]:
        scores = alone.verify([Window(0, (token,))])
        alone.commit(0, 1)
    assert torch.equal(ours.verify([Window(1, (5,))])[0].logits, alone.verify([Window(0, (5,))])[0].logits)
    assert torch.isfinite(scores[0].logits).all()


@torch.inference_mode()
def test_rewind_returns_to_the_mark_bit_for_bit() -> None:
    target = make_target()
    list(target.prefill(0, [1, 2, 3, 4]))
    target.mark(0)
    before = target.verify([Window(0, (5, 6))])[0].logits
    target.commit(0, 2)
    target.verify([Window(0, (7, 8, 9))])
    target.commit(0, 2)
    for _ in range(2):
        target.rewind(0)
        assert torch.equal(target.verify([Window(0, (5, 6))])[0].logits, before)
        target.commit(0, 1)


@torch.inference_mode()
def test_one_slot_never_touches_another() -> None:
    target = make_target()
    list(target.prefill(0, [1, 2, 3]))
    list(target.prefill(1, [1, 2, 3]))
    target.verify([Window(0, (9, 9, 9))])
    target.commit(0, 1)
    target.release(0)
    list(target.prefill(0, [4] * 20))
    fresh = make_target()
    list(fresh.prefill(1, [1, 2, 3]))
    assert torch.equal(target.verify([Window(1, (4,))])[0].logits, fresh.verify([Window(1, (4,))])[0].logits)


def test_bytes_per_slot() -> None:
    cache, config = make_cache(), tiny_config()
    state = config.linear_value_heads * config.linear_key_dim * config.linear_value_dim * 4
    strip = STRIP_ROWS * config.conv_channels * 4
    kv = 2 * config.num_kv_heads * 64 * config.head_dim * 4
    assert cache.bytes_per_slot == 3 * (2 * state + strip) + kv
