"""Tokens chosen on the device against the host's rules."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.sampling import SamplingParams
from surefoot.verify.distribution import process_unchecked
from surefoot.verify.fused import sampling
from surefoot.verify.fused.requests import Requests
from surefoot.verify.fused.sampling import Workspace

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's on overflow, in the interpreter
KINDS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(temperature=1.0, seed=3),
    "cool": SamplingParams(temperature=0.7, seed=2**64 - 5),
    "top_k": SamplingParams(temperature=0.8, top_k=20, seed=7),
    "top_k 1": SamplingParams(temperature=0.8, top_k=1, seed=7),
    "large top_k": SamplingParams(temperature=1.3, top_k=700, seed=7),
    "top_p": SamplingParams(temperature=0.9, top_p=0.8, seed=8),
    "small top_p": SamplingParams(temperature=0.9, top_p=1e-9, seed=8),
    "large top_p": SamplingParams(temperature=2.0, top_p=0.99, seed=8),
    "min_p": SamplingParams(temperature=0.9, min_p=0.05, seed=9),
    "all": SamplingParams(temperature=1.1, top_k=50, top_p=0.9, min_p=0.01, seed=2**63 + 11),
    "hot": SamplingParams(temperature=1e300, seed=1),
    "frozen": SamplingParams(temperature=1e-300, top_p=0.5, seed=1),
}
FEW = [KINDS[kind] for kind in ("greedy", "cool", "all")]


def requests_of(kinds: list[SamplingParams], device: torch.device) -> Requests:
    requests = Requests.empty(len(kinds), device)
    for slot, params in enumerate(kinds):
        requests.set(slot, params, limit=1000)
    return requests


def logits_of(rows: int, vocab_size: int, device: torch.device, seed: int = 0, scale: float = 3.0) -> Tensor:
    return (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale).to(device)


def run(
    logits: Tensor,
    requests: Requests,
    slots: list[int],
    position: Tensor,
    window: int,
    offset: int = 0,
    draw: bool = False,
    ids: Tensor | None = None,
) -> tuple[list[int], list[int], Workspace]:
    device = logits.device
    workspace = Workspace.empty(len(logits), logits.shape[1], device)
    out = torch.full((len(logits),), -7, dtype=torch.int32, device=device)
    bad = torch.full_like(out, -7)
    slot_tensor = torch.tensor(slots, dtype=torch.int32, device=device)
    if draw:
        sampling.draw_draft(logits, requests, slot_tensor, position, workspace, out, bad, window=window, offset=offset,
                            ids=ids)  # fmt: skip
    else:
        sampling.choose(logits, requests, slot_tensor, position, workspace, out, bad, window=window, offset=offset)
    return out.tolist(), bad.tolist(), workspace


def expected(
    logits: Tensor,
    requests: Requests,
    slots: list[int],
    position: Tensor,
    window: int,
    offset: int = 0,
    draw: bool = False,
    ids: Tensor | None = None,
) -> tuple[list[int], list[int]]:
    out = torch.full((len(logits),), -7, dtype=torch.int32)
    bad = torch.full_like(out, -7)
    workspace, owners = Workspace.empty(1, 1, logits.device), torch.tensor(slots)
    if draw:
        sampling.draw_draft_reference(logits, requests, owners, position, workspace, out, bad, window=window,
                                      offset=offset, ids=ids)  # fmt: skip
    else:
        sampling.choose_reference(logits, requests, owners, position, workspace, out, bad, window=window, offset=offset)
    return out.tolist(), bad.tolist()


def kept(logits: Tensor, requests: Requests, workspace: Workspace, slot: int, row: int) -> Tensor:
    """Which tokens the border found on the device keeps, min_p aside."""
    scaled = (logits[row] - logits[row].max()).cpu() / requests.temperature[slot].cpu()
    scaled = torch.where(scaled == 0, 0.0, scaled)
    bits = scaled.view(torch.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    border, last = workspace.border[row].tolist()
    stays: Tensor = (key > border) | ((key == border) & (torch.arange(len(key)) <= last))
    return stays


@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens_as_the_host(kind: str, device: torch.device) -> None:
    vocab_size = 4099 if kind in ("greedy", "plain", "top_k", "top_p") else 1001
    requests = requests_of([SamplingParams(), KINDS[kind], SamplingParams(temperature=0.5, seed=4)], device)
    position = torch.tensor([5, 77, 90_000], dtype=torch.int32, device=device)
    logits = logits_of(9, vocab_size, device)
    slots = [1, -1, 2]
    tokens, bad, _ = run(logits, requests, slots, position, 3)
    assert (tokens, bad) == expected(logits, requests, slots, position, 3)
    assert tokens[3:6] == [-1, -1, -1]


@pytest.mark.parametrize("kind", [kind for kind, params in KINDS.items() if params.top_k or params.top_p < 1])
def test_same_filter_as_the_host(kind: str, device: torch.device) -> None:
    vocab_size = 4099 if kind == "all" else 1001
    for scale, digits in ((3.0, 9), (3.0, 0), (0.0, 0)):  # a few integers, or one number: ties everywhere
        logits = logits_of(1, vocab_size, device, 1, scale).round(decimals=digits)
        requests = requests_of([KINDS[kind]], device)
        _, _, workspace = run(logits, requests, [0], torch.zeros(1, dtype=torch.int32, device=device), 1)
        params = SamplingParams(**{**vars(KINDS[kind]), "min_p": 0.0})
        wanted = process_unchecked(logits.cpu(), params)[0] > -math.inf
        assert torch.equal(kept(logits, requests, workspace, 0, 0), wanted[0]), (scale, digits)


@pytest.mark.parametrize("kind", ["large top_k", "top_p", "all"])
def test_a_search_in_many_tiles_finds_the_same_border(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_of(1, 1001, device, 1)
    requests = requests_of([KINDS[kind]], device)
    position = torch.zeros(1, dtype=torch.int32, device=device)
    _, _, whole = run(logits, requests, [0], position, 1)
    for name, size in (("_BLOCK", 256), ("_GROUPS", 4), ("_PEAKS", 8)):
        monkeypatch.setattr(sampling, name, size)
    _, _, tiled = run(logits, requests, [0], position, 1)
    assert torch.equal(tiled.border, whole.border)


def test_excluded_tokens_and_ties(device: torch.device) -> None:
    logits = torch.full((4, 500), -math.inf, device=device)
    logits[0, [3, 77]] = 1.0
    logits[1, 499] = -5.0
    logits[2, 100:] = -0.0
    logits[2, 200:] = 0.0
    logits[3] = 2.0
    position = torch.zeros(1, dtype=torch.int32, device=device)
    for kind in FEW:  # on the host, temperature 1e300 turns -inf into NaN
        requests = requests_of([kind], device)
        tokens, bad, _ = run(logits, requests, [0], position, 4)
        assert (tokens, bad) == expected(logits, requests, [0], position, 4)
        if kind.greedy:
            assert tokens == [3, 499, 100, 0]


def test_rows_that_cannot_be_used_are_flagged(device: torch.device) -> None:
    logits = logits_of(5, 300, device)
    logits[1, 7] = math.nan
    logits[2, 8] = math.inf
    logits[3] = -math.inf
    logits[4, :299] = -math.inf
    position = torch.zeros(1, dtype=torch.int32, device=device)
    for kind in (*FEW, SamplingParams(temperature=1.0, acceptance="rejection")):
        for draw in (False, True):
            tokens, bad, _ = run(logits, requests_of([kind], device), [0], position, 5, draw=draw)
            assert bad == [0, 1, 1, 1, 0]
            assert all(-1 <= token < 300 for token in tokens)


def test_a_row_has_the_same_token_in_any_company(device: torch.device) -> None:
    kinds = [*FEW, SamplingParams(temperature=1.0, acceptance="rejection", top_p=0.9)]
    requests = requests_of(kinds, device)
    position = torch.arange(len(kinds), dtype=torch.int32, device=device) * 100
    logits = logits_of(2 * len(kinds), 1001, device)
    slots = list(range(len(kinds)))
    together, _, workspace = run(logits, requests, slots, position, 2)
    for row in range(len(logits)):
        alone, _, single = run(logits[row : row + 1], requests, [row // 2], position, 1, row % 2)
        assert alone == together[row : row + 1]
        if not kinds[row // 2].greedy:
            assert torch.equal(single.border[0], workspace.border[row])
        if kinds[row // 2].acceptance == "rejection":
            assert torch.equal(single.mass[0], workspace.mass[row])


def test_a_drafter_that_couples_and_one_that_draws(device: torch.device) -> None:
    kinds = [SamplingParams(**{**vars(kind), "acceptance": "rejection"}) for kind in FEW]
    requests = requests_of([*kinds, *FEW], device)
    slots = list(range(2 * len(kinds)))
    position = torch.arange(len(slots), dtype=torch.int32, device=device) * 10 + 3
    logits = logits_of(len(slots), 1001, device, 2)
    for offset in (0, 2):
        tokens, bad, _ = run(logits, requests, slots, position, 1, offset, draw=True)
        # The draw inverts a cumulative sum: only a uniform next to a border between tokens could tell the sums apart.
        assert (tokens, bad) == expected(logits, requests, slots, position, 1, offset, draw=True)


def some_ids(vocab_size: int, count: int, device: torch.device) -> Tensor:
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(count))[:count].sort().values.to(device)


@pytest.mark.parametrize("count", [1, 2, 65, 700, 1001])
def test_drafts_among_some_tokens(count: int, device: torch.device) -> None:
    """The tokens that the whole row gives with all others at -inf; with all tokens listed, those without a list."""
    drawn = [SamplingParams(**{**vars(kind), "acceptance": "rejection"}) for kind in (KINDS["cool"], KINDS["all"])]
    requests = requests_of([*(KINDS[kind] for kind in ("greedy", "plain", "top_p", "all")), *drawn], device)
    slots, vocab_size = [0, 1, -1, 2, 3, 4, 5], 1001
    position = torch.arange(6, dtype=torch.int32, device=device) * 10 + 3
    whole = logits_of(len(slots), vocab_size, device, 4).round(decimals=1)  # with ties
    ids = some_ids(vocab_size, count, device)
    tokens, bad, _ = run(whole[:, ids].contiguous(), requests, slots, position, 1, 1, draw=True, ids=ids)
    assert (tokens, bad) == expected(whole[:, ids], requests, slots, position, 1, 1, draw=True, ids=ids)
    others = torch.ones(vocab_size, dtype=torch.bool, device=device)
    others[ids] = False
    masked = whole.masked_fill(others, -math.inf)
    assert tokens == run(masked, requests, slots, position, 1, 1, draw=True)[0]
    assert set(tokens) <= {-1, *ids.tolist()}


def test_the_noise_is_the_tokens_own(device: torch.device) -> None:
    """Control: noise by place in the list would give other tokens, which no target's noise would meet."""
    requests = requests_of([KINDS["plain"]], device)
    position = torch.zeros(1, dtype=torch.int32, device=device)
    whole = logits_of(12, 200, device, scale=0.5)
    never = int(torch.tensor(run(whole, requests, [0], position, 12)[0]).bincount(minlength=200).argmin())
    ids = torch.tensor([token for token in range(200) if token != never], device=device)
    rows = whole[:, ids].contiguous()
    target = run(whole, requests, [0], position, 12)[0]
    assert run(rows, requests, [0], position, 12, draw=True, ids=ids)[0] == target
    misplaced = ids[run(rows, requests, [0], position, 12, draw=True)[0]].tolist()
    assert sum(a == b for a, b in zip(misplaced, target, strict=True)) < 12 - 3


