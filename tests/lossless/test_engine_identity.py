"""Token-exactness of the whole engine: every drafter and draft length gives plain decoding's tokens, in every dtype,
at temperature 0 and above it under coupled acceptance, alone and beside other requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot import Engine, SamplingParams
from surefoot.drafters.policy import StepCosts
from surefoot.loading.tiny import tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors
from tests.fakes import DEVICES

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9], [11, 12] * 20]
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=7, ignore_eos=True)
DRAFTERS = ["ngram", "suffix", "mtp", "mtp+ngram", "mtp+suffix", "draft-model", "auto"]


@pytest.fixture(autouse=True)
def _cheap_drafts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What "auto" goes by: measured, a tiny model's drafts would never pay, and no time is the same twice."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(
        "surefoot.engine.profile.measure_costs",
        lambda decoder, head, batches, draft_head: StepCosts(
            tuple(batches), (1, 9), 0, ((1.0, 1.4),) * len(batches), ((0.0, 0.0),) * len(batches),
            ((0.1, 0.1),) * len(batches),
        ),
    )  # fmt: skip


@pytest.fixture(scope="module", params=["dense", "moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Few tokens and a small embedding: drafts of every kind are sometimes right and sometimes wrong.
    config = tiny_config(moe=request.param == "moe", vocab_size=8)
    tensors = random_tensors(config, seed=2)
    tensors["model.embed_tokens.weight"] *= 0.3
    folder = tmp_path_factory.mktemp(str(request.param))
    write_checkpoint(folder, config, tensors)
    return folder


def engine(folder: Path, drafter: str, draft_length: int, dtype: str, slots: int = 1, device: str = "cpu") -> Engine:
    draft_model = folder if drafter == "draft-model" else None
    return Engine.from_pretrained(
        folder, drafter=drafter, draft_length=draft_length, dtype=dtype, slots=slots, max_len=128, device=device,
        draft_model=draft_model,
    )  # fmt: skip


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_drafter_gives_the_plain_tokens(
    checkpoint: Path, device: str, dtype: str, params: SamplingParams
) -> None:
    prompts = [[t % 8 for t in prompt] for prompt in PROMPTS]
    plain = engine(checkpoint, "none", 0, dtype, device=device)
    expected = [plain.generate(prompt, params).token_ids for prompt in prompts]
    accepted, rejected = dict.fromkeys(DRAFTERS, 0), dict.fromkeys(DRAFTERS, 0)
    for drafter in DRAFTERS:
        ours = engine(checkpoint, drafter, 1, dtype, slots=2, device=device)
        for draft_length in (1, 2, 5, 8) if dtype == "float32" else (3, 8):
            ours.draft_length = draft_length
            together = ours.generate(prompts, params)
            assert [out.token_ids for out in together] == expected, (drafter, draft_length)
            assert ours.generate(prompts[0], params).token_ids == expected[0]
            accepted[drafter] += sum(out.stats.accepted for out in together)
            rejected[drafter] += sum(out.stats.proposed - out.stats.accepted for out in together)
    if not params.greedy:
        accepted.pop("ngram")  # sampled output of a random model hardly repeats itself
    assert all(accepted.values()), accepted  # a drafter that is never right would prove little
    rejected.pop("draft-model")  # the target itself
    assert all(rejected.values()), rejected


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("drafter", ["mtp", "mtp+ngram", "mtp+suffix"])
def test_a_head_that_stops_in_doubt_gives_the_plain_tokens(
    checkpoint: Path, drafter: str, params: SamplingParams
) -> None:
    prompts = [[t % 8 for t in prompt] for prompt in PROMPTS]
    plain = engine(checkpoint, "none", 0, "float32")
    expected = [plain.generate(prompt, params).token_ids for prompt in prompts]
    longest = []
    for least in (0.0, 0.3):
        ours = Engine.from_pretrained(checkpoint, drafter=drafter, draft_length=6, slots=2, max_len=128,
                                      min_confidence=least)  # fmt: skip
        found = ours.generate(prompts, params)
        assert [out.token_ids for out in found] == expected, least
        assert sum(out.stats.accepted for out in found)
        steps = [*ours.stream(prompts[0][:2], params)]
        longest.append(max(len(step.draft.tokens) for step in steps if step.draft.source == "mtp"))
    assert longest[1] < longest[0] == 6


def test_another_seed_gives_other_tokens(checkpoint: Path) -> None:
    """Negative control: identity under coupling is not identity of everything with everything."""
    plain = engine(checkpoint, "none", 0, "float32")
    other = SamplingParams(max_new_tokens=40, temperature=0.9, seed=8, ignore_eos=True)
    assert plain.generate([1], SAMPLED).token_ids != plain.generate([1], other).token_ids


def test_rejection_sampling_is_a_function_of_seed_and_drafter_alone(checkpoint: Path) -> None:
    """Under the p/q rule tokens may differ between drafters, but not between batches."""
    params = SamplingParams(max_new_tokens=40, temperature=0.9, seed=7, acceptance="rejection", ignore_eos=True)
    prompts = [[t % 8 for t in prompt] for prompt in PROMPTS]
    for drafter in DRAFTERS:
        together = engine(checkpoint, drafter, 3, "bfloat16", slots=3).generate(prompts, params)
        alone = engine(checkpoint, drafter, 3, "bfloat16")
        for prompt, out in zip(prompts, together, strict=True):
            assert alone.generate(prompt, params).token_ids == out.token_ids
            assert 0 <= out.stats.accepted <= out.stats.proposed
