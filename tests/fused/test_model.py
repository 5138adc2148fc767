"""The fused decode pass against the plain one."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from surefoot.config import ModelConfig
from surefoot.engine.target import DecoderTarget
from surefoot.kernels.fused.rows import Text
from surefoot.kernels.linear import LinearFactory
from surefoot.loading.tiny import tiny_config
from surefoot.model import Decoder, DraftHead, MTPHead
from surefoot.model.fused import FusedModel
from surefoot.model.spans import Layout
from surefoot.model.tensors import random_tensors
from surefoot.types import Window

WINDOW = 4
MAX_LEN = 96
KINDS = pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])


def small(moe: bool) -> ModelConfig:
    """One layer of each kind, few tokens: the interpreter is slow."""
    kinds = ("linear_attention", "full_attention")
    return tiny_config(moe=moe, linear_value_dim=16, layer_types=kinds, vocab_size=40)


def build(config: ModelConfig, device: torch.device, quantise: bool = False) -> tuple[FusedModel, DecoderTarget]:
    tensors = random_tensors(config, 0, device)
    decoder = Decoder(config, tensors, MAX_LEN, LinearFactory(pack=False, quantise=quantise))
    head = MTPHead(decoder, tensors) if config.mtp_layers else None
    return FusedModel(decoder, head, 2, WINDOW), DecoderTarget(decoder, 2)


def start(model: FusedModel, slot: int, prompt: list[int]) -> None:
    model.prefill_cache.reset(slot)
    hidden = None
    if len(prompt) > 1:
        hidden = model.decoder.prefill(prompt[:-1], model.prefill_cache, slot)[-1]
    model.prefill_cache.finish(slot)
    model.progress.start(slot, prompt, hidden)


def window_text(model: FusedModel, slots: list[int], drafts: list[list[int]]) -> Text:
    device = model.decoder.device
    table = torch.tensor(slots, dtype=torch.int32, device=device)
    return Text(table, model.progress.length, model.progress.tokens,
                torch.tensor(drafts, dtype=torch.int32, device=device))  # fmt: skip


@KINDS
@pytest.mark.parametrize("prompt_length, quantise", [(1, False), (3, False), (50, False), (3, True)])
def test_windows_agree_with_the_plain_model(
    device: torch.device, prompt_length: int, quantise: bool, moe: bool
) -> None:
    config = small(moe)
    with torch.inference_mode():
        model, target = build(config, device, quantise)
        generator = torch.Generator().manual_seed(prompt_length)
        text = torch.randint(0, config.vocab_size, (prompt_length + 20,), generator=generator).tolist()
        start(model, 1, text[:prompt_length])
        list(target.prefill(1, text[: prompt_length - 1]))
        position = prompt_length - 1
        for keep in (1, 3, 2, 4):
            drafts = text[position + 1 : position + WINDOW]
            expected = target.verify([Window(1, tuple(text[position : position + WINDOW]))])[0]
            found = model.score(window_text(model, [-1, 1], [[-1] * 3, drafts]), WINDOW)[WINDOW:]
            torch.testing.assert_close(found, expected.logits, rtol=1e-3, atol=1e-3)
            assert expected.hidden is not None
            torch.testing.assert_close(
                model.progress.hidden[1, ring(model, position, WINDOW)], expected.hidden, rtol=1e-3, atol=1e-3
            )
            target.commit(1, keep)
            position += keep
            model.progress.length[1] = position
            model.progress.tokens[1, : position + 1] = torch.tensor(text[: position + 1])
            model.progress.replay[1] = keep


@pytest.mark.parametrize("quantise", [False, True], ids=["whole", "8 bits"])
@KINDS
def test_window_rows_are_single_rows(device: torch.device, moe: bool, quantise: bool) -> None:
    config = small(moe)
    with torch.inference_mode():
        model, _ = build(config, device, quantise)
        text = torch.randint(0, config.vocab_size, (24,), generator=torch.Generator().manual_seed(1)).tolist()
        results = []
        for window in (1, 2, 4):
            start(model, 0, text[:12])
            rows = []
            for position in range(11, 19, window):
                model.progress.tokens[0, : position + 1] = torch.tensor(text[: position + 1])
                drafts = text[position + 1 : position + 4] + [0] * 3
                rows.append(model.score(window_text(model, [0], [drafts[:3]]), window).clone())
                model.progress.length[0] += window
                model.progress.replay[0] = window
            results.append(torch.cat(rows))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@KINDS
def test_drafts_agree_with_the_plain_head(device: torch.device, moe: bool) -> None:
    config = small(moe)
    with torch.inference_mode():
        model, _ = build(config, device)
        head, decoder = model.head, model.decoder
        assert head is not None
        generator = torch.Generator().manual_seed(2)
        text = torch.randint(0, config.vocab_size, (20,), generator=generator).tolist()
        hidden = torch.randn(20, config.hidden_size, generator=generator).to(device)
        lane = head.build_lane(2)
        position = 0
        for fresh in (2, 4, 1, 7):  # hidden states of positions that the target has read since the head last ran
            model.progress.hidden[1, ring(model, position, fresh)] = hidden[position : position + fresh]
            model.progress.laned[1] = position
            known = position + fresh  # the last emitted token's index
            model.progress.length[1] = known
            model.progress.tokens[1, : known + 1] = torch.tensor(text[: known + 1])
            drafts = window_text(model, [-1, 1], [[-1] * 3, text[known + 1 : known + 4]])
            began = torch.tensor([0, known], dtype=torch.int32, device=device)
            if fresh > WINDOW:
                model.fill_lane(drafts)
                assert int(model.progress.laned[1]) == position + WINDOW
            found = model.draft_first(drafts, model.progress.length - model.progress.laned, WINDOW)[1].clone()
            model.progress.laned[1] = known
            states = head.decode(
                hidden[position:known], text[position + 1 : known + 1], lane, layout_of(position, fresh, device)
            )
            state = states[fresh - 1 : fresh]
            torch.testing.assert_close(found, decoder.logits(state.repeat(2, 1))[0], rtol=1e-3, atol=1e-3)
            for step in range(2):
                began[1] = known + step
                found = model.draft_next(drafts, began)[1].clone()
                token = text[known + 1 + step]
                state = head.decode(state, [token], lane, layout_of(known + step, 1, device))[:1]
                torch.testing.assert_close(found, decoder.logits(state.repeat(2, 1))[0], rtol=1e-3, atol=1e-3)
            position = known


@pytest.mark.parametrize("ids, quantise", [([3], False), ([0, 2, 39], True)])
@torch.inference_mode()
def test_a_draft_head_gives_its_tokens_logits(device: torch.device, ids: list[int], quantise: bool) -> None:
    model, _ = build(small(False), device, quantise)
    start(model, 0, [1, 2, 3])
    start(model, 1, [4, 5])
    text, began = window_text(model, [0, 1], [[5] * 3] * 2), model.progress.length
    draft_head, chained = DraftHead(model.decoder, ids), model._chained
    waiting = torch.ones_like(began)
    for draft in (partial(model.draft_first, text, waiting, WINDOW), partial(model.draft_next, text, began)):
        before = chained.clone()
        whole = draft().clone()
        chained.copy_(before)
        found = draft(draft_head=draft_head)
        assert found.shape == (2, len(ids))
        torch.testing.assert_close(found, whole[:, ids], rtol=1e-4, atol=1e-4)


def ring(model: FusedModel, position: int, count: int) -> list[int]:
    """Rows of `progress.hidden` of so many positions."""
    return [place % model.progress.hidden.shape[1] for place in range(position, position + count)]


def layout_of(position: int, count: int, device: torch.device) -> Layout:
    return Layout.of([(1, position, count)], device)