def test_bad_rows_among_some_tokens(device: torch.device) -> None:
    logits = logits_of(3, 50, device)
    logits[0, 7], logits[1] = math.nan, -math.inf
    ids = some_ids(300, 50, device)
    position = torch.zeros(1, dtype=torch.int32, device=device)
    tokens, bad, _ = run(logits, requests_of([KINDS["cool"]], device), [0], position, 3, draw=True, ids=ids)
    assert bad == [1, 1, 0]
    assert set(tokens) <= set(ids.tolist())


def test_out_may_be_a_column(device: torch.device) -> None:
    requests = requests_of([KINDS["cool"], KINDS["greedy"]], device)
    position = torch.tensor([1, 2], dtype=torch.int32, device=device)
    logits = logits_of(2, 1001, device)
    out = torch.full((2, 3), -7, dtype=torch.int32, device=device)
    bad = torch.zeros(2, dtype=torch.int32, device=device)
    slots = torch.tensor([0, 1], dtype=torch.int32, device=device)
    workspace = Workspace.empty(2, 1001, device)
    sampling.draw_draft(logits, requests, slots, position, workspace, out[:, 1], bad, offset=1)
    assert out[:, 1].tolist() == expected(logits, requests, [0, 1], position, 1, 1)[0]
    assert (out[:, [0, 2]] == -7).all()


