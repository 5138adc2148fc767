"""A reduced draft vocabulary: which tokens it holds, what it refuses, and that it changes no token of the output."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot import Engine, SamplingParams
from surefoot.drafters import mtp
from surefoot.drafters.ngram import NgramDrafter
from surefoot.drafters.vocabulary import check_vocabulary, count_tokens, ranked
from surefoot.engine.drafting import draft_vocabulary
from surefoot.engine.loaded import LoadedModel
from surefoot.errors import CheckpointError, InputError
from surefoot.kernels.linear import LinearFactory
from surefoot.kernels.quantise import Quantised, dense_of
from surefoot.loading.tiny import Style, tiny_config, write_checkpoint
from surefoot.model import Decoder, DraftHead
from surefoot.model.tensors import random_tensors
from surefoot.prove.enumeration import Dice, every_verdict, exact_law
from surefoot.prove.table import Row
from surefoot.verify import draft_token

CONFIG = tiny_config(vocab_size=20, eos_token_ids=(19,))
VOCAB = CONFIG.vocab_size
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9], [1, 2] * 20]
GREEDY = SamplingParams(max_new_tokens=30, ignore_eos=True)
COUPLED = SamplingParams(max_new_tokens=30, temperature=0.9, top_k=15, top_p=0.95, min_p=0.01, seed=7, ignore_eos=True)
BUNDLED = Path(__file__).parents[2] / "src" / "surefoot" / "models" / "surefoot-demo" / "draft_vocab.json"


def tensors() -> dict[str, Tensor]:
    """Of a model whose drafts are sometimes right."""
    made = random_tensors(CONFIG, seed=2)
    made["model.embed_tokens.weight"] *= 0.3
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, CONFIG, tensors())
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return LoadedModel.from_checkpoint(folder, device=torch.device("cpu"), dtype=torch.float32, max_len=128,
                                       mtp="require")  # fmt: skip


# ---------------------------------------------------------------- counting


def test_the_most_frequent_come_first_and_equals_by_id() -> None:
    assert count_tokens([[3, 3, 1], [], [1, 3, 0]], 6) == [3, 1, 0, 2, 4, 5]
    assert count_tokens([], 3) == [0, 1, 2]
    assert ranked([4, 0], 6) == [4, 0, 1, 2, 3, 5]


@pytest.mark.parametrize("token", [-1, 6])
def test_ids_outside_the_vocabulary_are_not_counted(token: int) -> None:
    with pytest.raises(InputError, match=r"texts\[1\]: expected token ids from 0 to 5"):
        count_tokens([[1], [2, token]], 6)


def test_the_bundled_list_ranks_every_token_once() -> None:
    ids = check_vocabulary("bundled", json.loads(BUNDLED.read_text(encoding="utf-8")), 8192)
    assert len(ids) == 8192
    assert ids != sorted(ids)


# ---------------------------------------------------------------- choosing


def test_a_number_takes_the_first_of_the_counted_list_and_says_so(tmp_path: Path) -> None:
    assert draft_vocabulary(3, 24, (20, 99), tmp_path) == (
        (0, 1, 2, 20),
        ["draft vocabulary: ids 0 to 2, as the model has no draft_vocab.json; ids of a BPE tokenizer come roughly by "
         "frequency"],
    )  # fmt: skip
    assert draft_vocabulary(3, 24, (), None)[0] == (0, 1, 2)
    (tmp_path / "draft_vocab.json").write_text("[7, 5]")
    assert draft_vocabulary(1, 24, (20,), tmp_path) == ((7, 20), ["draft vocabulary: the first 1 of draft_vocab.json"])
    assert draft_vocabulary(3, 24, (), tmp_path)[0] == (0, 5, 7)  # behind the list, by id
    assert draft_vocabulary(24, 24, (20,), tmp_path)[0] == tuple(range(24))


def test_a_file_and_a_list_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text("[9, 4]")
    for wanted in (file, str(file), [9, 4], torch.tensor([9, 4])):
        assert draft_vocabulary(wanted, 24, (20,), None) == ((4, 9, 20), [])  # type: ignore[arg-type]  # tensors will do


@pytest.mark.parametrize(
    "wanted, message",
    [
        (0, "draft_vocab: expected an integer of at least 1 and at most 20, found 0"),
        (21, "found 21"),
        (True, "found True"),
        (2.5, "draft_vocab: expected a list of token ids, found 2.5"),
        ([], "draft_vocab: expected at least one token id, found none"),
        ([3, 20], r"draft_vocab\[1\]: expected a token id from 0 to 19, found 20"),
        ([3, 5, 3], r"draft_vocab\[2\]: expected every token id once, found 3 again"),
        ("nowhere.json", "draft_vocab: nowhere.json: expected a JSON file, found nothing"),
    ],
)
def test_what_is_refused(model: LoadedModel, wanted: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Engine.over(model, draft_vocab=wanted)


@pytest.mark.parametrize(
    "text, message", [("{}", "expected a JSON list, found dict"), ("[1, 99]", "ids"), ("[", "JSON")]
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "draft_vocab.json"
    file.write_text(text)
    with pytest.raises(InputError, match=f"draft_vocab: {file}.*{message}"):
        draft_vocabulary(file, 24, (), None)
    with pytest.raises(CheckpointError, match=message):
        draft_vocabulary(5, 24, (), tmp_path)


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft-model", NgramDrafter()])
def test_a_drafter_without_head_is_refused_before_anything_is_read(drafter: Any, tmp_path: Path) -> None:
    draft_model = tmp_path if drafter == "draft-model" else None
    with pytest.raises(InputError, match="draft_vocab: expected with an MTP head's drafter"):
        Engine.from_pretrained(tmp_path, drafter=drafter, draft_vocab=5, draft_model=draft_model)


def test_a_model_without_head_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, tensors(), style=Style(mtp="missing"))
    assert Engine.from_pretrained(tmp_path, drafter="auto").notes
    with pytest.raises(InputError, match="draft_vocab: expected a model with an MTP head"):
        Engine.from_pretrained(tmp_path, drafter="auto", draft_vocab=5)


def test_notes_and_parts_are_kept_apart(model: LoadedModel) -> None:
    """Engines with the same vocabulary share its rows; others have a drafter of their own."""
    few, again, many, whole = (Engine.over(model, draft_vocab=n) for n in (4, 4, 9, None))
    assert few.drafter is again.drafter
    assert len({id(engine.drafter) for engine in (few, many, whole)}) == 3
    assert few.target is whole.target
    assert "draft vocabulary: ids 0 to 3" in few.notes[-1]
    assert whole.notes == ()
    rows = 5 * (CONFIG.hidden_size * 4 + 8)  # float32, and their ids; 4 tokens and the end id
    assert few.memory().weights - whole.memory().weights == rows


# ---------------------------------------------------------------- the rows


@pytest.mark.parametrize("kind", ["packed", "packed bfloat16", "blocks", "tied", "quantised"])
@torch.inference_mode()
def test_rows_are_those_of_the_lm_head(kind: str) -> None:
    config = tiny_config(vocab_size=300, tied=kind == "tied")
    dtype = torch.bfloat16 if kind == "packed bfloat16" else torch.float32
    linear = LinearFactory(pack=kind not in ("blocks", "quantised"), quantise=kind == "quantised")
    decoder = Decoder(config, random_tensors(config, 1, dtype=dtype), 16, linear)
    ids = [299, 7, 0, 64, 65]
    head = DraftHead(decoder, ids)
    assert head.ids.tolist() == sorted(ids)
    weight, own = (dense_of(layer.rows(torch.arange(n))) for layer, n in ((decoder.head, 300), (head.linear, 5)))
    assert torch.equal(own, weight[head.ids])
    assert isinstance(head.linear.rows(torch.tensor([0])), Quantised) == (kind == "quantised")
    hidden = torch.randn(4, config.hidden_size, generator=torch.Generator().manual_seed(0))
    found, expected = head.logits(hidden), decoder.logits(hidden)
    assert found.shape == expected.shape
    torch.testing.assert_close(found[:, head.ids], expected[:, head.ids], atol=1e-4, rtol=1e-4)
    others = torch.ones(300, dtype=torch.bool)
    others[head.ids] = False
    assert (found[:, others] == -math.inf).all()
    assert torch.equal(head.logits(hidden[:2]), found[:2])


# ---------------------------------------------------------------- drafting


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("drafter", ["mtp", "mtp+ngram"])
def test_no_size_changes_a_token(model: LoadedModel, drafter: str, params: SamplingParams) -> None:
    expected = [Engine.over(model, drafter="none", draft_length=0).generate(p, params).token_ids for p in PROMPTS]
    kept = []
    for size in (1, 3, VOCAB // 2, VOCAB):
        engine = Engine.over(model, drafter=drafter, draft_vocab=size, slots=2)
        outputs = engine.generate(PROMPTS, params)
        assert [out.token_ids for out in outputs] == expected, size
        assert engine.generate(PROMPTS[0], params).token_ids == expected[0]
        kept.append(sum(out.stats.accepted for out in outputs))
    assert kept[-1] > 3
    assert len(set(kept)) > 1


def drafts(engine: Engine, params: SamplingParams) -> list[tuple[int, ...]]:
    return [step.draft.tokens for prompt in PROMPTS[:1] for step in engine.stream(prompt, params)]


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_all_tokens_and_all_but_one_never_drafted_draft_alike(model: LoadedModel, rule: str) -> None:
    """Noise is the tokens' own: those that are never drafted are not missed."""
    rules: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "rejection": {"acceptance": "rejection"}}
    params = SamplingParams(**{**vars(GREEDY), "max_new_tokens": 9, "temperature": 0.7, **rules.get(rule, {})})
    free = drafts(Engine.over(model), params)
    assert drafts(Engine.over(model, draft_vocab=VOCAB), params) == free
    used = {token for draft in free for token in draft}
    if rule != "rejection":  # whose draws go through the sum over all tokens
        assert len(used) < VOCAB - 1
        assert drafts(Engine.over(model, draft_vocab=sorted(used)), params) == free
    assert drafts(Engine.over(model, draft_vocab=[min(used)]), params) != free


