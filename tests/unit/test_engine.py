"""The engine's surface: what it accepts, what it refuses and how, and what it counts.

One long file, as the surface is one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot import Engine, SamplingParams
from surefoot.cache import KVCache, memory
from surefoot.drafters.auto import AutoDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.engine.target import PREFILL_CHUNK, DecoderTarget
from surefoot.errors import CheckpointError, InputError, NumericalError, TokenizerError
from surefoot.loading.config import parse_config
from surefoot.loading.files import read_json
from surefoot.loading.tiny import Style, tiny_config, write_checkpoint
from surefoot.model.decoder import build_cache, build_kv
from surefoot.model.tensors import random_tensors
from surefoot.sequence import Sequence
from surefoot.types import Draft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(max_positions=1024)
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, config, random_tensors(config, seed=1))
    return path


def load(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, **{"max_len": 64, **options})


GREEDY = SamplingParams(max_new_tokens=5, ignore_eos=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_length": 0}, "draft_length: expected an integer from 1 to 63"),
        ({"draft_length": -1}, "found -1"),
        ({"draft_length": 2.5}, "found 2.5"),
        ({"draft_length": True}, "found True"),
        ({"draft_length": 1000}, "found 1000"),
        ({"drafter": "magic"}, "drafter: expected one of none, ngram"),
        ({"drafter": None}, "drafter: expected one of none, ngram"),
        ({"drafter": ["mtp"]}, "drafter: expected one of none, ngram"),
        ({"dtype": ["float32"]}, "dtype: expected one of"),
        ({"device": None}, "device: expected"),
        ({"dtype": "int8"}, "dtype: expected one of"),
        ({"device": "abacus"}, "device: expected"),
        ({"device": "meta"}, "device: expected"),
        ({"device": "cuda:99"}, "CUDA devices"),
        ({"slots": 0}, "slots: expected an integer of at least 1"),
        ({"max_len": 0}, "max_len: expected an integer of at least 1"),
        ({"drafter": "draft-model"}, "draft_model: expected exactly with"),
        ({"drafter": NoDrafter}, "drafter: expected one of none, ngram"),
        ({"slots": 10**5000}, "slots: expected an integer of at least 1 and at most .*found a value of type int"),
        ({"max_len": "9"}, "max_len: expected an integer"),
        ({"progress": 5}, "progress: expected a function"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):  # the empty folder itself would be a CheckpointError
        Engine.from_pretrained(tmp_path, **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one token"),
        ([1, 260], r"prompt\[1\]: expected a token id from 0 to 259, found 260"),
        ([-1], "found -1"),
        ([1.0], "found 1.0"),
        ([True], "found True"),
        (None, "a list of token ids"),
        (5, "a list of token ids"),
        ({1: 2}, "a list of token ids"),
        ({1, 2}, "a list of token ids"),
        (torch.tensor(3), "a list of token ids"),
        (b"abc", "a list of token ids"),
        (torch.tensor([[1, 2]]), "a list of token ids"),
        (list(range(64)), "at most 63 tokens"),
    ],
)
def test_bad_prompts(folder: Path, prompt: list[Any], message: str) -> None:
    engine = load(folder)
    with pytest.raises(InputError, match=message):
        engine.generate(prompt, GREEDY)
    with pytest.raises(InputError, match=message):
        engine.stream(prompt, GREEDY)
    with pytest.raises(InputError, match=message):
        engine.generate([[1, 2], prompt], GREEDY)
    assert engine.target.cache.length == [0]  # type: ignore[union-attr]  # nothing half done
    assert len(engine.generate([1, 2], GREEDY).token_ids) == 5


def test_text_needs_a_tokenizer(folder: Path) -> None:
    engine = load(folder)
    with pytest.raises(TokenizerError, match="tokenizer"):
        engine.generate("text", GREEDY)
    with pytest.raises(TokenizerError, match="tokenizer"):
        _ = engine.generate([1], GREEDY).text


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0}, {"max_new_tokens": 1.5}, {"temperature": -0.1}, {"temperature": float("nan")},
        {"temperature": float("inf")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2},
        {"seed": -1}, {"seed": 2**64}, {"acceptance": "hopeful"}, {"stop_token_ids": (-3,)}, {"top_k": True},
        {"temperature": 10**400}, {"acceptance": ["coupled"]}, {"ignore_eos": 1},
        {"stop_token_ids": 5}, {"stop_token_ids": "ab"}, {"stop_token_ids": torch.tensor(3)},
        {"stop_token_ids": {3: 4}}, {"stop_token_ids": b"ab"}, {"temperature": 10**5000}, {"seed": 10**5000},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_bad_sampling_parameters(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        SamplingParams(**options)


def test_missing_mtp_head(tmp_path: Path) -> None:
    config = tiny_config()
    write_checkpoint(tmp_path, config, random_tensors(config, seed=1), style=Style(mtp="missing"))
    for drafter in ("mtp", "mtp+ngram"):
        with pytest.raises(CheckpointError, match="mtp"):
            load(tmp_path, drafter=drafter)
    engine = load(tmp_path, drafter="auto")
    assert engine.drafter.name == "auto"
    assert any("n-gram" in note for note in engine.notes)
    assert len(engine.generate([1, 2], GREEDY).token_ids) == 5


def test_auto_takes_the_head_where_there_is_one(folder: Path) -> None:
    chooser = load(folder, drafter="auto").drafter
    assert isinstance(chooser, AutoDrafter)
    assert chooser._has_head


@pytest.mark.parametrize("drafter", ["none", "ngram", "mtp", "mtp+ngram"])
def test_exact_length_and_context_limit(folder: Path, drafter: str) -> None:
    engine = load(folder, drafter=drafter, draft_length=5)
    for count in (1, 2, 7):
        out = engine.generate([1, 2, 3] * 4, SamplingParams(max_new_tokens=count, ignore_eos=True))
        assert (len(out.token_ids), out.finish_reason) == (count, "length")
    out = engine.generate([1, 2, 3] * 18, SamplingParams(max_new_tokens=1000, ignore_eos=True))
    assert (len(out.token_ids), out.finish_reason) == (64 - 54, "length")
    assert len(engine.generate([5] * 63, GREEDY).token_ids) == 1


@pytest.mark.parametrize("drafter", ["none", "mtp", "mtp+ngram"])
def test_stop_tokens_end_the_output_wherever_they_stand(folder: Path, drafter: str) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    tokens = load(folder, drafter="none").generate([7], params).token_ids
    engine = load(folder, drafter=drafter, draft_length=6)
    for stop in set(tokens):
        cut = tokens[: tokens.index(stop) + 1]
        both = SamplingParams(max_new_tokens=20, temperature=1.0, seed=3, stop_token_ids=(stop, 259), ignore_eos=True)
        out = engine.generate([7], both)
        assert (out.token_ids, out.finish_reason) == (cut, "stop")
        assert out.stats.tokens == len(cut)
        assert 0 <= out.stats.accepted <= out.stats.proposed
        assert out.stats.accepted <= len(cut)


def test_model_end_of_sequence_and_ignore_eos(folder: Path) -> None:
    engine = load(folder)
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=3)
    tokens = engine.generate([7], SamplingParams(max_new_tokens=20, temperature=1.0, seed=3, ignore_eos=True)).token_ids
    engine.eos_token_ids = (tokens[4], tokens[9])
    out = engine.generate([7], params)
    assert out.finish_reason == "stop"
    assert out.token_ids == tokens[: min(tokens.index(e) for e in engine.eos_token_ids) + 1]


def test_more_prompts_than_slots_and_params_for_each(folder: Path) -> None:
    engine = load(folder, slots=2)
    prompts = [[i, i + 1] for i in range(5)]
    params = [SamplingParams(max_new_tokens=3 + i, temperature=0.5 * i, seed=i, ignore_eos=True) for i in range(5)]
    together = engine.generate(prompts, params)
    assert [len(out.token_ids) for out in together] == [3, 4, 5, 6, 7]
    for prompt, own, out in zip(prompts, params, together, strict=True):
        assert engine.generate(prompt, own).token_ids == out.token_ids
    with pytest.raises(InputError, match="params: expected one, or one per prompt"):
        engine.generate(prompts, params[:2])


def test_statistics_add_up(folder: Path) -> None:
    out = load(folder, draft_length=4).generate([3, 4, 5], SamplingParams(max_new_tokens=30, temperature=1.0,
                                                                          ignore_eos=True))  # fmt: skip
    stats = out.stats
    assert stats.tokens == 30 == stats.steps + stats.accepted
    assert stats.proposed == sum(stats.proposed_by_position) > 0
    assert all(a <= p for a, p in zip(stats.accepted_by_position, stats.proposed_by_position, strict=True))
    assert stats.accepted_by_position == sorted(stats.accepted_by_position, reverse=True)
    assert stats.acceptance_rate == stats.accepted / stats.proposed
    assert stats.tokens_per_step == 30 / stats.steps
    assert 0 < stats.draft_s + stats.verify_s + stats.commit_s <= stats.decode_s
    assert stats.prefill_s > 0


def test_logits_match_what_decoding_sees(folder: Path) -> None:
    engine = load(folder, max_len=PREFILL_CHUNK + 100)
    tokens = [(i * i) % 260 for i in range(PREFILL_CHUNK + 50)]
    logits = engine.logits(tokens)
    assert logits.shape == (len(tokens), 260)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(engine.logits(tokens[:37]), logits[:37], atol=1e-3, rtol=0)
    greedy = engine.generate(tokens[:40], SamplingParams(max_new_tokens=1, ignore_eos=True)).token_ids[0]
    assert greedy == int(logits[39].argmax())
    with pytest.raises(InputError, match="at least one token"):
        engine.logits([])


def test_nan_weights_are_an_error_and_the_engine_lives_on(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config, seed=1)
    tensors["model.embed_tokens.weight"][13] = torch.nan
    write_checkpoint(tmp_path, config, tensors)
    engine = load(tmp_path, drafter="none", draft_length=0)
    with pytest.raises(NumericalError, match="position 2"):
        engine.generate([1, 13], GREEDY)
    healthy = engine.generate([1, 2], SamplingParams(max_new_tokens=1, ignore_eos=True))
    assert len(healthy.token_ids) == 1


def test_a_stream_closed_early_leaves_the_engine_usable(folder: Path) -> None:
    engine = load(folder, draft_length=3)
    expected = engine.generate([1, 2, 3], GREEDY).token_ids
    stream = engine.stream([9, 9, 9], SamplingParams(max_new_tokens=30, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.generate([1, 2, 3], GREEDY).token_ids == expected


def test_records_of_a_stream_are_the_output(folder: Path) -> None:
    engine = load(folder, draft_length=3)
    params = SamplingParams(max_new_tokens=17, temperature=1.0, seed=5, ignore_eos=True)
    tokens: list[int] = []
    for record in engine.stream([4, 2], params):
        assert record.position == 2 + len(tokens)
        tokens += record.tokens
    assert tokens == engine.generate([4, 2], params).token_ids


def test_tensor_prompts(folder: Path) -> None:
    engine = load(folder)
    prompt = torch.tensor([1, 2, 3])
    assert engine.generate(prompt.tolist(), GREEDY).token_ids == engine.generate(prompt, GREEDY).token_ids  # type: ignore[call-overload]


def test_an_open_stream_keeps_its_slots(folder: Path) -> None:
    """Anything else on the same engine would read into the stream's slot."""
    engine = load(folder, draft_length=3)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    expected = engine.generate([9, 8, 7], params).token_ids
    stream = engine.stream([9, 8, 7], params)
    first = next(stream)
    for call in (lambda: engine.generate([1], params), lambda: engine.logits([1]), lambda: next(engine.stream([1]))):
        with pytest.raises(InputError, match="open stream"):
            call()
    for _ in stream:
        pass
    assert first.sequence.output == expected
    assert engine.generate([9, 8, 7], params).token_ids == expected


