"""The fused decode pass against the plain one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.config import ModelConfig
from surefoot.engine.target import DecoderTarget
from surefoot.kernels.fused.rows import Text
from surefoot.kernels.linear import LinearFactory
from surefoot.loading.tiny import tiny_config
from surefoot.model import Decoder, MTPHead
from surefoot.model.fused import FusedModel
from surefoot.model.tensors import random_tensors
from surefoot.types import Window

WINDOW = 4


def build(config: ModelConfig, device: torch.device) -> tuple[FusedModel, DecoderTarget]:
    tensors = random_tensors(config, 0, device)
    decoder = Decoder(config, tensors, 256, LinearFactory(pack=False))
    head = MTPHead(decoder, tensors) if config.mtp_layers else None
    return FusedModel(decoder, head, 2, WINDOW), DecoderTarget(decoder, 2)


def start(model: FusedModel, slot: int, prompt: list[int]) -> None:
    model.prefill_cache.reset(slot)
    hidden = None
    if len(prompt) > 1:
        hidden = model.decoder.prefill(prompt[:-1], model.prefill_cache, slot)[-1]
    model.prefill_cache.finish(slot)
    model.progress.start(slot, prompt, 256, hidden)


def window_text(model: FusedModel, slots: list[int], drafts: list[list[int]]) -> Text:
    device = model.decoder.device
    table = torch.tensor(slots, dtype=torch.int32, device=device)
    return Text(table, model.progress.length, model.progress.tokens,
                torch.tensor(drafts, dtype=torch.int32, device=device))  # fmt: skip


@pytest.mark.parametrize("prompt_length", [1, 2, 3, 50])
def test_windows_agree_with_the_plain_model(device: torch.device, prompt_length: int) -> None:
    config = tiny_config(linear_value_dim=16)
    with torch.inference_mode():
        model, target = build(config, device)
        generator = torch.Generator().manual_seed(prompt_length)
        text = torch.randint(0, config.vocab_size, (prompt_length + 20,), generator=generator).tolist()
        start(model, 1, text[:prompt_length])
        list(target.prefill(1, text[: prompt_length - 1]))
        position = prompt_length - 1
        for keep in (1, 3, 2, 4, 1):
            drafts = text[position + 1 : position + WINDOW]
            expected = target.verify([Window(1, tuple(text[position : position + WINDOW]))])[0]
            found = model.score(window_text(model, [-1, 1], [[-1] * 3, drafts]), WINDOW)[WINDOW:]
            torch.testing.assert_close(found, expected.logits, rtol=1e-3, atol=1e-3)
            assert expected.hidden is not None
            torch.testing.assert_close(model.progress.hidden[1], expected.hidden, rtol=1e-3, atol=1e-3)
            target.commit(1, keep)
            position += keep
            model.progress.length[1] = position
            model.progress.tokens[1, : position + 1] = torch.tensor(text[: position + 1])
            model.progress.replay[1] = keep


def bits(tensor: Tensor) -> Tensor:
    return tensor.clone()


def test_window_rows_are_single_rows(device: torch.device) -> None:
    config = tiny_config(linear_value_dim=16)
    with torch.inference_mode():
        model, _ = build(config, device)
        text = torch.randint(0, config.vocab_size, (24,), generator=torch.Generator().manual_seed(1)).tolist()
        results = []
        for window in (1, 3, 4):
            start(model, 0, text[:12])
            rows = []
            for position in range(11, 23, window):
                model.progress.tokens[0, : position + 1] = torch.tensor(text[: position + 1])
                drafts = text[position + 1 : position + 4] + [0] * 3
                rows.append(bits(model.score(window_text(model, [0], [drafts[:3]]), window)))
                model.progress.length[0] += window
                model.progress.replay[0] = window
            results.append(torch.cat(rows))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
