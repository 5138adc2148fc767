"""Verification on a CUDA device against the CPU, and against itself with other rows beside it."""

import pytest
import torch

from surefoot.sampling import SamplingParams
from surefoot.types import Draft
from surefoot.verify import accept, choose, draft_token, gumbel, process, verify
from surefoot.verify.philox import philox
from tests.fakes import assert_same_kept

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=7),
    SamplingParams(temperature=0.8, seed=7, top_k=50),
    SamplingParams(temperature=0.8, seed=7, top_p=0.9),
    SamplingParams(temperature=0.8, seed=7, top_k=20, top_p=0.9, min_p=0.05),
]
IDS = ["greedy", "coupled", "top_k", "top_p", "all filters"]


def logits(rows: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def test_words_are_equal_and_noise_nearly() -> None:
    zero = torch.zeros(1000, dtype=torch.int64)
    on_cpu = philox((torch.arange(1000), zero + 5, zero, zero), (1, 2))
    zero = zero.cuda()
    on_gpu = philox((torch.arange(1000, device="cuda"), zero + 5, zero, zero), (1, 2))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_gpu, strict=True))
    assert torch.allclose(gumbel(3, range(4), 8191), gumbel(3, range(4), 8191, "cuda").cpu(), rtol=1e-5, atol=1e-5)
    assert torch.equal(gumbel(3, range(4), 8191, "cuda")[2], gumbel(3, [2], 8191, "cuda")[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, 1000, 8192, 248_320])
def test_ties_go_to_the_lowest_id(vocab_size: int, dtype: torch.dtype) -> None:
    rows = torch.zeros(17, vocab_size, dtype=dtype, device="cuda")
    expected = [int(x) for x in torch.linspace(0, vocab_size - 2, 17)]
    for row, low in enumerate(expected):
        rows[row, low:] = 2.5
    assert choose(rows, SamplingParams(), 0) == expected
    assert [choose(row[None], SamplingParams(), 0)[0] for row in rows] == expected
    assert process(rows, SamplingParams()).argmax(-1).tolist() == expected
    one = process(rows, SamplingParams(temperature=1.0, top_k=1)).isfinite()
    assert one.sum(-1).tolist() == [1] * 17
    assert one.int().argmax(-1).tolist() == expected


@pytest.mark.parametrize("params", SETTINGS, ids=IDS)
@pytest.mark.parametrize("vocab_size", [1001, 8192, 248_320])
def test_a_row_has_the_same_bits_alone_and_in_company(vocab_size: int, params: SamplingParams) -> None:
    rows = logits(9, vocab_size, torch.bfloat16).cuda()
    together = process(rows, params)
    for row in range(9):
        assert torch.equal(together[row], process(rows[row : row + 1], params)[0])
    assert choose(rows, params, 4) == [choose(rows[i : i + 1], params, 4 + i)[0] for i in range(9)]
    assert_same_kept(together, process(rows.cpu(), params), rows, params)


def test_the_rejection_rule_agrees_with_the_cpu() -> None:
    params = SamplingParams(temperature=0.8, seed=7, acceptance="rejection", top_k=50)
    rows, other = logits(5, 1000), logits(5, 1000) + logits(6, 1000)[1:] / 9
    drafted = [draft_token(row, params, i) for i, row in enumerate(other[:4])]
    probs = torch.stack([probs for _, probs in drafted if probs is not None])
    tokens = tuple(token for token, _ in drafted)
    for source in (probs, None):
        on_cpu = verify(Draft(tokens, source), rows, params, 20)
        assert verify(Draft(tokens, source), rows.cuda(), params, 20) == on_cpu
        targets = rows.softmax(-1)
        assert accept(tokens, targets.cuda(), source, [0.9] * 5) == accept(tokens, targets, source, [0.9] * 5)
    assert [draft_token(row.cuda(), params, i)[0] for i, row in enumerate(other[:4])] == list(tokens)