def test_max_len_is_bounded_by_the_model(folder: Path) -> None:
    engine = Engine.from_pretrained(folder, max_len=100_000)
    assert engine.target.max_len == 1024


def test_a_head_of_two_layers_is_refused_or_passed_over(tmp_path: Path) -> None:
    config = tiny_config(mtp_layers=2)
    write_checkpoint(tmp_path, config, random_tensors(config, seed=1))
    with pytest.raises(CheckpointError, match="one layer, found 2"):
        load(tmp_path, drafter="mtp")
    chooser = load(tmp_path, drafter="auto").drafter
    assert isinstance(chooser, AutoDrafter)
    assert not chooser._has_head
    assert load(tmp_path, drafter="none").drafter.name == "none"


def test_a_drafter_that_oversteps_is_stopped(folder: Path) -> None:
    class Eager(NoDrafter):
        name = "eager"

        def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
            return [Draft((1,) * (depth + 1), source=self.name) for depth in depths]

    with pytest.raises(InputError, match="'eager': expected at most 3 tokens, found 4"):
        load(folder, drafter=Eager(), draft_length=3).generate([1, 2], GREEDY)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "expected a list of 1 Draft, found None"),
        ([], "expected a list of 1 Draft"),
        ([None], "expected a list of 1 Draft"),
        ([Draft(), Draft()], "expected a list of 1 Draft"),
        ([Draft(("a",))], r"tokens\[0\]: expected a token id from 0 to 259, found 'a'"),  # type: ignore[arg-type]
        ([Draft((1.5,))], "found 1.5"),  # type: ignore[arg-type]
        ([Draft(None)], "found None"),  # type: ignore[arg-type]
        ([Draft((260,))], "found 260"),
    ],
)
def test_a_drafter_that_answers_with_something_else(folder: Path, answer: Any, message: str) -> None:
    class Odd(NoDrafter):
        name = "odd"

        def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
            proposed: list[Draft] = answer
            return proposed

    engine = load(folder, drafter=Odd(), draft_length=3)
    with pytest.raises(InputError, match=f"drafter 'odd': .*{message}"):
        engine.generate([1, 2], GREEDY)
    engine.drafter = NoDrafter()
    assert len(engine.generate([1, 2], GREEDY).token_ids) == 5


