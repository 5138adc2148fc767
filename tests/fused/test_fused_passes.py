"""Single passes of the fused model, as the benchmark compares and times them."""

from __future__ import annotations

import pytest
import torch

from surefoot.bench.fused import FusedPasses
from surefoot.bench.lossless import NotLosslessError, check_windows
from surefoot.bench.prompts import random_prompts
from surefoot.bench.turns import take_turns
from surefoot.kernels.fused.rows import Text
from surefoot.kernels.linear import LinearFactory
from surefoot.loading.tiny import tiny_config
from surefoot.model import Decoder, MTPHead
from surefoot.model.fused import FusedModel
from surefoot.model.tensors import random_tensors

CONFIG = tiny_config(linear_value_dim=16, layer_types=("linear_attention", "full_attention"))


def build(device: torch.device, kind: type[FusedModel] = FusedModel) -> FusedPasses:
    tensors = random_tensors(CONFIG, 0, device)
    decoder = Decoder(CONFIG, tensors, 64, LinearFactory(pack=False))
    return FusedPasses(kind(decoder, MTPHead(decoder, tensors), 2, 4), random_prompts(CONFIG.vocab_size, 2, 8))


class Wrong(FusedModel):
    def score(self, text: Text, window: int) -> torch.Tensor:
        logits = super().score(text, window)
        logits[1:2] = logits[1:2].nextafter(torch.tensor(torch.inf, device=logits.device))
        return logits


@torch.inference_mode()
def test_windows_equal_single_steps(device: torch.device) -> None:
    assert check_windows(build(device), [2, 3, 4]) == 8
    with pytest.raises(NotLosslessError, match="a window of 2"):
        check_windows(build(device, Wrong), [2, 3])


@torch.inference_mode()
def test_passes_can_be_timed(device: torch.device) -> None:
    passes = build(device)
    actions = passes.actions()
    assert list(actions) == ["verify 1", "verify 2", "verify 3", "verify 4", "draft"]
    times = take_turns({name: actions[name] for name in ("verify 3", "draft")}, 1, passes.rewind, passes.wait)
    assert all(spread.least > 0 for spread in times.values())
