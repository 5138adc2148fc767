"""The suffix automaton against a search by brute force, and what its drafter makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.drafters.none import NoDrafter
from surefoot.drafters.suffix import COUNTED, LONGEST, ROOT, SEGMENTS, SuffixAutomaton, SuffixDrafter
from surefoot.errors import InputError
from surefoot.prove.table import TableTarget, decode, decode_batch, hashed_rows
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence

TEXT = st.lists(st.integers(0, 2), max_size=40)


def automaton_of(*texts: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.begin()
        for token in text:
            automaton.add(token)
    return automaton


def ends(text: list[int], string: list[int]) -> list[int]:
    """Where a string ends in a text."""
    return [end for end in range(len(string), len(text) + 1) if text[end - len(string) : end] == string]


def longest_end(texts: list[list[int]], tokens: list[int]) -> int:
    """Of the tokens' ends that occur in one of the texts."""
    return max(n for n in range(len(tokens) + 1) if any(ends(text, tokens[len(tokens) - n :]) for text in texts))


def sequence_of(
    tokens: list[int], slot: int = 0, stop_ids: frozenset[int] = frozenset(), params: SamplingParams | None = None
) -> Sequence:
    return Sequence(slot, list(tokens), params or SamplingParams(), limit=10**6, stop_ids=stop_ids)


def drafted(drafter: SuffixDrafter, tokens: list[int], depth: int = 8) -> tuple[int, ...]:
    """The draft behind tokens, of a request that is not remembered."""
    return drafter.propose([sequence_of(tokens, slot=99)], [depth])[0].tokens


@given(TEXT)
def test_the_longest_repeated_end_is_that_of_a_search(text: list[int]) -> None:
    """After every token, and with the place that it stands for: what followed there is what follows it in the text."""
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.add(token)
        longest = max(n for n in range(end) if n == 0 or len(ends(text[:end], text[end - n : end])) > 1)
        place = automaton.repeated()
        assert place.length == longest
        if longest:
            assert automaton.after(ROOT, text[end - longest : end]) == place
    assert automaton.states <= max(2, 2 * len(text))
    assert automaton.size == len(text)


@given(st.lists(TEXT, min_size=1, max_size=4), TEXT)
def test_the_longest_known_end_among_several_texts_is_that_of_a_search(
    texts: list[list[int]], tokens: list[int]
) -> None:
    automaton = automaton_of(*texts)
    place = ROOT
    for end, token in enumerate(tokens, start=1):
        place = automaton.after(place, [token])
        assert place.length == longest_end(texts, tokens[:end])
    assert place == automaton.after(ROOT, tokens)
    assert automaton.states <= 1 + 2 * automaton.size


