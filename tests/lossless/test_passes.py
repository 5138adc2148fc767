"""The way a pass is cut on a GPU, sixteen rows at a time, tried on the CPU: nothing may depend on how sequences share
passes, and what does not fit into one is refused."""

from __future__ import annotations

import pytest
import torch

from surefoot import Engine, SamplingParams
from surefoot.drafters import mtp
from surefoot.engine import target as target_module
from surefoot.engine.target import DecoderTarget
from surefoot.errors import InputError
from surefoot.kernels.linear import BlockLinear, LinearFactory
from surefoot.loading.tiny import tiny_config, write_checkpoint
from surefoot.model import Decoder, spans
from surefoot.model.spans import into_passes
from surefoot.model.tensors import random_tensors
from surefoot.types import Window

ROWS = 16
CPU = torch.device("cpu")


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and products as on a GPU."""

    def padded_rows(rows: int, device: torch.device, least: int = 2) -> int:
        return -(-rows // ROWS) * ROWS

    def rows_of_a_pass(device: torch.device) -> int:
        return ROWS

    for module in (spans, mtp):
        monkeypatch.setattr(module, "padded_rows", padded_rows)
    for module in (spans, target_module):
        monkeypatch.setattr(module, "rows_of_a_pass", rows_of_a_pass)
    monkeypatch.setattr(LinearFactory, "__call__", lambda self, *weights: BlockLinear(torch.cat(weights), ROWS))


@pytest.mark.usefixtures("sixteen")
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_identity_with_more_sequences_than_a_pass_holds(moe: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = tiny_config(moe=moe, vocab_size=8)
    tensors = random_tensors(config, seed=2)
    tensors["model.embed_tokens.weight"] *= 0.3
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, config, tensors)
    params = SamplingParams(max_new_tokens=24, temperature=0.9, seed=7, ignore_eos=True)
    prompts = [[i % 8, (3 * i) % 8, 5] for i in range(6)]
    plain = Engine.from_pretrained(folder, drafter="none", draft_length=0, max_len=64)
    expected = [plain.generate(prompt, params).token_ids for prompt in prompts]
    for draft_length in (3, 8):  # six windows of 4 or 9 rows: several passes
        engine = Engine.from_pretrained(folder, drafter="mtp", draft_length=draft_length, slots=6, max_len=64)
        together = engine.generate(prompts, params)
        assert [out.token_ids for out in together] == expected
        assert sum(out.stats.accepted for out in together) > 20


@pytest.mark.usefixtures("sixteen")
@torch.inference_mode()
def test_a_window_larger_than_a_pass_is_refused() -> None:
    config = tiny_config()
    target = DecoderTarget(Decoder(config, random_tensors(config, seed=0), 64), 2)
    with pytest.raises(InputError, match="expected at most 16 tokens on this device, found 17"):
        target.verify([Window(1, (1, 2)), Window(0, (1,) * 17)])
    assert len(target.verify([Window(0, (1,) * 16), Window(1, (1, 2))])) == 2


@pytest.mark.usefixtures("sixteen")
def test_items_keep_their_order_and_fill_passes() -> None:
    groups = into_passes(list("abcdef"), [9, 7, 1, 16, 8, 8], CPU)
    assert groups == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert into_passes([], [], CPU) == []


def test_on_the_cpu_all_share_one_pass() -> None:
    assert into_passes(list("abc"), [9, 9, 9], CPU) == [["a", "b", "c"]]
    assert into_passes([], [], CPU) == []