@pytest.mark.parametrize("drafter", ["none", "mtp", "draft-model"])
@pytest.mark.parametrize("slots", [10**9, 2**62])
def test_more_slots_than_memory(folder: Path, drafter: str, slots: int) -> None:
    model = {"draft_model": folder} if drafter == "draft-model" else {}
    message = r"slots: [0-9]+ caches of [\d,]+ bytes: expected at most the [\d,]+ bytes of cpu's memory, found [\d,]+$"
    with pytest.raises(InputError, match=message):
        load(folder, drafter=drafter, slots=slots, **model)


def test_slots_that_the_allocator_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_of", lambda device: None)  # a system that does not tell
    with pytest.raises(InputError, match=r"slots: .* bytes: expected [\d,]+ bytes to be free on cpu, found: "):
        load_lane(folder, 10**12)


def load_lane(folder: Path, slots: int) -> KVCache:
    """One lane as the engine makes them: a single allocation."""
    target: Any = load(folder).target
    return build_kv(target.decoder.config, slots, 64, torch.float32, torch.device("cpu"))


def test_the_bytes_of_a_slot_are_those_of_its_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = load(folder, slots=2).target.cache  # type: ignore[union-attr]  # a DecoderTarget
    monkeypatch.setattr(memory, "memory_of", lambda device: 2 * cache.bytes_per_slot - 1)
    with pytest.raises(InputError, match=f"slots: 2 caches of {cache.bytes_per_slot:,} bytes"):
        build_cache(parse_config(read_json(folder / "config.json")), 2, 64, torch.float32, torch.device("cpu"))