@pytest.mark.parametrize("drafter", ["mtp", "mtp+ngram"])
def test_only_the_vocabulary_is_drafted(model: LoadedModel, drafter: str) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=1.0, ignore_eos=True, acceptance="rejection")
    engine = Engine.over(model, drafter=drafter, draft_vocab=[3, 8])
    records = [step for prompt in PROMPTS for step in engine.stream(prompt, params)]
    drawn = {token for step in records if step.draft.source == "mtp" for token in step.draft.tokens}
    assert {3, 8} <= drawn <= {3, 8, 19}  # 19 ends a text


def test_a_chain_ends_after_an_end_id_outside_the_list(model: LoadedModel) -> None:
    """The end ids are always there: a text whose end could not be drafted would cost a step."""
    head, _ = model.draft_head([0])
    assert head is not None
    assert head.ids.tolist() == [0, 19]


# ---------------------------------------------------------------- the law of the p/q rule, with the engine's own parts

SMALL = tiny_config(vocab_size=4, layer_types=("linear_attention", "full_attention"), eos_token_ids=())
TEXT = (1, 2, 0, 1)
DRAWN = SamplingParams(max_new_tokens=3, temperature=0.8, acceptance="rejection")


def small_model() -> LoadedModel:
    made = random_tensors(SMALL, seed=5)
    return LoadedModel.from_tensors(SMALL, made, 32)


