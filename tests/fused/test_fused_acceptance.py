"""The end of a step on the device against the host's rules, and the law of what the p/q rule gives."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.sampling import SamplingParams
from surefoot.verify.fused import acceptance, sampling
from surefoot.verify.fused.acceptance import RECORD, Rejection
from surefoot.verify.fused.requests import Requests
from surefoot.verify.fused.sampling import Workspace

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's on overflow, in the interpreter
GREEDY = SamplingParams()
COUPLED = SamplingParams(temperature=1.0, seed=5)
DRAWN = SamplingParams(temperature=1.0, seed=5, acceptance="rejection")
FILTERED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.001, seed=6, acceptance="rejection")


@dataclass
class State:
    """Everything a step may write."""

    length: Tensor
    tokens: Tensor
    keep: Tensor
    accepted: Tensor
    following: Tensor
    record: Tensor

    @staticmethod
    def of(length: list[int], sequences: int, depth: int, device: torch.device) -> State:
        def full(*shape: int) -> Tensor:
            return torch.full(shape, -9, dtype=torch.int32, device=device)

        return State(
            torch.tensor(length, dtype=torch.int32, device=device),
            full(len(length), max(length) + 20),
            full(len(length)),
            full(sequences),
            full(sequences),
            full(sequences, depth + RECORD),
        )

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.length, self.tokens, self.keep, self.accepted, self.following, self.record

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, State)
        return all(torch.equal(a, b) for a, b in zip(self.arguments(), other.arguments(), strict=True))


def ints(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def both(
    drafts: Tensor,
    choices: Tensor,
    bad: Tensor,
    requests: Requests,
    slots: Tensor,
    length: list[int],
    rejection: Rejection | None = None,
) -> tuple[State, State]:
    """What the kernel leaves behind, and what the reference does."""
    state, expected = (State.of(length, len(drafts), drafts.shape[1], drafts.device) for _ in range(2))
    acceptance.accept(drafts, choices, bad, requests, slots, *state.arguments(), rejection)
    acceptance.accept_reference(drafts, choices, bad, requests, slots, *expected.arguments(), rejection)
    return state, expected


def test_kept_cut_finished_and_absent(device: torch.device) -> None:
    requests = Requests.empty(7, device)
    for slot, limit in enumerate((100, 100, 100, 14, 12, 11, 100)):
        requests.set(slot, GREEDY, limit)
    drafts = ints([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, -1]], device)
    choices = ints([1, 2, 3, 4] * 8, device)
    bad = ints([0, 0, 0, 0, 1, 0, 0, 1, *[0] * 24], device)
    slots = ints([0, 1, 2, 3, 4, 5, -1, 6], device)
    state, expected = both(drafts, choices, bad, requests, slots, [10] * 7)
    assert state == expected
    assert state.accepted.tolist() == [3, 1, 0, 2, 0, -1, -1, 2]
    assert state.following.tolist() == [4, 2, 1, 3, 1, -1, -1, 3]
    assert state.length.tolist() == [14, 12, 11, 13, 11, 10, 13]
    assert state.keep.tolist() == [4, 2, 1, 3, 1, -9, 3]
    assert state.tokens[0, 10:16].tolist() == [-9, 1, 2, 3, 4, -9]
    assert state.tokens[4, 10:14].tolist() == [-9, 1, -9, -9]
    assert (state.tokens[5] == -9).all()
    assert state.record[1].tolist() == [1, 9, 3, 1, 2, 0b1001, 11]
    assert state.record[6].tolist() == [1, 2, 3, -1, -1, 0, -1]


@pytest.mark.parametrize("depth", [0, 1, 7])
def test_any_depth(depth: int, device: torch.device) -> None:
    requests = Requests.empty(3, device)
    for slot in range(3):
        requests.set(slot, COUPLED, 50)
    generator = torch.Generator().manual_seed(depth)
    for _ in range(5):
        drafts = torch.randint(0, 2, (3, depth), generator=generator, dtype=torch.int32).to(device)
        choices = torch.randint(0, 2, (3 * (depth + 1),), generator=generator, dtype=torch.int32).to(device)
        bad = torch.zeros_like(choices)
        state, expected = both(drafts, choices, bad, requests, ints([2, 0, 1], device), [3, 20, 46])
        assert state == expected


def step(
    params: list[SamplingParams],
    certain: list[int],
    depth: int,
    logits: Tensor,
    draft_logits: Tensor | None,
    length: list[int],
    limit: int,
    shift: Tensor | None = None,
) -> tuple[State, State, Tensor]:
    """Draw drafts (the first tokens where certain), choose, accept. A slot for every sequence.

    `shift` is added to the draft logits once drawn from: a drafter that lies about its distribution.
    """
    device = logits.device
    sequences, vocab_size = len(params), logits.shape[1]
    requests = Requests.empty(sequences, device)
    for slot, each in enumerate(params):
        requests.set(slot, each, limit)
    slots = ints(list(range(sequences)), device)
    position = ints(length, device)
    drafts = torch.full((sequences, depth), -1, dtype=torch.int32, device=device)
    draft_workspace = Workspace.empty(sequences * depth, vocab_size, device)
    if draft_logits is not None:
        for i in range(depth):
            own = draft_logits.view(sequences, depth, vocab_size)[:, i]
            bad = torch.zeros(sequences, dtype=torch.int32, device=device)
            sampling.draw_draft(own, requests, slots, position, draft_workspace, drafts[:, i], bad, offset=i)
        if shift is not None:
            draft_logits = draft_logits + shift
    for b, sure in enumerate(certain):
        if sure:
            drafts[b] = torch.arange(depth, dtype=torch.int32, device=device) % vocab_size
            drafts[b, depth - b % 2 :] = -1  # some drafts are shorter
    workspace = Workspace.empty(len(logits), vocab_size, device)
    choices = torch.full((len(logits),), -7, dtype=torch.int32, device=device)
    bad = torch.full_like(choices, -7)
    sampling.choose(logits, requests, slots, position, workspace, choices, bad, window=depth + 1)
    rejection = Rejection.of(logits, workspace, ints(certain, device), draft_logits, draft_workspace)
    state, expected = both(drafts, choices, bad, requests, slots, length, rejection)
    return state, expected, drafts


def rows(count: int, vocab_size: int, seed: int, device: torch.device, scale: float = 2.0) -> Tensor:
    return (torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale).to(device)


@pytest.mark.parametrize("vocab_size", [11, 4099])
def test_same_verdicts_as_the_host(vocab_size: int, device: torch.device) -> None:
    """Exactly equal: only a uniform within rounding of a border could tell the host's sums from the device's."""
    params = [GREEDY, COUPLED, DRAWN, FILTERED, DRAWN, FILTERED]
    certain = [0, 1, 0, 0, 1, 1]
    target = rows(len(params) * 4, vocab_size, 1, device)
    noise = rows(len(params) * 3, vocab_size, 2, device, 0.4)
    draft = target.view(-1, 4, vocab_size)[:, :3].reshape(-1, vocab_size) + noise
    state, expected, _ = step(params, certain, 3, target, draft, [10 + b for b in range(len(params))], 38)
    assert state == expected
    assert len(set(state.accepted.tolist())) > 1


def test_drafters_of_few_tokens(device: torch.device) -> None:
    """q is 0 outside a draft vocabulary: the target's other tokens come from the residual, or whole where none of the
    vocabulary is left."""
    params = [DRAWN, FILTERED, COUPLED, DRAWN]
    target, draft = rows(len(params) * 4, 301, 6, device), rows(len(params) * 3, 301, 7, device)
    outside = torch.ones(301, dtype=torch.bool, device=device)
    outside[::9] = False
    draft = draft.masked_fill(outside, -torch.inf)
    state, expected, drafts = step(params, [0] * 4, 3, target, draft, [5, 6, 7, 8], 38)
    assert state == expected
    assert not outside[drafts.long()].any()
    assert outside[state.following.long()].any()


def test_certain_drafters_need_no_draft_logits(device: torch.device) -> None:
    state, expected, _ = step([DRAWN, FILTERED], [1] * 2, 3, rows(8, 301, 1, device), None, [5, 6], 38)
    assert state == expected


def test_equal_distributions_keep_everything(device: torch.device) -> None:
    target = rows(8, 300, 3, device)
    draft = target.view(2, 4, 300)[:, :3].reshape(-1, 300)
    state, expected, drafts = step([DRAWN, FILTERED], [0, 0], 3, target, draft, [4, 9], 100)
    assert state == expected
    assert state.accepted.tolist() == [3, 3]
    assert torch.equal(state.record[:, :3], drafts)


@settings(max_examples=6, derandomize=True, deadline=None)
@given(
    vocab_size=st.integers(2, 40),
    depth=st.integers(0, 4),
    temperature=st.sampled_from([0.5, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.7, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    room=st.integers(0, 7),
    closeness=st.sampled_from([0.0, 0.3, 2.0]),
)
def test_any_step(
    vocab_size: int,
    depth: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    room: int,
    closeness: float,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, acceptance="rejection")
    target = rows(2 * (depth + 1), vocab_size, seed % 999, device)
    noise = rows(2 * depth, vocab_size, seed % 998, device, closeness)
    draft = target.view(2, depth + 1, vocab_size)[:, :depth].reshape(-1, vocab_size) + noise
    state, expected, _ = step([params, params], [0, 1], depth, target, draft, [8, 8], 9 + room)
    assert state == expected


def test_a_sequence_is_judged_alike_in_any_company(device: torch.device) -> None:
    params = [DRAWN, FILTERED, COUPLED, FILTERED]
    target, draft = rows(12, 301, 4, device, 1.0), rows(8, 301, 5, device, 1.0)
    certain, length = [0, 0, 1, 1], [3, 30, 60, 90]
    together, _, _ = step(params, certain, 2, target, draft, length, 200)
    for b in (0, 1):  # whole sequences only: a certain draft's length depends on the place here
        one = target[3 * b : 3 * b + 3], draft[2 * b : 2 * b + 2]
        alone, _, _ = step(params[b : b + 1], certain[b : b + 1], 2, *one, length[b : b + 1], 200)
        assert torch.equal(alone.record[0], together.record[b])


def chi_square(counts: Tensor, probs: Tensor) -> float:
    expected = counts.sum() * probs
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.slow
@pytest.mark.parametrize("lie", [False, True], ids=["honest", "lying"])
def test_first_token_has_the_targets_law(lie: bool, device: torch.device) -> None:
    """240 first tokens of one distribution; a drafter that lies about its own must be found out by the same test."""
    vocab_size, sequences = 5, 48
    target = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0], device=device)
    draft = torch.tensor([-1.0, 0.5, 1.0, -0.5, 0.7], device=device)
    counts = torch.zeros(vocab_size)
    for turn in range(5):
        params = [
            SamplingParams(temperature=1.0, seed=turn * sequences + b, acceptance="rejection") for b in range(sequences)
        ]
        state, _, _ = step(
            params,
            [0] * sequences,
            1,
            target.repeat(2 * sequences, 1),
            draft.repeat(sequences, 1),
            [7] * sequences,
            100,
            target - draft if lie else None,
        )
        first = state.tokens[:, 8].cpu().long()
        counts += torch.bincount(first, minlength=vocab_size)
    statistic = chi_square(counts, target.cpu().softmax(0))
    # 4 degrees of freedom: 18.5 is passed once in a thousand times.
    assert statistic > 25 if lie else statistic < 18.5
