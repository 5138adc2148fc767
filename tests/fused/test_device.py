"""The device's step against the host's: the same tokens, whatever drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch

from surefoot import Engine
from surefoot.drafters.mtp import MTPDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.engine.device import DeviceDrafterName, DeviceTarget
from surefoot.engine.runner import run
from surefoot.engine.target import DecoderTarget
from surefoot.errors import InputError
from surefoot.kernels.linear import LinearFactory
from surefoot.loading.tiny import tiny_config
from surefoot.model import Decoder, DraftHead, MTPHead
from surefoot.model.fused import FusedModel
from surefoot.model.tensors import random_tensors
from surefoot.sampling import Acceptance, SamplingParams
from surefoot.sequence import Sequence
from surefoot.verify import Rules

CONFIG = replace(  # as small as it goes: the interpreter takes its time
    tiny_config(linear_value_dim=16, linear_key_heads=1, linear_value_heads=2, linear_key_dim=16),
    vocab_size=61, hidden_size=32, ffn_width=32, num_heads=2, num_kv_heads=1,
    layer_types=("linear_attention", "full_attention"),
)  # fmt: skip
PROMPTS = [[5, 9, 5, 9, 5], [3], [7, 1, 2, 7, 1, 2]]
MAX_LEN = 32


def build(device: torch.device) -> tuple[Decoder, MTPHead]:
    tensors = random_tensors(CONFIG, 3, device)
    decoder = Decoder(CONFIG, tensors, MAX_LEN, LinearFactory(pack=False))
    return decoder, MTPHead(decoder, tensors)


def sequences(params: SamplingParams, count: int, stop: frozenset[int] = frozenset()) -> list[Sequence]:
    return [Sequence(0, list(p), params, min(len(p) + params.max_new_tokens, MAX_LEN), stop) for p in PROMPTS[:count]]


def outputs(target: DeviceTarget, batch: list[Sequence]) -> list[list[int]]:
    for record in target.run(batch):
        assert 0 <= record.accepted <= len(record.draft.tokens)
        assert list(record.tokens) == record.sequence.tokens[record.position : record.position + record.emitted]
    return [sequence.output for sequence in batch]


CASES: list[tuple[DeviceDrafterName, int]] = [("none", 0), ("ngram", 3), ("mtp", 1), ("mtp", 3), ("mtp+ngram", 2)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter,depth", CASES)
def test_the_tokens_are_those_of_the_host(
    device: torch.device, drafter: DeviceDrafterName, depth: int, temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=temperature, seed=11)
    with torch.inference_mode():
        decoder, head = build(device)
        expected = sequences(params, 2)
        list(run(expected, NoDrafter(), DecoderTarget(decoder, 2), 0))
        target = DeviceTarget(FusedModel(decoder, head, 2, depth + 1), drafter, depth)
        assert outputs(target, sequences(params, 2)) == [s.output for s in expected]


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_ids_without_a_token_never_come(device: torch.device, acceptance: Acceptance) -> None:
    """Two thirds of the vocabulary are padding here; the host's rules leave it out too."""
    size = CONFIG.vocab_size // 3
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=2, acceptance=acceptance)
    with torch.inference_mode():
        decoder, head = build(device)
        free, ruled, ours = sequences(params, 1), sequences(params, 1), sequences(params, 1)
        ruled[0].rules = Rules(params, ruled[0].tokens, size=size)
        for batch in (free, ruled):
            list(run(batch, NoDrafter(), DecoderTarget(decoder, 1), 0))
        (tokens,) = outputs(DeviceTarget(FusedModel(decoder, head, 1, 2), "mtp", 1, size=size), ours)
    assert max(free[0].output) >= size  # they would come
    assert max(tokens) < size
    assert acceptance == "rejection" or tokens == ruled[0].output


def test_more_requests_than_slots_and_a_stop_inside_a_draft(device: torch.device) -> None:
    params = SamplingParams(max_new_tokens=6)
    with torch.inference_mode():
        decoder, head = build(device)
        expected = sequences(params, 3)
        list(run(expected, NoDrafter(), DecoderTarget(decoder, 3), 0))
        stop = frozenset({expected[0].output[3]})
        stopped = sequences(params, 3, stop)
        list(run(stopped, NoDrafter(), DecoderTarget(decoder, 3), 0))
        target = DeviceTarget(FusedModel(decoder, head, 1, 3), "mtp", 2)
        batch = sequences(params, 3, stop)
        assert outputs(target, batch) == [s.output for s in stopped]
        assert [s.finish_reason for s in batch] == [s.finish_reason for s in stopped]
        assert batch[0].finish_reason == "stop"


def test_rejection_gives_tokens_in_bounds_and_is_repeatable(device: torch.device) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=0.8, top_k=20, top_p=0.9, seed=5, acceptance="rejection")
    with torch.inference_mode():
        decoder, head = build(device)
        target = DeviceTarget(FusedModel(decoder, head, 2, 4), "mtp", 3)
        first = outputs(target, sequences(params, 2))
        assert first == outputs(target, sequences(params, 2))
        assert all(len(tokens) == 6 and max(tokens) < CONFIG.vocab_size for tokens in first)