def target_row(model: LoadedModel) -> Row:
    engine = Engine.over(model, drafter="none", draft_length=0)
    return lambda prefix: engine.logits(prefix)[-1]


def engine_law(
    model: LoadedModel, vocabulary: list[int], params: SamplingParams, lie: bool = False
) -> dict[tuple[int, ...], float]:
    """The exact law of what the engine gives: every draw of the MTP drafter and of verification is taken in turn. With
    `lie` the drafter hands over a q that spreads over all tokens."""
    dice, law = Dice(), defaultdict[tuple[int, ...], float](float)
    engine = Engine.over(model, draft_vocab=vocabulary, draft_length=2)

    def drawn(logits: Tensor, params: SamplingParams, position: int, start: int) -> tuple[int, Tensor | None]:
        _, probs = draft_token(logits, params, position, start)
        assert probs is not None
        token = dice.roll(probs.tolist())
        return token, (probs + 0.2) / (probs + 0.2).sum() if lie else probs

    with pytest.MonkeyPatch.context() as patch, every_verdict(dice):
        patch.setattr(mtp, "draft_token", drawn)
        for _ in dice.outcomes():
            law[tuple(engine.generate(TEXT, params).token_ids)] += dice.chance
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-6)
    return law


def off(law: dict[tuple[int, ...], float], model: LoadedModel, params: SamplingParams) -> float:
    """Distance from the target's own law."""
    expected = exact_law(target_row(model), params, TEXT, params.max_new_tokens)
    return sum(abs(law.get(key, 0.0) - expected.get(key, 0.0)) for key in {*law, *expected}) / 2


@pytest.mark.parametrize("vocabulary", [[2], [0, 3], [1, 2, 3]])
@pytest.mark.parametrize("setting", [{}, {"top_k": 2}, {"top_p": 0.8, "min_p": 0.1}])
def test_exact_law_with_a_draft_vocabulary(vocabulary: list[int], setting: dict[str, Any]) -> None:
    """Every outcome: q lives on the vocabulary, and all other tokens come from the residual."""
    params = SamplingParams(**{**vars(DRAWN), **setting})
    model = small_model()
    assert off(engine_law(model, vocabulary, params), model, params) < 1e-5


def test_control_a_q_beyond_the_vocabulary_is_noticed() -> None:
    model = small_model()
    assert off(engine_law(model, [0, 3], DRAWN, lie=True), model, DRAWN) > 0.02
