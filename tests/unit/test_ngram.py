"""N-gram lookup: the cases of the two systems it comes from, a naive scan, and the amount of work."""

from typing import SupportsIndex, overload

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.drafters.ngram import LONGEST, Match, MatchRule, NgramDrafter, NgramIndex, propose
from surefoot.errors import InputError
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence

RULES: tuple[MatchRule, ...] = ("latest", "first")


def sequence_of(tokens: list[int], stop_ids: frozenset[int] = frozenset(), slot: int = 0) -> Sequence:
    return Sequence(slot, list(tokens), SamplingParams(), limit=10**6, stop_ids=stop_ids)


@pytest.mark.parametrize(
    ("prompt", "recent", "max_ngram", "max_draft", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [2, 3, 4], 5, 3, [5, 6, 7]),
        ([1, 2, 3], [10, 11, 12], 5, 3, []),
        ([1, 2, 3, 4], [], 5, 3, []),
        ([1, 2, 3, 4], [2], 5, 3, []),
        ([1, 2, 3, 4, 5, 3, 4, 5, 6, 7], [2, 3, 4, 5], 5, 3, [3, 4, 5]),
        (list(range(1, 11)), [1, 2], 5, 2, [3, 4]),
        ([1, 2, 3], [2, 3], 5, 3, []),
        ([1, 2, 3, 4], [2, 3], 5, 3, [4]),
        ([5, 6, 7, 8, 9], [5, 6, 7], 10, 3, [8, 9]),
    ],
)
def test_table(prompt: list[int], recent: list[int], max_ngram: int, max_draft: int, draft: list[int]) -> None:
    assert propose(prompt, recent, max_ngram, max_draft, match="first") == draft


def test_rules_choose_different_occurrences() -> None:
    tokens = [1, 2, 7, 1, 2, 8, 1, 2]
    assert propose(tokens, tokens, match="first") == [7, 1, 2, 8]
    assert propose(tokens, tokens, match="latest") == [8, 1, 2]
    assert NgramDrafter(match="first").propose([sequence_of(tokens)], [2])[0].tokens == (7, 1)
    assert NgramDrafter(match="latest").propose([sequence_of(tokens)], [2])[0].tokens == (8, 1)


def test_longer_suffix_beats_later_place() -> None:
    tokens = [1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3]
    assert NgramDrafter().propose([sequence_of(tokens)], [1])[0].tokens == (9,)


def naive(tokens: list[int], max_ngram: int, min_ngram: int, rule: MatchRule) -> Match | None:
    for length in range(max_ngram, min_ngram - 1, -1):
        places = [
            end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[len(tokens) - length :]
        ]
        if length <= len(tokens) and places:
            start = places[0] if rule == "first" else places[-1]
            while length < min(LONGEST, start) and tokens[start - length - 1] == tokens[-length - 1]:
                length += 1
            return Match(length, start)
    return None


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from(RULES),
    st.integers(1, 9),
)
def test_index_agrees_with_a_scan(tokens: list[int], low: int, more: int, rule: MatchRule, pieces: int) -> None:
    """Whatever the text and however it arrives, the index finds what a scan finds, and `propose` copies from it."""
    grown: list[int] = []
    index = NgramIndex(grown, low + more, low, rule)
    for at in range(0, len(tokens), pieces):
        grown.extend(tokens[at : at + pieces])
        index.update()
        found = index.find()
        assert found == naive(grown, low + more, low, rule)
        copied = propose(grown, grown, low + more, 4, rule, low)
        assert copied == ([] if found is None else grown[found.start : found.start + 4])


class CountingList(list[int]):
    """A list that counts the items read from it."""

    reads = 0

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> list[int]: ...
    def __getitem__(self, key: SupportsIndex | slice, /) -> int | list[int]:
        self.reads += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
        return super().__getitem__(key)


def work_of_one_step(length: int) -> int:
    tokens = CountingList(i * i % 977 for i in range(length))
    drafter = NgramDrafter()
    sequence = Sequence(0, tokens, SamplingParams(), limit=10**6)
    drafter.observe(sequence, 0, None)
    tokens.append(1)
    tokens.reads = 0
    drafter.propose([sequence], [8])
    drafter.observe(sequence, length, None)
    return tokens.reads


def test_work_per_token_does_not_grow_with_the_context() -> None:
    assert work_of_one_step(100_000) <= 2 * LONGEST + 3 * 8
    assert work_of_one_step(100_000) <= work_of_one_step(2_000)


def test_draft_follows_itself_past_the_end_of_the_text() -> None:
    tokens = [4, 1, 2, 3, 1, 2, 3, 1, 2]
    assert NgramDrafter().propose([sequence_of(tokens)], [8])[0].tokens == (3, 1, 2, 3, 1, 2, 3, 1)


def test_one_token_is_worth_a_short_draft() -> None:
    drafter = NgramDrafter(min_ngram=1)
    assert drafter.propose([sequence_of([1, 2, 3, 4, 5, 6, 1])], [8])[0].tokens == (2, 3, 4)
    assert drafter.propose([sequence_of([1, 2, 3, 4, 5, 6, 1, 2])], [5])[0].tokens == (3, 4, 5, 6, 1)