@given(st.lists(st.lists(st.integers(0, 2), max_size=COUNTED // 2), min_size=1, max_size=3))
def test_counts_are_those_of_a_search(texts: list[list[int]]) -> None:
    """Of every string: what follows it most often, and in which share of the places where anything follows it."""
    automaton = automaton_of(*texts)
    assert automaton.continued(ROOT) is None
    for string in {tuple(text[start:end]) for text in texts for end in range(len(text)) for start in range(end)}:
        counts = {token: sum(len(ends(text, [*string, token])) for text in texts) for token in range(3)}
        found = automaton.continued(automaton.after(ROOT, string))
        assert found is not None
        token, share, place = found
        assert counts[token] == max(counts.values())
        assert share == pytest.approx(counts[token] / sum(counts.values()))
        assert place == automaton.after(ROOT, [*string, token])


@given(TEXT, TEXT)
def test_a_text_that_is_known_takes_no_room(text: list[int], other: list[int]) -> None:
    assert automaton_of(text, other, text, other).states == automaton_of(text, other).states


def test_work_does_not_grow_with_the_text() -> None:
    """States stay below two a token for texts that are the worst for tries."""
    for text in ([1] * 3000, [1, 2] * 1500, [i * i % 977 for i in range(3000)]):
        automaton = automaton_of(text)
        assert automaton.states <= 2 * len(text)


@given(st.lists(TEXT, max_size=6), TEXT, st.integers(1, 60))
def test_the_drafter_finds_what_a_search_finds(earlier: list[list[int]], tokens: list[int], capacity: int) -> None:
    """In its own text and in as much of earlier ones as it has room for, however it has grown meanwhile."""
    drafter = SuffixDrafter(min_match=1, capacity=capacity)
    room = -(-capacity // SEGMENTS)
    kept: list[list[list[int]]] = []  # texts by segment
    size, sequence = room, sequence_of([], slot=1)
    for step in range(max(len(earlier), len(tokens))):
        if step < len(earlier):
            drafter.release(sequence_of(earlier[step]))
            for number, token in enumerate(earlier[step][-SEGMENTS * room :]):
                if size == room:
                    kept.append([[]])
                    kept, size = kept[-SEGMENTS:], 0
                elif number == 0:
                    kept[-1].append([])
                kept[-1][-1].append(token)
                size += 1
        if step < len(tokens):
            sequence.extend([tokens[step]])
        known = sequence.tokens
        own = max((n for n in range(1, len(known)) if len(ends(known, known[len(known) - n :])) > 1), default=0)
        others = [longest_end(texts, known) for texts in kept]
        match = drafter.find(sequence)
        assert (0 if match is None else match.length) == max([own, *others])


def test_what_followed_most_often_is_drafted() -> None:
    assert drafted(SuffixDrafter(), [1, 2, 7, 1, 2, 8, 1, 2, 7, 3, 1, 2], 1) == (7,)
    assert drafted(SuffixDrafter(), [1, 2, 7, 1, 2, 8, 1, 2], 1) == (8,)  # of equals the latest


def test_a_draft_is_as_long_as_its_match_is_good() -> None:
    text = list(range(10, 60))
    lengths = [len(drafted(SuffixDrafter(), [*text, 0, *text[:n]], 64)) for n in (2, 3, 5)]
    assert lengths == [8, 12, 20]  # n / (n + k) >= 1/5
    assert len(drafted(SuffixDrafter(min_chance=0.5), [*text, 0, *text[:4]], 64)) == 4
    split = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]  # went on in two ways
    assert len(drafted(SuffixDrafter(), split)) < len(drafted(SuffixDrafter(), [1, 2, 3, 4, 9, 8, 1, 2, 3]))


def test_a_text_that_repeats_itself_goes_on() -> None:
    assert drafted(SuffixDrafter(), [4, 1, 2, 3, 1, 2, 3, 1, 2], 7) == (3, 1, 2, 3, 1, 2, 3)


def test_earlier_requests_are_drafted_from() -> None:
    drafter = SuffixDrafter()
    drafter.release(sequence_of([1, 2, 3, 4, 5, 6]))
    assert drafted(drafter, [9, 2, 3], 3) == (4, 5, 6)
    assert drafted(drafter, [9, 6, 8], 3) == ()
    assert drafted(SuffixDrafter(capacity=0), [9, 2, 3], 3) == ()


def test_a_request_under_the_ratio_rule_sees_no_other() -> None:
    drafter = SuffixDrafter()
    drafter.release(sequence_of([1, 2, 3, 4, 5, 6]))
    params = SamplingParams(temperature=1.0, acceptance="rejection")
    assert drafter.propose([sequence_of([1, 2, 3], params=params)], [3])[0].tokens == ()
    assert drafter.propose([sequence_of([1, 2, 3, 1, 2], params=params)], [1])[0].tokens == (3,)


def test_the_oldest_are_forgotten() -> None:
    drafter = SuffixDrafter(capacity=40)
    for start in range(0, 200, 10):
        drafter.release(sequence_of(list(range(start, start + 10))))
        assert sum(segment.size for segment in drafter._segments) <= 40
    assert drafted(drafter, [0, 1], 3) == ()
    assert drafted(drafter, [180, 181], 3) == (182, 183, 184)
    reader = sequence_of([190, 191])
    drafter.propose([reader], [1])
    for start in range(300, 400, 10):
        drafter.release(sequence_of(list(range(start, start + 10)), slot=1))
    assert drafter.propose([reader], [1])[0].tokens == ()
    assert len(drafter._readers[0].places) <= SEGMENTS  # what was forgotten is held by nobody


def test_a_long_match_in_an_earlier_request_that_came_in_meanwhile() -> None:
    drafter, text = SuffixDrafter(), list(range(2 * LONGEST))
    running = sequence_of(text, slot=1)
    assert drafter.propose([running], [2])[0].tokens == ()
    drafter.release(sequence_of([*text, 500, 501]))
    match = drafter.find(running)
    assert match is not None
    assert match.length == LONGEST
    assert drafter.draft(running, match, 2).tokens == (500, 501)


def test_a_draft_ends_at_a_stop_token_and_has_no_distribution() -> None:
    sequence = sequence_of([1, 2, 3, 9, 4, 5, 1, 2], stop_ids=frozenset({9}))
    draft = SuffixDrafter().propose([sequence], [5])[0]
    assert draft.tokens == (3, 9)
    assert draft.probs is None
    assert draft.source == "suffix"


@pytest.mark.parametrize("tokens", [[], [7], [1, 2, 3]])
def test_short_prompts_draft_nothing(tokens: list[int]) -> None:
    assert drafted(SuffixDrafter(), tokens) == ()


@pytest.mark.parametrize("depth", [0, -1])
def test_no_room_no_draft(depth: int) -> None:
    assert drafted(SuffixDrafter(), [1, 2, 1, 2, 1, 2], depth) == ()


def test_a_new_sequence_in_a_slot_that_was_never_released() -> None:
    drafter = SuffixDrafter()
    drafter.propose([sequence_of([1, 2, 3, 1, 2])], [1])
    assert drafter.propose([sequence_of([4, 1, 2])], [1])[0].tokens == ()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_is_plain_decoding_alone_and_in_company(temperature: float) -> None:
    row = hashed_rows(5, order=2)
    params = SamplingParams(max_new_tokens=80, temperature=temperature, seed=4)
    prompts = [(1, 2, 0, 1), (3, 3), (1, 2, 0, 1)]
    plain = [decode(TableTarget(row, 5), NoDrafter(), params, 0, prompt).output for prompt in prompts]
    drafter = SuffixDrafter(capacity=100)
    for _ in range(3):
        runs = decode_batch(TableTarget(row, 5), drafter, [(prompt, params) for prompt in prompts], 6)
        assert [run.output for run in runs] == plain
    assert sum(record.accepted for run in runs for record in run.records) > 0


def test_errors_name_the_argument() -> None:
    with pytest.raises(InputError, match="min_match"):
        SuffixDrafter(min_match=0)
    with pytest.raises(InputError, match="capacity"):
        SuffixDrafter(capacity=-1)
    with pytest.raises(InputError, match="min_chance"):
        SuffixDrafter(min_chance=1.5)
