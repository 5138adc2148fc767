"""The whole benchmark over the device's steps."""

from __future__ import annotations

import pytest
import torch

from surefoot.bench import cost, run, turns
from surefoot.bench.settings import Settings
from surefoot.engine import loaded
from surefoot.engine.loaded import LoadedModel
from surefoot.kernels.linear import LinearFactory
from surefoot.loading.shapes import SHAPES
from tests.fused.test_device import CONFIG


def test_a_shape_whose_acceptance_is_set(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", CONFIG)
    monkeypatch.setattr(LoadedModel, "fits_kernels", lambda self: True)
    monkeypatch.setattr(loaded, "LinearFactory", lambda **_: LinearFactory(pack=False))
    monkeypatch.setattr(loaded, "FUSED_WINDOW", 2)
    monkeypatch.setattr(turns, "BURST", 1)
    monkeypatch.setattr(cost, "READ_BYTES", {"cpu": 2**20, "cuda": 2**20})
    report = run.run(
        Settings(
            shape="small", device=str(device), dtype="float32", context=2, batch=2, drafters=("mtp",), depths=(1,),
            synthetic_acceptance=(1.0,), tokens=2, rounds=1,
        )
    )  # fmt: skip
    plain, drafted = report.rows
    assert (plain.tokens_per_step, drafted.tokens_per_step) == (1, 2)
    assert drafted.acceptance_set
    assert list(report.start_up.recording_s) == ["plain", "MTP, K = 1"]
    assert report.lossless.window_sizes == [2]
    assert report.memory.kv == 2 * 2 * 2 * CONFIG.num_kv_heads * CONFIG.head_dim * report.config["max_len"] * 4
