"""Drafts of a set acceptance: the shares that were set, and plain decoding's tokens whatever they are."""

from __future__ import annotations

import pytest

from surefoot.bench.measure import kept_shares
from surefoot.bench.settings import PLAIN, Settings
from surefoot.bench.synthetic import Continuations, SyntheticDrafter
from surefoot.drafters.ngram import NgramDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.engine import Engine, Generation
from surefoot.errors import InputError
from surefoot.prove.table import TableTarget, hashed_rows
from surefoot.sampling import SamplingParams
from surefoot.verify.synthetic import synthetic_draft

VOCAB = 17
SHARES = (0.92, 0.85, 0.67)
PROMPTS = [[1, 2, 3], [4, 5], [6]]
PARAMS = SamplingParams(max_new_tokens=400)


def decode(shares: tuple[float, ...], wrong: int = 0) -> tuple[list[Generation], list[Generation]]:
    """Plainly, and with the shares set; `wrong` is added to every token of the known continuation."""
    target = TableTarget(hashed_rows(VOCAB, order=3), VOCAB, slots=3)
    plain = Engine(target, NoDrafter(), 0).generate(PROMPTS, PARAMS)
    texts = Continuations()
    texts.learn(PROMPTS, [[(token + wrong) % VOCAB for token in answer.token_ids] for answer in plain])
    drafter = SyntheticDrafter(NgramDrafter(), shares, texts, VOCAB)
    return plain, Engine(target, drafter, len(shares)).generate(PROMPTS, PARAMS)


class TestShares:
    def test_are_reached(self) -> None:
        plain, ours = decode(SHARES)
        assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in plain]
        assert sum(answer.stats.steps for answer in ours) > 300
        assert kept_shares([answer.stats for answer in ours]) == pytest.approx(SHARES, abs=0.04)

    @pytest.mark.parametrize("share, per_step", [(1.0, 4), (0.0, 1)])
    def test_ends_are_exact(self, share: float, per_step: int) -> None:
        plain, ours = decode((share,) * 3)
        assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in plain]
        assert [answer.stats.steps for answer in ours] == [400 // per_step] * 3

    def test_of_a_wrong_continuation_are_not_but_tokens_stay(self) -> None:
        plain, ours = decode(SHARES, wrong=2)
        assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in plain]
        assert kept_shares([answer.stats for answer in ours])[0] < 0.5

    def test_come_of_a_number_keyed_by_slot_and_position(self) -> None:
        keys = [(slot, position) for slot in range(20) for position in range(50)]
        drafts = [synthetic_draft([3, 5], [0.5, 0.5], *key, 99) for key in keys]
        assert drafts == [synthetic_draft([3, 5], [0.5, 0.5], *key, 99) for key in keys]
        assert {tuple(draft) for draft in drafts} == {(3, 5), (4, 6)}
        kept = [draft == [3, 5] for draft in drafts]
        assert sum(kept) == pytest.approx(500, abs=50)
        assert kept[:50] != kept[50:100]  # another slot


class TestSettings:
    def test_deeper_drafts_are_left_out_and_that_is_said(self) -> None:
        settings = Settings(shape="qwen3.5-9b", depths=(1, 2, 4), synthetic_acceptance=(0.9, 0.5))
        assert [method.name for method in settings.methods(with_head=True)] == [
            PLAIN, "n-gram, K = 1", "n-gram, K = 2", "n-gram, K = 4", "MTP, K = 1", "MTP, K = 2",
            "MTP + n-gram, K = 1", "MTP + n-gram, K = 2",
        ]  # fmt: skip
        set_ones = [method.drafter for method in settings.methods(True) if settings.sets_acceptance(method)]
        assert set_ones == ["mtp"] * 2 + ["mtp+ngram"] * 2
        first, second = settings.notes
        assert "acceptance set to 0.9 0.5" in first
        assert "MTP at K = 4 left out" in second
        assert "--synthetic-acceptance 0.9,0.5" in settings.command

    @pytest.mark.parametrize(
        "shares, depths, named",
        [
            ((0.5, 0.6), (1,), "none above the one before it, found 0.5, 0.6"),
            ((1.5,), (1,), "from 0 to 1"),
            ((-0.1,), (1,), "from 0 to 1"),
            ((float("nan"),), (1,), "from 0 to 1"),
            ((0.5, 0.4), (3, 4), "up to the least depth, 3, found 2"),
        ],
    )
    def test_refused(self, shares: tuple[float, ...], depths: tuple[int, ...], named: str) -> None:
        with pytest.raises(InputError, match=named):
            Settings(shape="qwen3.5-9b", depths=depths, synthetic_acceptance=shares)

    def test_without_a_heads_drafter(self) -> None:
        settings = Settings(shape="qwen3.5-9b", synthetic_acceptance=(0.5,))
        with pytest.raises(InputError, match="expected with drafts of an MTP head"):
            settings.methods(with_head=False)
