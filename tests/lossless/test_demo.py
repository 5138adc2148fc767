"""The bundled checkpoint: what its card says, and token-exactness on real text with drafts that are mostly right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from surefoot import Engine, SamplingParams
from tests.fakes import DEVICES

HELD_OUT = Path(__file__).parents[2] / "src" / "surefoot" / "bench" / "heldout.jsonl"
MODEL = "surefoot-demo"


def prompts(count: int) -> list[str]:
    return [json.loads(line)["text"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()[:count]]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", DEVICES)
def test_identical_tokens_for_every_drafter_and_length(device: str, dtype: str, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=temperature, top_p=0.95, seed=11)
    texts = prompts(3)
    plain = Engine.from_pretrained(MODEL, device=device, dtype=dtype, drafter="none", draft_length=0)
    expected = [out.token_ids for out in plain.generate(texts, params)]
    accepted = 0
    for drafter, lengths in (("mtp", range(1, 9)), ("ngram", (4, 8)), ("mtp+ngram", (3,))):
        engine = Engine.from_pretrained(MODEL, device=device, dtype=dtype, drafter=drafter, slots=2)
        for draft_length in lengths:
            engine.draft_length = draft_length
            together = engine.generate(texts, params)
            assert [out.token_ids for out in together] == expected, (drafter, draft_length)
            accepted += sum(out.stats.accepted for out in together)
    assert accepted > 500


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_vocabulary_changes_no_token(device: str, temperature: float) -> None:
    """With all tokens in it, no draft either; the coupled drafts of fewer meet the target's tokens nearly as often."""
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=11)
    texts = prompts(3)
    free = Engine.from_pretrained(MODEL, device=device, slots=3).generate(texts, params)
    accepted = {}
    for size in (1, 2048, 8192):
        engine = Engine.from_pretrained(MODEL, device=device, slots=3, draft_vocab=size)
        assert f"the first {size} of draft_vocab.json" in engine.notes[-1]
        outs = engine.generate(texts, params)
        assert [out.token_ids for out in outs] == [out.token_ids for out in free]
        accepted[size] = sum(out.stats.accepted for out in outs)
        if size == 8192:
            assert [out.stats.accepted_by_position for out in outs] == [o.stats.accepted_by_position for o in free]
    assert accepted[1] < accepted[2048] / 2
    assert accepted[2048] > 0.7 * accepted[8192]


@pytest.mark.slow
def test_the_head_is_worth_having() -> None:
    """First-position greedy acceptance on held-out text, free running."""
    engine = Engine.from_pretrained(MODEL, drafter="mtp", draft_length=3, slots=2)
    proposed, accepted = 0, 0
    for out in engine.generate(prompts(12), SamplingParams(max_new_tokens=64)):
        proposed += out.stats.proposed_by_position[0]
        accepted += out.stats.accepted_by_position[0]
    assert accepted / proposed >= 0.6


def test_logits_agree_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from surefoot.loading.checkpoint import find_model

    reference = transformers.Qwen3_5ForCausalLM.from_pretrained(find_model(MODEL), dtype=torch.float32).eval()
    engine = Engine.from_pretrained(MODEL, drafter="none", draft_length=0)
    tokens = engine.encode(prompts(1)[0])[:300]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(engine.logits(tokens), expected, atol=1e-3, rtol=0)
