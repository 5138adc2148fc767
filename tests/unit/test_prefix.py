"""Beginnings of prompts that are kept: a hit gives what a miss gives, to the bit, and memory is accounted for."""

from __future__ import annotations

import random
from collections.abc import Collection
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot import Engine, SamplingParams
from surefoot.cache import KVCache, RecurrentCache
from surefoot.cache.prefix import Node, PrefixCache
from surefoot.drafters.mtp import MTPDrafter
from surefoot.drafters.ngram import NgramDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.engine.prompts import read
from surefoot.engine.runner import HostRunner, Ways, drain
from surefoot.engine.target import DecoderTarget
from surefoot.errors import InputError
from surefoot.loading.tiny import tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors
from surefoot.prove.table import Right
from surefoot.sequence import Sequence
from surefoot.types import Kept
from tests.serving import ROW, ChunkedTarget, Laned, check_memory, nodes_of, sequence_of, solo

CHUNK = 3


def converse(limit: int, seed: int, turns: int = 30) -> tuple[int, int]:
    """Several conversations with the same beginnings, turn by turn, some of them asked again: every answer is that of a
    target that has kept nothing. How many tokens of prompts were kept, and how many there were."""
    dice = random.Random(seed)
    target, prefixes = ChunkedTarget(slots=2, max_len=200), PrefixCache(limit)
    runner = HostRunner(target, Laned(target), 3, Ways(budget=CHUNK, prefixes=prefixes))
    texts: list[list[int]] = [[1, 2, 3, 1, 2] for _ in range(3)]
    kept = read_in_all = 0
    for _ in range(turns):
        params = SamplingParams(max_new_tokens=dice.randint(1, 5), temperature=dice.choice([0.0, 0.9]), seed=seed)
        asked = []
        for number in dice.sample(range(3), 2):
            if dice.random() < 0.2:
                texts[number] = texts[dice.randrange(3)][: dice.randint(1, 8)]  # begin again, or cut back
            elif dice.random() < 0.8:
                texts[number] = [*texts[number], *(dice.randrange(4) for _ in range(dice.randint(1, 4)))]
            texts[number] = texts[number][:60]
            sequence = Sequence(0, list(texts[number]), params, len(texts[number]) + params.max_new_tokens)
            asked.append((number, sequence))
            runner.add(sequence, dice.choice([None, NoDrafter()]))
        while runner.busy:
            runner.tick()
            check_memory(prefixes)
        for number, sequence in asked:
            alone = Sequence(0, list(texts[number]), params, sequence.limit)
            list(drain(HostRunner(ChunkedTarget(slots=1, max_len=200), NoDrafter(), 0, Ways()), [alone]))
            assert sequence.output == alone.output, "another output"
            kept += sequence.cached_tokens
            read_in_all += len(texts[number]) - 1
            texts[number] = [*texts[number], *sequence.output]
    assert target.read + kept == read_in_all
    return kept, read_in_all


@given(limit=st.sampled_from([0, 100, 300, 1000, 3000, 10**6]), seed=st.integers(0, 10**6))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_a_conversation_is_the_same_with_and_without_what_was_kept(limit: int, seed: int) -> None:
    kept, _ = converse(limit, seed)
    assert kept == 0 or limit > 0


def test_with_room_most_of_a_conversation_is_not_read_again() -> None:
    kept, read_in_all = converse(10**6, seed=7)
    assert kept > 0.6 * read_in_all