def test_positions_that_do_not_fit(tmp_path: Path) -> None:
    config = tiny_config(max_positions=2**40)
    write_checkpoint(tmp_path, config, random_tensors(config, seed=1))
    with pytest.raises(InputError, match="max_len: rotary angles of 1099511627776 positions: expected at most"):
        Engine.from_pretrained(tmp_path, max_len=2**41)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": None}, "target: expected a Target .*found None"),
        ({"target": DecoderTarget}, "target: expected a Target"),
        ({"drafter": None}, "drafter: expected a Drafter, found None"),
        ({"drafter": "ngram"}, "drafter: expected a Drafter, found 'ngram'"),
        ({"drafter": NoDrafter}, "drafter: expected a Drafter, found <class"),
        ({"eos_token_ids": 5}, "eos_token_ids: expected a list of token ids, found 5"),
        ({"eos_token_ids": None}, "eos_token_ids: expected a list of token ids, found None"),
    ],
)
def test_parts_that_are_none(folder: Path, change: dict[str, Any], message: str) -> None:
    parts = {"target": load(folder).target, "drafter": NoDrafter(), "draft_length": 0}
    with pytest.raises(InputError, match=message):
        Engine(**{**parts, **change})


@pytest.mark.parametrize("draft_length", [-1, 0, 100, "x"])
def test_the_constructor_checks_too(folder: Path, draft_length: Any) -> None:
    engine = load(folder, drafter="ngram")
    with pytest.raises(InputError, match="draft_length"):
        Engine(engine.target, engine.drafter, draft_length)