@settings(max_examples=15, derandomize=True, deadline=None)
@given(
    vocab_size=st.integers(2, 300),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    place=st.integers(0, 300_000),
    step=st.sampled_from([0.0, 0.25, 1.0]),
)
def test_any_request(
    vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, place: int, step: float
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    requests = requests_of([params], device)
    logits = logits_of(2, vocab_size, device, seed % 1000)
    if step:
        logits = (logits / step).round() * step
    position = torch.tensor([place], dtype=torch.int32, device=device)
    tokens, bad, _ = run(logits, requests, [0], position, 2)
    assert (tokens, bad) == expected(logits, requests, [0], position, 2)


@settings(max_examples=10, derandomize=True, deadline=None)
@given(
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    vocab_size=st.sampled_from([7, 150, 1001]),
    step=st.sampled_from([0.0, 0.5, 2.0]),
    seed=st.integers(0, 1000),
)
def test_any_filter(top_k: int, top_p: float, vocab_size: int, step: float, seed: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    params = SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p)
    requests = requests_of([params], device)
    logits = logits_of(1, vocab_size, device, seed)
    if step:
        logits = (logits / step).round() * step
    _, _, workspace = run(logits, requests, [0], torch.zeros(1, dtype=torch.int32, device=device), 1)
    wanted = process_unchecked(logits.cpu(), params)[0] > -math.inf
    assert torch.equal(kept(logits, requests, workspace, 0, 0), wanted[0])
