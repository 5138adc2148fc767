"""The MTP drafter's lane: what is in it after prompts, rejections and new requests, and how chains end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot import Engine, SamplingParams
from surefoot.cache import KVCache
from surefoot.drafters.mtp import BULK_ROWS, MTPDrafter
from surefoot.engine.target import DecoderTarget
from surefoot.errors import CheckpointError, InputError
from surefoot.loading.tiny import tiny_config, write_checkpoint
from surefoot.model import Decoder, MTPHead
from surefoot.model.spans import Layout
from surefoot.model.tensors import random_tensors
from surefoot.sequence import Sequence

CPU = torch.device("cpu")


def build(mtp_layers: int = 1) -> MTPHead:
    config = tiny_config(vocab_size=20, mtp_layers=mtp_layers)
    tensors = random_tensors(config, seed=3)
    return MTPHead(Decoder(config, tensors, max_len=256), tensors)


def lane_bits(lane: KVCache, slot: int, length: int) -> list[torch.Tensor]:
    return [part.clone() for part in lane.read(slot, length)]


@torch.inference_mode()
def test_roll_back_and_replay_equal_a_fresh_lane() -> None:
    """forward(1@0), forward(2@1), forward(3@2), back to length 1, forward(7@1) = forward(1@0), forward(7@1)."""
    head = build()
    hidden = torch.randn(1, head.config.hidden_size, generator=torch.Generator().manual_seed(0))
    used, fresh = head.build_lane(1), head.build_lane(1)

    def forward(lane: KVCache, token: int, position: int) -> torch.Tensor:
        out = head.decode(hidden, [token], lane, Layout.of([(0, position, 1)], CPU))
        return head.decoder.logits(out)[0]

    for token, position in ((1, 0), (2, 1), (3, 2)):
        forward(used, token, position)
    forward(fresh, 1, 0)
    assert torch.equal(forward(used, 7, 1), forward(fresh, 7, 1))
    for ours, reference in zip(lane_bits(used, 0, 2), lane_bits(fresh, 0, 2), strict=True):
        assert torch.equal(ours, reference)


@torch.inference_mode()
def test_drafts_do_not_depend_on_how_the_prompt_was_observed() -> None:
    """Case 28: in one piece, in chunks of any size, token by token. The lane agrees up to the rounding of prefill."""
    head = build()
    tokens = [i % 20 for i in range(100)]
    target = DecoderTarget(head.decoder, 1)
    hidden = torch.cat([h for _, h in target.prefill(0, tokens[:-1])])
    drafts, lanes = [], []
    for chunk in (99, 50, BULK_ROWS + 1, 7, 1):
        drafter = MTPDrafter(head, slots=1)
        sequence = Sequence(0, tokens, SamplingParams(), limit=200)
        for start in range(0, 99, chunk):
            drafter.observe(sequence, start, hidden[start : start + chunk])
        drafts.append(drafter.propose([sequence], [4])[0].tokens)
        lanes.append(lane_bits(drafter._lane.cache, 0, 99))
    assert len(drafts[0]) == 4
    assert all(draft == drafts[0] for draft in drafts)
    for lane in lanes:
        for ours, reference in zip(lane, lanes[0], strict=True):
            torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


def test_lane_holds_target_rows_after_any_outcome(tmp_path: Path) -> None:
    """After a run with accepted and rejected drafts, the lane's final rows are those that a teacher-forced pass over
    the same text writes: none is left from the head's own hidden states."""
    config = tiny_config(vocab_size=8)
    tensors = random_tensors(config, seed=2)
    tensors["model.embed_tokens.weight"] *= 0.3
    write_checkpoint(tmp_path, config, tensors)
    engine = Engine.from_pretrained(tmp_path, drafter="mtp", draft_length=5, max_len=128)
    params = SamplingParams(max_new_tokens=60, temperature=0.8, seed=1, ignore_eos=True)
    assert isinstance(engine.drafter, MTPDrafter)
    assert isinstance(engine.target, DecoderTarget)
    out = engine.generate([1, 2, 3], params)
    assert 0 < out.stats.accepted < out.stats.proposed
    text = [1, 2, 3, *out.token_ids]
    # The last step's rows enter the lane with the next draft, which never comes: leave its tokens out.
    length = len(text) - 1 - 6
    ours = lane_bits(engine.drafter._lane.cache, 0, length)
    with torch.inference_mode():
        hidden = torch.cat([h for _, h in engine.target.prefill(0, text[:-1])])
        lane = engine.drafter._head.build_lane(1)
        engine.drafter._head.prefill(hidden[:length], text[1 : length + 1], lane, 0, 0)
    for mine, reference in zip(ours, lane_bits(lane, 0, length), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-4, rtol=1e-4)