def test_an_engine_cannot_put_another_drafter_over_the_step(device: torch.device) -> None:
    with torch.inference_mode():
        decoder, head = build(device)
        target = DeviceTarget(FusedModel(decoder, head, 1, 3), "mtp", 2)
    assert Engine(target, target.drafter, 2).drafter.name == "mtp"
    assert Engine(target, target.drafter, 2).plain().drafter.name == "none"
    with pytest.raises(InputError, match="expected the one in the target's own step, 'mtp', found 'none'"):
        Engine(target, NoDrafter(), 0)


def test_requests_with_rules_go_through_the_host(device: torch.device) -> None:
    """Beside others that the step serves; an engine that has no host's loop says so."""
    plain = SamplingParams(max_new_tokens=3)
    ruled = SamplingParams(max_new_tokens=5, presence_penalty=1.0, logprobs=1)
    with torch.inference_mode():
        decoder, head = build(device)
        target = DeviceTarget(FusedModel(decoder, head, 1, 2), "mtp", 1)
        host = DecoderTarget(decoder, 1), MTPDrafter(head, 1)
    engine = Engine(target, target.drafter, 1, host=lambda: host)
    outs = engine.generate(PROMPTS[:2], [ruled, plain])
    expected = Engine(host[0], NoDrafter(), 0).generate(PROMPTS[:2], [ruled, plain])
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    assert outs[0].logprobs == expected[0].logprobs
    assert outs[0].stats.proposed > 0
    assert engine.plain().generate(PROMPTS[0], ruled).stats.proposed == 0
    with pytest.raises(InputError, match="expected what the target's own step can do, found more"):
        Engine(target, target.drafter, 1).generate(PROMPTS[0], ruled)


def test_statistics_are_those_of_the_host(device: torch.device) -> None:
    """A draft that reaches past the request's end counts up to there only."""
    params = SamplingParams(max_new_tokens=5)
    with torch.inference_mode():
        decoder, head = build(device)
        host = Engine(DecoderTarget(decoder, 1), MTPDrafter(head, 1), 3)
        target = DeviceTarget(FusedModel(decoder, head, 1, 4), "mtp", 3)
        theirs, ours = (engine.generate(PROMPTS[0], params) for engine in (host, Engine(target, target.drafter, 3)))
    assert ours.token_ids == theirs.token_ids
    for name in ("steps", "proposed_by_position", "accepted_by_position"):
        assert getattr(ours.stats, name) == getattr(theirs.stats, name)


@pytest.mark.parametrize(
    "ids, temperature, rule",
    [
        ([4], 0.0, "coupled"),
        (range(0, 61, 7), 0.9, "coupled"),
        (range(0, 61, 7), 0.9, "rejection"),
    ],
)
def test_a_draft_vocabulary_is_the_hosts(
    device: torch.device, ids: Seq[int], temperature: float, rule: Acceptance
) -> None:
    """The same drafts and the same tokens as on the host with the same vocabulary. Under the p/q rule, too: draws have
    the same keys, and only rounding stands between the rows."""
    params = SamplingParams(max_new_tokens=4, temperature=temperature, seed=3, acceptance=rule)
    with torch.inference_mode():
        decoder, head = build(device)
        draft_head = DraftHead(decoder, ids)
        host = Engine(DecoderTarget(decoder, 1), MTPDrafter(head, 1, draft_head=draft_head), 2)
        target = DeviceTarget(FusedModel(decoder, head, 1, 3), "mtp", 2, draft_head)
        theirs, ours = (
            [(step.draft.tokens, step.tokens) for step in engine.stream(PROMPTS[0], params)]
            for engine in (host, Engine(target, target.drafter, 2))
        )
        plain = Engine(DecoderTarget(decoder, 1), NoDrafter(), 0).generate(PROMPTS[0], params)
    assert ours == theirs
    assert {token for drafts, _ in ours for token in drafts} <= set(ids)
    assert rule == "rejection" or [token for _, tokens in ours for token in tokens] == plain.token_ids


def test_a_prompt_that_was_kept_is_not_read_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    prefill = Decoder.prefill

    def counted(self: Decoder, tokens: list[int], *others: Any) -> torch.Tensor:
        read.append(len(tokens))
        return prefill(self, tokens, *others)

    monkeypatch.setattr(Decoder, "prefill", counted)
    params = SamplingParams(max_new_tokens=3)
    with torch.inference_mode():
        decoder, head = build(device)
        model = FusedModel(decoder, head, 1, 2)
        model.prefill_cache.keep_prompts()
        target = DeviceTarget(model, "mtp", 1)
        expected = outputs(target, sequences(params, 1))
        assert outputs(target, sequences(params, 1)) == outputs(target.plain(), sequences(params, 1)) == expected
        assert read == [4]
        target.score([5, 9])  # takes the slot
        assert outputs(target, sequences(params, 1)) == expected
        assert read == [4, 2, 4]


@torch.inference_mode()
def test_warming_up_tells_how_far_it_is(device: torch.device) -> None:
    decoder, head = build(device)
    target, told = DeviceTarget(FusedModel(decoder, head, 3, 2), "mtp", 1), []
    target.warm_up(progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert list(target.steps) == [(size, False, 1) for size in (1, 2, 3)]
