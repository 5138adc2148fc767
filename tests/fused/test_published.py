"""A checkpoint stored in 8 bits through the fused pass and the fused prefill, its weights as they are in the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surefoot.config import MoEConfig
from surefoot.engine.target import DecoderTarget
from surefoot.kernels.fused.rows import Text
from surefoot.kernels.linear import LinearFactory, weights_of
from surefoot.kernels.quantise import Quantised
from surefoot.loading.checkpoint import load_checkpoint
from surefoot.loading.tiny import Style, tiny_config, write_checkpoint
from surefoot.model import Decoder, MTPHead, build_cache
from surefoot.model.bulk import read_blocks
from surefoot.model.fused import FusedModel
from surefoot.model.tensors import random_tensors
from surefoot.types import Window

TEXT = [3, 17, 29, 5, 11, 8]
FIRST, WINDOW = 3, 2


def write(path: Path, moe: bool, style: Style) -> Path:
    """One layer of each kind; more than one square along some axes."""
    kinds = ("linear_attention", "full_attention")
    config = tiny_config(moe, linear_value_dim=16, layer_types=kinds, vocab_size=40, hidden_size=144)
    config = replace(config, moe=MoEConfig(3, 2, 20, 136)) if moe else replace(config, ffn_width=136)
    return write_checkpoint(path, config, random_tensors(config, 0), style=style)


def build(folder: Path, device: torch.device, narrow: bool) -> tuple[Decoder, MTPHead]:
    found = load_checkpoint(folder, device=device, narrow=narrow)
    decoder = Decoder(found.config, found.tensors, 32, LinearFactory(pack=False))
    return decoder, MTPHead(decoder, found.tensors)


def text_of(model: FusedModel, position: int) -> Text:
    """The sequence in slot 1, known up to `position`, and what follows as drafts."""
    device = model.decoder.device
    model.progress.length[1] = position
    model.progress.tokens[1, : position + 1] = torch.tensor(TEXT[: position + 1])
    drafts = torch.tensor([(TEXT[position + 1 :] + [0] * WINDOW)[:WINDOW]], dtype=torch.int32, device=device)
    return Text(torch.ones(1, dtype=torch.int32, device=device), model.progress.length, model.progress.tokens, drafts)


def rows(model: FusedModel, window: int) -> torch.Tensor:
    """Logits of the positions from FIRST on, window by window."""
    model.prefill_cache.reset(1)
    hidden = model.decoder.prefill(TEXT[:FIRST], model.prefill_cache, 1)[-1]
    model.prefill_cache.finish(1)
    model.progress.start(1, TEXT[: FIRST + 1], hidden)
    logits = []
    for position in range(FIRST, FIRST + WINDOW, window):
        logits.append(model.score(text_of(model, position), window).clone())
        model.progress.replay[1] = window
    return torch.cat(logits)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_the_fused_pass(tmp_path: Path, device: torch.device, moe: bool) -> None:
    with torch.inference_mode():
        folder = write(tmp_path, moe, Style(weights="squares", experts="separate"))
        decoder, head = build(folder, device, narrow=True)
        model = FusedModel(decoder, head, 2, WINDOW)
        for block in (*decoder.blocks, head.block):
            assert isinstance(weights_of(block.mixer.in_proj)[0], Quantised)
            assert isinstance(weights_of(block.mixer.out_proj)[0], Quantised)
        assert [len(weights_of(block.mixer.in_proj)) for block in decoder.blocks] == [
            2,
            1,
        ]  # the decay's rows are whole

        target = DecoderTarget(build(folder, device, narrow=False)[0], 2)
        list(target.prefill(1, TEXT[:FIRST]))
        expected = target.verify([Window(1, tuple(TEXT[FIRST : FIRST + WINDOW]))])[0]
        found = rows(model, WINDOW)
        torch.testing.assert_close(found, expected.logits, rtol=1e-3, atol=1e-3)
        assert torch.equal(rows(model, 1), found)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_the_fused_prefill(tmp_path: Path, device: torch.device, moe: bool) -> None:
    with torch.inference_mode():
        folder = write(tmp_path, moe, Style(weights="squares"))
        decoder, head = build(folder, device, narrow=True)
        plain, plain_head = build(folder, device, narrow=False)
        results = []
        for each, top, fused in ((decoder, head, True), (plain, plain_head, False)):
            cache, lane = build_cache(each.config, 1, 32, torch.float32, device), top.build_lane(1)
            x = each.embed(torch.tensor(TEXT, device=device))
            y = top.fc.bulk(torch.cat([x, x], dim=-1))
            rope = each.rope.at(torch.arange(len(TEXT), device=device))
            for blocks, layers, stream in ((each.blocks, cache.layers, x), ([top.block], [lane], y)):
                if fused:
                    read_blocks(blocks, layers, stream, each.rope, 0, 0)
                    continue
                for block, layer in zip(blocks, layers, strict=True):
                    block.prefill(stream, rope, layer, 0, 0)
            results.append((x, y))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
