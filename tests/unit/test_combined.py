"""The combined drafter: who is asked when, and that both see everything."""

from collections.abc import Sequence as Seq

import pytest
from torch import Tensor

from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.ngram import NgramDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.errors import InputError
from surefoot.prove.table import Right, TableTarget, decode, hashed_rows
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Draft


class Recorder:
    """Drafts 9s and writes down what it is asked and shown."""

    name = "recorder"

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.shown: list[int] = []
        self.released: list[int] = []

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        self.asked.append([s.slot for s in sequences])
        return [Draft((9,) * depth, source=self.name) for depth in depths]

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        self.shown.append(position)

    def release(self, sequence: Sequence) -> None:
        self.released.append(sequence.slot)


def sequence_of(slot: int, *tokens: int) -> Sequence:
    return Sequence(slot, list(tokens), SamplingParams(), limit=10**6)


def test_long_match_goes_to_ngram_and_the_rest_in_one_call() -> None:
    other = Recorder()
    drafter = CombinedDrafter(NgramDrafter(), other, min_match=3)
    assert drafter.name == "recorder+ngram"
    batch = [
        sequence_of(0, 1, 2, 4, 1, 2),  # a match of two
        sequence_of(1, 1, 2, 3, 4, 1, 2, 3),  # a match of three
        sequence_of(2, 5, 6, 7),  # none
    ]
    drafts = drafter.propose(batch, [2, 2, 1])
    assert [d.tokens for d in drafts] == [(9, 9), (4, 1), (9,)]
    assert [d.source for d in drafts] == ["recorder", "ngram", "recorder"]
    assert other.asked == [[0, 2]]


def test_match_is_measured_past_the_longest_ngram() -> None:
    text = list(range(20))
    drafter = CombinedDrafter(NgramDrafter(max_ngram=3), Recorder(), min_match=10)
    assert drafter.propose([sequence_of(0, *text, 50, *text[:12])], [2])[0].tokens == (12, 13)


def test_the_other_is_not_asked_for_nothing() -> None:
    other = Recorder()
    drafter = CombinedDrafter(NgramDrafter(), other, min_match=2)
    assert drafter.propose([sequence_of(0, 1, 2, 1, 2)], [1])[0].tokens == (1,)
    assert other.asked == []


def test_both_observe_and_release() -> None:
    other = Recorder()
    ngram = NgramDrafter()
    drafter = CombinedDrafter(ngram, other)
    sequence = sequence_of(3, 1, 2, 1, 2)
    drafter.observe(sequence, 0, None)
    drafter.release(sequence)
    assert other.shown == [0]
    assert other.released == [3]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_is_plain_decoding(temperature: float) -> None:
    row = hashed_rows(5, order=2)
    params = SamplingParams(max_new_tokens=120, temperature=temperature, seed=4)
    plain = decode(TableTarget(row, 5), NoDrafter(), params, depth=0)
    combined = decode(TableTarget(row, 5), CombinedDrafter(NgramDrafter(), Right(row)), params, depth=5)
    assert combined.output == plain.output
    assert {r.draft.source for r in combined.records} >= {"ngram", "right"}


def test_min_match_is_checked() -> None:
    with pytest.raises(InputError, match="min_match"):
        CombinedDrafter(NgramDrafter(), NoDrafter(), min_match=0)
