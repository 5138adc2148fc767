"""The draft-model drafter: its drafts are its model's own continuation whatever was refused, and output stays plain."""

from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.draft_model import CATCH_UP, DraftModelDrafter
from surefoot.drafters.ngram import NgramDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.errors import InputError
from surefoot.prove.table import Row, TableTarget, decode, decode_batch, hashed_rows
from surefoot.sampling import Acceptance, SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Draft
from surefoot.verify import choose, probabilities

V = 6


class SmallModel(TableTarget):
    """A strict target that can be rewound."""

    def __init__(self, row: Row, max_len: int = 4096, slots: int = 8, vocab_size: int = V) -> None:
        super().__init__(row, vocab_size, max_len, slots)
        self.marks: dict[int, int] = {}

    def mark(self, slot: int) -> None:
        assert slot not in self.windows
        self.marks[slot] = len(self.committed[slot])

    def rewind(self, slot: int) -> None:
        self.committed[slot] = self.committed[slot][: self.marks[slot]]


class Checked(DraftModelDrafter):
    """Fails unless every draft is what the small model's rows say about the whole text."""

    def __init__(self, row: Row, **sizes: int) -> None:
        self.small = SmallModel(row, **sizes)
        super().__init__(self.small, V)
        self.row = row
        self.lengths: list[int] = []

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        drafts = super().propose(sequences, depths)
        for sequence, depth, draft in zip(sequences, depths, drafts, strict=True):
            self.lengths.append(len(draft.tokens))
            assert len(draft.tokens) <= depth
            prefix = tuple(sequence.tokens)
            for place, token in enumerate(draft.tokens):
                row = self.row(prefix)[None]
                if draft.probs is not None:
                    assert torch.equal(draft.probs[place], probabilities(row, sequence.params)[0])
                else:
                    assert token == choose(row, sequence.params, len(prefix))[0]
                prefix += (token,)
        return drafts


@settings(max_examples=40, deadline=None)
@given(
    salt=st.integers(0, 10**6),
    depth=st.integers(1, 6),
    temperature=st.sampled_from([0.0, 0.4, 1.3]),
    acceptance=st.sampled_from(["coupled", "rejection"]),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=5),
)
def test_drafts_are_the_small_models_own(
    salt: int, depth: int, temperature: float, acceptance: Acceptance, prompt: list[int]
) -> None:
    """Right, wrong or half right: the small model's state is that of the text, and the output is plain decoding's."""
    big = hashed_rows(V, salt, order=3)

    def small(prefix: tuple[int, ...]) -> torch.Tensor:
        other = hashed_rows(V, salt + 1, order=2)
        return big(prefix) if len(prefix) % 3 else other(prefix)

    params = SamplingParams(max_new_tokens=25, temperature=temperature, seed=salt, acceptance=acceptance)
    drafted = decode(TableTarget(big, V), Checked(small), params, depth, prompt, stop=(0,))
    if temperature == 0 or acceptance == "coupled":
        assert drafted.output == decode(TableTarget(big, V), NoDrafter(), params, 0, prompt, stop=(0,)).output


def test_perfect_model_is_always_accepted_in_k_passes() -> None:
    row = hashed_rows(V)
    drafter = Checked(row)
    run = decode(TableTarget(row, V), drafter, SamplingParams(max_new_tokens=20), depth=3)
    assert [r.accepted for r in run.records] == [3] * 5
    assert drafter.small.verified == 3 * 5


def test_a_batch_shares_passes_and_drafts_as_alone() -> None:
    big, small = hashed_rows(V), hashed_rows(V, order=4)
    requests = [([1, 2], SamplingParams(max_new_tokens=12)), ([3], SamplingParams(max_new_tokens=20, temperature=1.0))]
    together = Checked(small)
    runs = decode_batch(TableTarget(big, V), together, requests, depth=4)
    for run, (prompt, params) in zip(runs, requests, strict=True):
        assert run.output == decode(TableTarget(big, V), Checked(small), params, 4, prompt).output
    assert together.small.verified <= 4 * max(len(run.records) for run in runs)
    assert together.small.committed == {}


def test_drafting_ends_at_a_stop_token() -> None:
    row = hashed_rows(V)
    plain = decode(TableTarget(row, V), NoDrafter(), SamplingParams(max_new_tokens=2), depth=0).output
    assert plain[0] != plain[1]
    run = decode(TableTarget(row, V), Checked(row), SamplingParams(max_new_tokens=9), depth=5, stop=(plain[1],))
    assert [r.draft.tokens for r in run.records] == [tuple(plain)]


@pytest.mark.parametrize("max_len", [2, 4, 9, 10, 11, 12])
def test_context_shorter_than_the_targets(max_len: int) -> None:
    """Case 27 (NVIDIA/TensorRT-LLM#16826): drafting stops, the output goes on."""
    big = hashed_rows(V)
    drafter = Checked(big, max_len=max_len)
    run = decode(TableTarget(big, V), drafter, SamplingParams(max_new_tokens=30), depth=3, prompt=[1, 2, 3, 4])
    assert len(run.output) == 30
    assert drafter.lengths[-1] == 0
    assert (sum(drafter.lengths) > 0) == (max_len >= 4)
    assert run.output == decode(TableTarget(big, V), NoDrafter(), run.sequence.params, 0, [1, 2, 3, 4]).output


def test_catches_up_after_another_drafter_was_busy() -> None:
    row = hashed_rows(V, order=3)
    drafter = Checked(row)
    sequence = Sequence(0, [1, 2, 3], SamplingParams(), limit=10**6)
    drafter.observe(sequence, 0, None)
    for more in (1, CATCH_UP - 1, CATCH_UP, 3 * CATCH_UP + 2, 0):
        sequence.tokens += [token % V for token in range(more)]
        drafter.propose([sequence], [3])
        drafter.propose([sequence], [2])  # once more with nothing new
    both = CombinedDrafter(NgramDrafter(), Checked(row), min_match=3)
    params = SamplingParams(max_new_tokens=200)
    plain = decode(TableTarget(row, V), NoDrafter(), params, 0)
    assert decode(TableTarget(row, V), both, params, 7).output == plain.output


def test_errors() -> None:
    with pytest.raises(InputError, match="vocabulary of 7 tokens, found 6"):
        DraftModelDrafter(SmallModel(hashed_rows(V)), 7)
    drafter = Checked(hashed_rows(V), slots=1)
    with pytest.raises(InputError, match="slot 1"):
        drafter.propose([Sequence(1, [1], SamplingParams(), limit=9)], [2])


def test_new_sequence_in_a_slot_that_was_never_released() -> None:
    drafter = Checked(hashed_rows(V))
    drafter.propose([Sequence(0, [1, 2], SamplingParams(), limit=9)], [2])
    drafter.propose([Sequence(0, [3], SamplingParams(), limit=9)], [2])