def test_draft_ends_at_a_stop_token() -> None:
    tokens = [1, 2, 3, 9, 4, 5, 1, 2]
    draft = NgramDrafter().propose([sequence_of(tokens, frozenset({9}))], [5])[0]
    assert draft.tokens == (3, 9)
    assert draft.probs is None
    assert draft.source == "ngram"


def test_output_is_searched_too_and_slots_are_apart() -> None:
    drafter = NgramDrafter()
    one, two = sequence_of([1, 2, 3]), sequence_of([1, 2, 8], slot=1)
    one.extend([5, 6, 7, 5, 6])
    two.extend([1, 2])
    assert [d.tokens for d in drafter.propose([one, two], [1, 1])] == [(7,), (8,)]
    drafter.release(one)
    other = sequence_of([5, 6])
    assert drafter.propose([other], [3])[0].tokens == ()


def test_a_new_sequence_in_a_slot_that_was_never_released() -> None:
    drafter = NgramDrafter()
    drafter.propose([sequence_of([1, 2, 3, 1, 2])], [1])
    assert drafter.propose([sequence_of([4, 1, 2])], [1])[0].tokens == ()


@pytest.mark.parametrize("tokens", [[7], [7, 7], [1, 2, 3]])
def test_short_prompts_draft_nothing(tokens: list[int]) -> None:
    """Case 29 (vllm-project/vllm#34241's neighbours): a prompt shorter than the n-gram, a prompt of one token."""
    assert NgramDrafter().propose([sequence_of(tokens)], [4])[0].tokens == ()


@pytest.mark.parametrize("depth", [0, -1])
def test_no_room_no_draft(depth: int) -> None:
    assert NgramDrafter().propose([sequence_of([1, 2, 1, 2])], [depth])[0].tokens == ()


def test_errors_name_the_argument() -> None:
    with pytest.raises(InputError, match="min_ngram"):
        NgramDrafter(min_ngram=0)
    with pytest.raises(InputError, match="max_ngram"):
        NgramDrafter(max_ngram=1)
    with pytest.raises(InputError, match="match: expected one of"):
        NgramDrafter(match="last")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="max_draft"):
        propose([1], [1], max_draft=0)


SOURCE = list(range(20, 40))


def copied(drafter: NgramDrafter, output: list[int], depth: int = 4) -> list[tuple[int, ...]]:
    """Every draft while `output` is written behind the source."""
    sequence, drafts = sequence_of([*SOURCE, 0]), []
    while left := output[len(sequence.output) :]:
        drafts.append(drafter.propose([sequence], [depth])[0].tokens)
        kept = next((i for i, (a, b) in enumerate(zip(drafts[-1], left, strict=False)) if a != b), len(drafts[-1]))
        sequence.extend(left[: kept + 1])
    return drafts


def test_after_a_near_miss_the_copy_goes_on_behind_the_replaced_token() -> None:
    output = [*SOURCE[:10], 1, *SOURCE[11:]]
    assert tuple(SOURCE[11:15]) in copied(NgramDrafter(), output)
    lost, kept = copied(NgramDrafter(reanchor=False), output), copied(NgramDrafter(), output)
    assert len(kept) < len(lost)
    assert () in lost[2:]  # the control: without it, two tokens are written plainly
    assert () not in kept[2:]


def test_a_near_miss_needs_a_copy_that_went_well() -> None:
    assert copied(NgramDrafter(), [*SOURCE[:3], 1, 2, 3])[-2:] == [(), ()]  # three tokens of the source
    assert copied(NgramDrafter(), [*SOURCE[:10], 1, 2, 3])[-2:] == [tuple(SOURCE[11:15]), ()]  # a second miss in a row
    elsewhere = sequence_of([*SOURCE, 5, 6, 7, 8, 9])
    assert NgramDrafter().propose([elsewhere], [3])[0].tokens == ()  # nothing was copied


def test_what_is_known_of_the_new_token_comes_first() -> None:
    """A name that replaces another goes on as it did at the first place."""
    sequence = sequence_of([*SOURCE, 29, 1, 2, 3, 0])
    drafter = NgramDrafter()
    sequence.extend(SOURCE[:8])
    assert drafter.propose([sequence], [2])[0].tokens == (28, 29)
    sequence.extend([28, 29, 1])
    assert drafter.propose([sequence], [2])[0].tokens == (2, 3)


def test_a_near_miss_is_not_that_of_the_slots_last_sequence() -> None:
    drafter = NgramDrafter()
    one = sequence_of([*SOURCE, *SOURCE[:8]])
    assert drafter.propose([one], [2])[0].tokens == (28, 29)
    other = sequence_of([*SOURCE, *SOURCE[:8], 1])
    assert drafter.propose([other], [2])[0].tokens == ()
    one.extend([1])
    assert drafter.propose([one], [2])[0].tokens == ()  # which the other has taken from it


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(1, 6))
def test_a_draft_is_what_stood_behind_the_place_it_names(output: list[int], depth: int) -> None:
    drafter, sequence = NgramDrafter(min_ngram=3), sequence_of([0, 1, 2, 3, 3, 2, 1, 0])
    for token in output:
        match = drafter.find(sequence)
        draft = drafter.draft(sequence, match, depth).tokens
        if match is not None:
            assert 0 < match.start < len(sequence.tokens)
            assert list(draft)[: len(sequence.tokens) - match.start] == sequence.tokens[match.start :][:depth]
        sequence.extend([token])