def test_control_a_state_from_the_middle_of_a_chunk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one prompt is not a place that another is read through, and the last bits show it."""

    def lax(
        self: PrefixCache, tokens: Seq[int], chunk: int, parts: Collection[str], behind: Node | None = None
    ) -> Node:
        node = self.root if behind is None else behind
        while node.stop < len(tokens):
            sizes = range(min(chunk, len(tokens) - node.stop), 0, -1)
            found = (self.child(node, tokens[node.stop : node.stop + size], parts) for size in sizes)
            child = next(filter(None, found), None)
            if child is None:
                break
            node = child
        return node

    monkeypatch.setattr(PrefixCache, "match", lax)
    with pytest.raises(AssertionError, match="another output"):
        converse(10**6, seed=7)


def kept(start: int, stop: int) -> dict[str, Kept]:
    """Copies of 100 bytes."""
    return {"target": Kept(start, stop, (torch.zeros(25),))}


def test_the_one_not_used_for_the_longest_goes_first() -> None:
    cache = PrefixCache(350)  # room for three nodes of 100 + 8 bytes
    nodes = {i: cache.insert(cache.root, [i], kept(0, 1)) for i in (1, 2, 3)}
    assert all(nodes.values())
    assert cache.used == 3 * 108
    cache.match([1], 1, ["target"])
    cache.insert(cache.root, [4], kept(0, 1))
    assert [cache.match([i], 1, ["target"]).stop for i in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_what_others_go_on_from_goes_after_them() -> None:
    cache = PrefixCache(350)
    first = cache.insert(cache.root, [1], kept(0, 1))
    assert first is not None
    second = cache.insert(first, [2], kept(1, 2))
    assert second is not None
    cache.insert(cache.root, [3], kept(0, 1))
    cache.insert(cache.root, [4], kept(0, 1))  # the oldest leaf is [1, 2]
    assert cache.match([1, 2], 1, ["target"]) is first
    assert cache.insert(second, [5], kept(2, 3)) is None  # behind one that is gone
    check_memory(cache)


def test_a_path_does_not_push_itself_out() -> None:
    cache = PrefixCache(250)
    node: Node | None = cache.root
    for i in range(4):
        assert node is not None
        grown = cache.insert(node, [i], kept(i, i + 1))
        assert (grown is not None) == (i < 2)
        node = grown or node
    assert cache.match([0, 1, 2], 1, ["target"]).stop == 2
    assert cache.insert(cache.root, [9], {"target": Kept(0, 1, (torch.zeros(100),))}) is None  # larger than all
    cache.clear()
    assert (cache.used, len(cache), nodes_of(cache)) == (0, 0, [])


def test_parts_are_added_to_what_is_kept() -> None:
    cache = PrefixCache(10**6)
    node = cache.insert(cache.root, [1], kept(0, 1))
    assert cache.match([1], 1, ["target", "lane"]) is cache.root
    assert cache.insert(cache.root, [1], kept(0, 1) | {"lane": Kept(0, 1, (torch.zeros(5),))}) is node
    assert cache.match([1], 1, ["target", "lane"]) is node
    assert cache.used == 128


@pytest.mark.parametrize("limit", [-1, 1.5, None, True])
def test_limits_that_are_none(limit: Any) -> None:
    with pytest.raises(InputError, match="prefix_cache_bytes"):
        PrefixCache(limit)


def test_a_drafter_that_wants_the_whole_prompt_is_shown_it() -> None:
    target, prefixes = ChunkedTarget(slots=1), PrefixCache(10**6)
    prompt, params = [1, 2, 3, 1, 2, 3, 1], SamplingParams(max_new_tokens=4)
    for _ in range(2):
        sequence = sequence_of(prompt, params)
        list(drain(HostRunner(target, Right(ROW), 2, Ways(prefixes=prefixes)), [sequence]))
        assert sequence.cached_tokens == 0
        assert sequence.output == solo(prompt, params)
    assert not len(prefixes)


# Real models: every bit that a hit puts back.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(max_positions=512)
    path = tmp_path_factory.mktemp("prefix")
    write_checkpoint(path, config, random_tensors(config, seed=1))
    return path


def load(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, **{"drafter": "mtp", "max_len": 256, "prefill_chunk": 24, **options})


def state_of(engine: Engine, slot: int) -> list[Tensor]:
    """All that a slot holds."""
    target, drafter = engine.target, engine.drafter
    assert isinstance(target, DecoderTarget)
    assert isinstance(drafter, MTPDrafter)
    length = target.cache.length[slot]
    found: list[Tensor] = []
    for layer in target.cache.layers:
        if isinstance(layer, KVCache):
            found += layer.read(slot, length)
        else:
            assert isinstance(layer, RecurrentCache)
            found += [layer.read_state(slot), layer.conv_past(slot)]
    pending = drafter._lane.pending[slot]
    assert pending is not None
    assert pending[0] + len(pending[1]) == length
    return [*found, *drafter._lane.cache.read(slot, pending[0]), pending[1]]


def read_into(engine: Engine, slot: int, prompt: list[int], prefixes: PrefixCache | None) -> Sequence:
    sequence = Sequence(slot, prompt, SamplingParams(), len(prompt) + 1)
    with torch.inference_mode():
        for _ in read(sequence, engine.drafter, engine.target, prefixes):  # type: ignore[arg-type]  # a DecoderTarget
            pass
    return sequence


@pytest.mark.parametrize("chunk", [8, 24])  # the lane takes chunks of up to 16 rows later
@pytest.mark.parametrize("length,cached", [(90, 72), (72, 72), (73, 72), (100, 90), (25, 24), (11, 10), (9, 8), (1, 0)])
def test_a_hit_puts_back_every_bit(folder: Path, chunk: int, length: int, cached: int) -> None:
    engine, prefixes = load(folder, slots=2, prefill_chunk=chunk), PrefixCache(2**30)
    text = [i * i % 260 for i in range(100)]
    read_into(engine, 0, [*text[:90], 7], prefixes)  # 90 tokens are read: whole chunks, and the end
    if length > 90:
        text = [*text[:90], 3]
        length = 91
    elif length < 25:  # another prompt's end
        read_into(engine, 0, text[:length], prefixes)
        cached = length - 1
    sequence = read_into(engine, 0, text[:length], prefixes)
    found = sequence.cached_tokens
    assert found == cached or (length == 90 and found == 89 // chunk * chunk) or found == (length - 1) // chunk * chunk
    hit = [tensor.clone() for tensor in state_of(engine, 0)] if length > 1 else []
    read_into(engine, 1, text[:length], None)
    miss = state_of(engine, 1) if length > 1 else []
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(hit, miss, strict=True))
    check_memory(prefixes)


def test_engine_generate_keeps_prompts(folder: Path) -> None:
    """Tokens, drafts and what became of them are those of an engine that keeps nothing."""
    plain, keeping = load(folder, slots=2), load(folder, slots=2, prefix_cache_bytes=2**24)
    text = [i * 7 % 260 for i in range(60)]
    params = SamplingParams(max_new_tokens=12, temperature=0.8, seed=2, ignore_eos=True)
    for turn in range(4):
        prompts: list[Any] = [list(text), [*text[:50], turn]]
        together = keeping.generate(prompts, params)
        assert sum(answer.stats.cached_tokens for answer in together) >= (96 if turn else 48)
        for ours, theirs in zip(together, plain.generate(prompts, params), strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.stats.accepted_by_position == theirs.stats.accepted_by_position
            assert theirs.stats.cached_tokens == 0
            text = [*text, *ours.token_ids[:4]]
    assert keeping.prefixes is not None
    check_memory(keeping.prefixes)


def test_drafters_share_what_the_target_kept(folder: Path) -> None:
    """A lane that is missing is made by reading again; then it is there for every drafter with a lane."""
    engine, prefixes = load(folder, drafter="mtp+ngram"), PrefixCache(2**30)
    prompt = [i % 260 for i in range(60)]
    params = SamplingParams(max_new_tokens=3)
    found = []
    for drafter in (NgramDrafter(), engine.drafter, engine.drafter, NgramDrafter()):
        sequence = sequence_of(prompt, params, max_len=256)
        with torch.inference_mode():
            list(drain(HostRunner(engine.target, drafter, 2, Ways(prefixes=prefixes)), [sequence]))  # type: ignore[arg-type]
        found.append((sequence.cached_tokens, sequence.output))
    assert [tokens for tokens, _ in found] == [0, 0, 59, 59]
    assert all(output == found[0][1] for _, output in found)
    check_memory(prefixes)


def test_prompts_that_begin_alike_and_come_together_are_read_once() -> None:
    target, prefixes = ChunkedTarget(slots=4), PrefixCache(10**6)
    runner = HostRunner(target, Laned(target), 2, Ways(budget=CHUNK, prefixes=prefixes))
    params = SamplingParams(max_new_tokens=3)
    sequences = [sequence_of([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, i % 2, 1], params) for i in range(4)]
    for sequence in sequences:
        runner.add(sequence)
    while runner.busy:
        runner.tick()
    assert target.read == 12 + 3  # the common chunks once, and the other last chunk
    assert sum(sequence.cached_tokens for sequence in sequences) == 4 * 12 - target.read
    for sequence in sequences:
        assert sequence.output == solo(sequence.tokens[:13], params)


def test_who_scores_the_prompt_reads_all_of_it(folder: Path) -> None:
    engine = load(folder, prefix_cache_bytes=2**24)
    prompt, params = [i % 260 for i in range(60)], SamplingParams(max_new_tokens=3, prompt_logprobs=1)
    first = engine.generate(prompt, params)
    second = engine.generate(prompt, params)
    assert second.stats.cached_tokens == 0
    assert second.prompt_logprobs == first.prompt_logprobs
    assert engine.generate(prompt, SamplingParams(max_new_tokens=3)).stats.cached_tokens == 59
