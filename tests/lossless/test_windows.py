"""The promise under token-exactness: a verify window gives every row the bits that single steps give, whatever else is
in the window or in other slots, and accepting n tokens leaves the very state of a run that saw only those.

Random small models of awkward sizes, in every dtype, several sequences at once, several windows in a row.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from surefoot.config import LayerType, ModelConfig, MoEConfig
from surefoot.engine.target import DecoderTarget
from surefoot.loading.tiny import tiny_config
from surefoot.model import Decoder
from surefoot.model.tensors import random_tensors
from surefoot.prove.subject import state_of
from surefoot.types import Window
from tests.fakes import DEVICES

SLOTS, LENGTH = 3, 60
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_config(dice: random.Random) -> ModelConfig:
    kinds: list[LayerType] = ["linear_attention", "full_attention"]
    key_heads, kv_heads, head_dim = dice.choice([1, 2, 3]), dice.choice([1, 2]), dice.choice([8, 16, 20, 32])
    moe = dice.random() < 0.3
    return replace(
        tiny_config(),
        vocab_size=dice.choice([50, 101, 256]),
        hidden_size=dice.choice([20, 32, 48, 100, 256]),
        layer_types=tuple(dice.choice(kinds) for _ in range(dice.choice([2, 3, 4]))),
        num_heads=kv_heads * dice.choice([1, 2, 3]),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim // 2,
        linear_key_heads=key_heads,
        linear_value_heads=key_heads * dice.choice([1, 2, 3]),
        linear_key_dim=dice.choice([4, 8, 12, 32]),
        linear_value_dim=dice.choice([4, 8, 20, 32]),
        ffn_width=None if moe else dice.choice([33, 64, 70, 704]),
        moe=MoEConfig(6, 2, 24, 30) if moe else None,
        tied=dice.random() < 0.5,
    )


def random_decoder(seed: int, dtype: torch.dtype, device: str = "cpu") -> Decoder:
    config = random_config(random.Random(seed))
    kept = (".A_log", ".dt_bias", ".linear_attn.norm.weight")
    tensors = {n: t if n.endswith(kept) else t.to(dtype) for n, t in random_tensors(config, seed, device).items()}
    return Decoder(config, tensors, max_len=128)


def plain(target: DecoderTarget, prompt: list[int], tokens: list[int]) -> list[Tensor]:
    """Logits [V] after each token, one token a step, alone in slot 0."""
    list(target.prefill(0, prompt))
    rows = []
    for token in tokens:
        rows.append(target.verify([Window(0, (token,))])[0].logits[0])
        target.commit(0, 1)
    return rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(14))
@torch.inference_mode()
def test_windows_equal_single_steps(seed: int, dtype: torch.dtype, device: str) -> None:
    dice = random.Random(1000 + seed)
    decoder = random_decoder(seed, dtype, device)
    vocab = decoder.config.vocab_size
    target, alone = DecoderTarget(decoder, SLOTS), DecoderTarget(decoder, 1)
    tokens = [[dice.randrange(vocab) for _ in range(LENGTH)] for _ in range(SLOTS)]
    start = [dice.randrange(20) for _ in range(SLOTS)]
    expected = [plain(alone, tokens[s][: start[s]], tokens[s][start[s] :]) for s in range(SLOTS)]
    done = start.copy()
    for slot in range(SLOTS):
        list(target.prefill(slot, tokens[slot][: start[slot]]))
    for _ in range(8):
        active = [s for s in range(SLOTS) if dice.random() < 0.8 and done[s] + 9 <= LENGTH]
        keeps, windows = [], []
        for slot in active:
            width = dice.randint(1, 9)
            keeps.append(dice.randint(1, width))
            draft = [dice.randrange(vocab) for _ in range(width - keeps[-1])]
            windows.append(Window(slot, (*tokens[slot][done[slot] : done[slot] + keeps[-1]], *draft)))
        if not windows:
            continue
        for slot, keep, scores in zip(active, keeps, target.verify(windows), strict=True):
            for row in range(keep):
                assert torch.equal(scores.logits[row], expected[slot][done[slot] - start[slot] + row])
            target.commit(slot, keep)
            done[slot] += keep
    for slot in range(SLOTS):
        plain(alone, tokens[slot][: start[slot]], tokens[slot][start[slot] : done[slot]])
        for (_, ours), (_, reference) in zip(state_of(target, slot), state_of(alone, 0), strict=True):
            assert torch.equal(ours, reference)


@pytest.mark.parametrize("keep", range(1, 10))
@torch.inference_mode()
def test_every_accept_count_leaves_the_plain_state(keep: int) -> None:
    """Two windows of nine in a row, the same count kept of each (cases 20 and 22)."""
    decoder = random_decoder(3, torch.bfloat16)
    target, alone = DecoderTarget(decoder, 1), DecoderTarget(decoder, 1)
    tokens = [(7 * i) % decoder.config.vocab_size for i in range(30)]
    list(target.prefill(0, tokens[:5]))
    for begin in (5, 5 + keep):
        window = (*tokens[begin : begin + keep], *[1] * (9 - keep))
        target.verify([Window(0, window)])
        target.commit(0, keep)
    plain(alone, tokens[:5], tokens[5 : 5 + 2 * keep])
    for (_, ours), (_, reference) in zip(state_of(target, 0), state_of(alone, 0), strict=True):
        assert torch.equal(ours, reference)


@torch.inference_mode()
def test_a_stale_state_is_noticed() -> None:
    """Negative control: committing one token fewer than was kept must not pass for the plain state."""
    decoder = random_decoder(3, torch.float32)
    target, alone = DecoderTarget(decoder, 1), DecoderTarget(decoder, 1)
    list(target.prefill(0, [1, 2, 3]))
    target.verify([Window(0, (4, 5, 6))])
    target.commit(0, 2)
    plain(alone, [1, 2, 3], [4, 5, 6])
    assert not all(
        ours.shape == reference.shape and torch.equal(ours, reference)
        for (_, ours), (_, reference) in zip(state_of(target, 0), state_of(alone, 0), strict=True)
    )


@torch.inference_mode()
def test_rows_do_not_see_later_drafts() -> None:
    """Case 24: changing draft j leaves the logits of rows before it as they are, bit for bit."""
    decoder = random_decoder(5, torch.bfloat16)
    target = DecoderTarget(decoder, 1)
    outputs = []
    for last in (1, 2):
        list(target.prefill(0, [3, 1, 4, 1, 5]))
        outputs.append(target.verify([Window(0, (9, 2, 6, last))])[0].logits)
    assert torch.equal(outputs[0][:3], outputs[1][:3])
    assert not torch.equal(outputs[0][3], outputs[1][3])


@torch.inference_mode()
def test_prefill_does_not_depend_on_the_slot_or_its_past() -> None:
    decoder = random_decoder(8, torch.float32)
    target = DecoderTarget(decoder, 3)
    prompt = list(range(40))
    list(target.prefill(1, [5] * 17))
    target.verify([Window(1, (1, 2, 3))])  # left open: an abandoned window
    for slot in (0, 1, 2):
        list(target.prefill(slot, prompt))
    for slot in (1, 2):
        for (_, ours), (_, reference) in zip(state_of(target, slot), state_of(target, 0), strict=True):
            assert torch.equal(ours, reference)