def test_acceptance_does_not_depend_on_the_prefill_chunk(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=8)
    write_checkpoint(tmp_path, config, random_tensors(config, seed=2))
    engine = Engine.from_pretrained(tmp_path, drafter="mtp", draft_length=3, max_len=256)
    prompt = [i * i % 8 for i in range(150)]
    params = SamplingParams(max_new_tokens=40, temperature=0.8, ignore_eos=True)
    accepted = []
    for chunk in (512, 64, 33):
        engine.target.chunk = chunk  # type: ignore[union-attr]  # a DecoderTarget
        accepted.append(engine.generate(prompt, params).stats.accepted_by_position)
    assert accepted[0] == accepted[1] == accepted[2]


@torch.inference_mode()
def test_chain_ends_after_a_stop_token() -> None:
    """K = 4 and a stop token drafted second: the draft is two long, the stop token included."""
    head = build()
    target = DecoderTarget(head.decoder, 1)
    tokens = [3, 1, 4, 1, 5]
    hidden = torch.cat([h for _, h in target.prefill(0, tokens[:-1])])

    def draft(stop: frozenset[int]) -> tuple[int, ...]:
        drafter = MTPDrafter(head, slots=1)
        sequence = Sequence(0, tokens, SamplingParams(), limit=100, stop_ids=stop)
        drafter.observe(sequence, 0, hidden)
        return drafter.propose([sequence], [4])[0].tokens

    free = draft(frozenset())
    assert len(free) == 4
    stop = free[1] if free[1] != free[0] else free[0]
    assert draft(frozenset([stop])) == free[: free.index(stop) + 1]


@torch.inference_mode()
def test_confidence_cuts_the_chain_and_only_shortens_it() -> None:
    head = build()
    target = DecoderTarget(head.decoder, 1)
    tokens = [3, 1, 4, 1, 5]
    hidden = torch.cat([h for _, h in target.prefill(0, tokens[:-1])])
    lengths = []
    for confidence in (0.0, 0.3, 0.6, 0.99):
        drafter = MTPDrafter(head, slots=1, min_confidence=confidence)
        sequence = Sequence(0, tokens, SamplingParams(), limit=100)
        drafter.observe(sequence, 0, hidden)
        lengths.append(len(drafter.propose([sequence], [6])[0].tokens))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 6
    assert lengths[-1] < 6


def test_one_token_prompt_has_no_first_draft(tmp_path: Path) -> None:
    config = tiny_config()
    write_checkpoint(tmp_path, config, random_tensors(config, seed=2))
    engine = Engine.from_pretrained(tmp_path, drafter="mtp", draft_length=3, max_len=64)
    first, second, *_ = engine.stream([5], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert len(first.draft.tokens) == 0
    assert len(second.draft.tokens) == 3


def test_refusals() -> None:
    with pytest.raises(InputError, match="min_confidence"):
        MTPDrafter(build(), slots=1, min_confidence=1.0)
    with pytest.raises(InputError, match="hidden states"):
        MTPDrafter(build(), slots=1).observe(Sequence(0, [1, 2], SamplingParams(), limit=9), 0, None)
    with pytest.raises(CheckpointError, match="one layer, found 2"):
        build(mtp_layers=2)