@pytest.mark.parametrize("params", [5, "greedy", {"seed": 1}, [None]], ids=str)
def test_params_of_another_kind(folder: Path, params: Any) -> None:
    engine = load(folder)
    with pytest.raises(InputError, match="params: expected SamplingParams"):
        engine.generate([[1]], params)
    with pytest.raises(InputError, match="params: expected SamplingParams"):
        engine.stream([1], params)


@pytest.mark.parametrize("model", [None, 5, "~no-such-user/x", "a" * 5000, "a\0b"], ids=repr)
def test_models_that_cannot_be(model: Any) -> None:
    with pytest.raises(CheckpointError, match="expected"):
        Engine.from_pretrained(model)


def test_torch_names_are_taken_too(folder: Path) -> None:
    engine = load(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (
        engine.generate([1, 2], GREEDY).token_ids == load(folder, dtype="bfloat16").generate([1, 2], GREEDY).token_ids
    )


def test_the_caller_of_a_stream_keeps_its_grad_mode(folder: Path) -> None:
    engine = load(folder, draft_length=3)
    stream = engine.stream([1, 2, 3], SamplingParams(max_new_tokens=9, ignore_eos=True))
    next(stream)
    assert not torch.is_inference_mode_enabled()
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    with torch.no_grad():
        for _ in stream:
            pass
    assert torch.is_grad_enabled()


def test_a_batch_of_arrays(folder: Path) -> None:
    engine = load(folder, slots=2)
    prompts: list[Any] = [torch.tensor([1, 2]), torch.tensor([3]).numpy(), (4, 5)]
    together: Any = engine.generate(prompts, GREEDY)
    expected = [engine.generate(prompt, GREEDY).token_ids for prompt in ([1, 2], [3], [4, 5])]
    assert [out.token_ids for out in together] == expected


def test_progress_counts_the_tokens_that_have_been_read(folder: Path) -> None:
    engine = load(folder, drafter="none", draft_length=0, max_len=300)
    seen: list[tuple[int, int]] = []
    list(engine.stream([5] * 200, SamplingParams(max_new_tokens=2), progress=lambda *counts: seen.append(counts)))
    assert seen == [(199, 200)]  # the last token is the first window's
