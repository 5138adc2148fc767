"""Any other model: a function, or a `transformers` model, through the one loop, with the tokens of plain decoding.

One long file: every adapter goes through the same checks of arguments, and several share small models.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.adapters import CallableTarget, InexactWarning, TransformersTarget, speculate
from surefoot.drafters.draft_model import DraftModelDrafter
from surefoot.drafters.ngram import NgramDrafter
from surefoot.errors import InputError, NumericalError
from surefoot.prove.table import Row, Sometimes, TableTarget, Wrong, hashed_rows
from surefoot.sampling import Acceptance, SamplingParams
from surefoot.types import Window

V = 7


class Model:
    """A function of the kind `speculate` wraps, over rows of the prefix; writes down how it is called and fails if a
    position is skipped."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.text: list[int] = []
        self.calls: list[tuple[int, int]] = []

    def __call__(self, token_ids: list[int], position: int) -> Tensor:
        assert 0 <= position <= len(self.text)
        self.calls.append((position, len(token_ids)))
        self.text[position:] = token_ids
        return torch.stack([self.row(tuple(self.text[: i + 1])) for i in range(position, len(self.text))])


def plain_greedy(row: Row, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(row(tuple(text)).argmax()))
    return text[len(prompt) :]


@settings(max_examples=40, deadline=None)
@given(
    salt=st.integers(0, 10**6),
    draft_length=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 0.7]),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=9),
)
def test_any_drafter_gives_the_plain_tokens(
    salt: int, draft_length: int, temperature: float, prompt: list[int]
) -> None:
    row = hashed_rows(V, salt, order=2)
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=salt)
    plain = speculate(Model(row), prompt, params, drafter="none", eos_token_ids=[0])
    for drafter in ("ngram", Sometimes(row), Wrong(row)):
        out = speculate(Model(row), prompt, params, drafter=drafter, draft_length=draft_length, eos_token_ids=[0])
        assert (out.token_ids, out.finish_reason) == (plain.token_ids, plain.finish_reason)
        assert 0 <= out.stats.accepted <= out.stats.proposed
    if temperature == 0:
        greedy = plain_greedy(row, prompt, 40)
        assert plain.token_ids == greedy[: greedy.index(0) + 1 if 0 in greedy else 40]


def test_every_token_is_read_once_unless_it_was_refused() -> None:
    """Defect 2 of the two systems: no token is fed at two positions, and none twice."""
    model = Model(hashed_rows(V, order=2))
    out = speculate(model, [1, 2, 3], SamplingParams(max_new_tokens=30), drafter="ngram", draft_length=4)
    assert model.calls[0] == (0, 2)  # the prompt without its last token
    assert model.calls[1][0] == 2
    assert sum(count for _, count in model.calls) == 2 + out.stats.steps + sum(out.stats.proposed_by_position)
    assert model.text == [1, 2, 3, *out.token_ids[:-1]]


def test_repeating_text_stays_the_same() -> None:
    """Case 19 (vllm-project/vllm#41758): one word 48 times, then something else."""
    word, end = 3, 5

    def row(prefix: tuple[int, ...]) -> Tensor:
        return torch.eye(V)[word if prefix.count(word) < 48 else end]

    out = speculate(Model(row), [1, word, word], SamplingParams(max_new_tokens=60), eos_token_ids=[end])
    assert out.token_ids == [word] * 46 + [end]
    assert out.finish_reason == "stop"
    assert out.stats.tokens_per_step > 5


def test_always_wrong_over_two_thousand_tokens() -> None:
    """Case 21 (sgl-project/sglang#35150)."""
    row = hashed_rows(V, order=6)
    params = SamplingParams(max_new_tokens=2000)
    out = speculate(Model(row), [1, 2], params, drafter=Wrong(row), draft_length=4)
    assert out.token_ids == plain_greedy(row, [1, 2], 2000)
    assert out.stats.accepted == 0


def test_context_limit_cuts_the_draft() -> None:
    """Case 26 (vllm-project/vllm#42533)."""
    model = Model(lambda prefix: torch.eye(V)[2])
    out = speculate(model, [2, 2, 2], SamplingParams(max_new_tokens=50), draft_length=8, max_len=20)
    assert out.token_ids == [2] * 17
    assert out.finish_reason == "length"
    assert max(position + count for position, count in model.calls) == 19


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_function_as_draft_model(acceptance: Acceptance) -> None:
    row = hashed_rows(V)
    small = CallableTarget(Model(hashed_rows(V, order=5)), vocab_size=V)
    params = SamplingParams(max_new_tokens=30, temperature=0.8, acceptance=acceptance)
    out = speculate(TableTarget(row, V), [1, 2], params, drafter=DraftModelDrafter(small, V), draft_length=3)
    assert len(out.token_ids) == 30
    if acceptance == "coupled":
        assert out.token_ids == speculate(TableTarget(row, V), [1, 2], params, drafter="none").token_ids


@pytest.mark.parametrize("kind", [lambda x: x, lambda x: x.numpy(), lambda x: x.tolist(), lambda x: x.half()])
def test_logits_of_any_kind(kind: Callable[[Tensor], Any]) -> None:
    model = Model(hashed_rows(V))
    out = speculate(lambda tokens, position: kind(model(tokens, position)), [1], SamplingParams(max_new_tokens=5))
    assert len(out.token_ids) == 5


def test_one_row_for_one_token() -> None:
    model = Model(hashed_rows(V))
    out = speculate(lambda t, p: model(t, p)[-1], [1], SamplingParams(max_new_tokens=5), drafter="none")
    assert out.token_ids == plain_greedy(model.row, [1], 5)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.zeros((1, 3)), r"logits \[2, V\], found \[1, 3\]"),
        (np.zeros(3), r"logits \[2, V\], found \[3\]"),
        (np.zeros((1, 2, 3)), r"found \[1, 2, 3\]"),
        (None, "found NoneType"),
        ("logits", "found str"),
        (np.zeros((2, 0)), r"logits \[2, V\], found \[2, 0\]"),
        (torch.zeros(2, 3, dtype=torch.complex64), "found a tensor of torch.complex64"),
        (np.zeros((2, 3), complex), "found ndarray of complex128"),
        ([["a"] * 3] * 2, "found list of <U1"),
        ([[1.0], [1.0, 2.0]], r"logits \[2, V\], found list"),
        ([[10**400] * 3] * 2, "found an integer too large"),
        (torch.zeros(2, 3, device="meta"), "on meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        ({"logits": 1}, "found dict"),
    ],
)
def test_logits_of_the_wrong_shape(answer: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        speculate(lambda tokens, position: answer, [1, 2, 3])


@pytest.mark.parametrize("width", [1, 0])
def test_logits_without_a_vocabulary(width: int) -> None:
    with pytest.raises(InputError, match=r"forward: expected logits \[1, V\], found \[(1, )?0\]"):
        speculate(lambda tokens, position: torch.zeros(*[1] * width, 0), [1])


@pytest.mark.parametrize(
    "kind",
    [
        lambda x: x.numpy()[::-1].copy()[::-1],
        lambda x: x.numpy().astype(">f4"),
        lambda x: x.numpy().astype(object),
        lambda x: x.numpy().astype(np.longdouble),
        lambda x: np.frombuffer(x.numpy().tobytes(), np.float32).reshape(x.shape),
        lambda x: list(x),
        lambda x: list(x.numpy()),
        lambda x: x.clone().requires_grad_(),
    ],
    ids=["reversed", "big-endian", "object", "long", "read-only", "list of tensors", "list of arrays", "with gradient"],
)
def test_logits_of_any_layout(kind: Callable[[Tensor], Any]) -> None:
    model, params = Model(hashed_rows(V)), SamplingParams(max_new_tokens=5)
    out = speculate(lambda tokens, position: kind(model(tokens, position)), [1, 2], params)
    assert out.token_ids == plain_greedy(model.row, [1, 2], 5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers(bad: float) -> None:
    with pytest.raises(NumericalError, match="position 2"):
        speculate(lambda tokens, position: torch.full((len(tokens), V), bad), [1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_tokens": None}, "prompt: expected a list of token ids, found None"),
        ({"prompt_tokens": 5}, "prompt: expected a list of token ids, found 5"),
        ({"prompt_tokens": "ab"}, "prompt: expected a list of token ids, found 'ab'"),
        ({"prompt_tokens": {1, 2}}, "prompt: expected a list"),
        ({"prompt_tokens": torch.tensor(1)}, "prompt: expected a list"),
        ({"prompt_tokens": torch.tensor([[1]])}, "prompt: expected a list"),
        ({"prompt_tokens": torch.empty(2, device="meta")}, "prompt: expected a list"),
        ({"prompt_tokens": [[1, 2]]}, r"prompt\[0\]: .*found \[1, 2\]"),
        ({"prompt_tokens": torch.tensor([1.0])}, r"prompt\[0\]: .*found 1.0"),
        ({"eos_token_ids": 3}, "eos_token_ids: expected a list of token ids, found 3"),
        ({"eos_token_ids": None}, "eos_token_ids: expected a list of token ids, found None"),
        ({"eos_token_ids": "ab"}, "eos_token_ids: expected a list"),
        ({"eos_token_ids": [1.5]}, r"eos_token_ids\[0\]: .*found 1.5"),
        ({"eos_token_ids": [[1]]}, r"eos_token_ids\[0\]: .*found \[1\]"),
        ({"eos_token_ids": [-1]}, r"eos_token_ids\[0\]: .*found -1"),
        ({"max_len": "9"}, "max_len: expected an integer of at least 1, found '9'"),
        ({"max_len": 9.5}, "max_len: .*found 9.5"),
        ({"max_len": float("nan")}, "max_len: .*found nan"),
        ({"max_len": True}, "max_len: .*found True"),
        ({"vocab_size": 0}, "vocab_size: expected an integer of at least 1, found 0"),
        ({"vocab_size": "5"}, "vocab_size: .*found '5'"),
        ({"drafter": None}, "drafter: expected one of ngram, none or a Drafter, found None"),
        ({"drafter": NgramDrafter}, "drafter: .*found <class"),
        ({"draft_length": None}, "draft_length"),
        ({"params": 5}, "params: expected SamplingParams"),
        ({"forward": int}, "forward: expected a function or a Target, found <class 'int'>"),
        ({"forward": lambda: 1}, r"forward: expected a function of \(token_ids, position\), found \(\)"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    model = Model(hashed_rows(V))
    with pytest.raises(InputError, match=message):
        speculate(**{"forward": model, "prompt_tokens": [1, 2], **options})
    assert model.calls == []


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple, set])
def test_end_ids_of_any_kind(kind: Callable[[list[int]], Any]) -> None:
    out = speculate(lambda tokens, position: torch.eye(V)[[3] * len(tokens)], [1], eos_token_ids=kind([3]))
    assert (out.token_ids, out.finish_reason) == ([3], "stop")


def test_bad_input() -> None:
    model = Model(hashed_rows(V))
    with pytest.raises(InputError, match="prompt: expected at least one token"):
        speculate(model, [])
    with pytest.raises(InputError, match="found 'mtp'"):
        speculate(model, [1], drafter="mtp")
    with pytest.raises(InputError, match="forward: expected a function or a Target, found 3"):
        speculate(3, [1])  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InputError, match="max_len"):
        speculate(TableTarget(model.row, V), [1], max_len=9)
    with pytest.raises(InputError, match="max_len: expected an integer of at least 1"):
        speculate(model, [1], max_len=0)
    with pytest.raises(InputError, match="draft_length"):
        speculate(model, [1], draft_length=0)
    with pytest.raises(InputError, match="prompt"):
        speculate(model, [1, 2, 3], max_len=3)
    with pytest.raises(InputError, match=r"\[1, 9\], found \[1, 7\]"):
        speculate(model, [1], vocab_size=9)
    assert speculate(model, [1], SamplingParams(max_new_tokens=2), vocab_size=V).finish_reason == "length"
    with pytest.raises(NumericalError):
        speculate(lambda t, p: torch.full((len(t), V), torch.nan), [1, 2])


# ---------------------------------------------------------------- transformers


def tiny(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(1)
    common = {"vocab_size": 61, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    llama = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 6,
             "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 8}  # fmt: skip
    gpt = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    sizes: dict[str, dict[str, Any]] = {
        "Llama": llama,
        "Qwen3": llama,
        "Mistral": {**llama, "sliding_window": 9},
        "Mixtral": {**llama, "num_local_experts": 4, "sliding_window": None},
        "GPT2": gpt,
        "Mamba": {"hidden_size": 32, "num_hidden_layers": 2},
        "Lfm2": {**llama, "layer_types": ["conv", "full_attention"]},
        "Qwen3_5Text": {**llama, "layer_types": ["linear_attention", "full_attention"]},
    }
    config = getattr(transformers, f"{name}Config")(**{**common, **sizes[name], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # away from uniform logits
    return model.to(dtype).eval()


def read(target: TransformersTarget, tokens: list[int], prompt: int, width: int) -> Tensor:
    """Logits after each token behind the prompt, read in windows of `width`."""
    for _ in target.prefill(0, tokens[:prompt]):
        pass
    rows = []
    for at in range(prompt, len(tokens), width):
        window = tuple(tokens[at : at + width])
        rows.append(target.verify([Window(0, window)])[0].logits)
        target.commit(0, len(window))
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2", "Mistral"])
def test_windows_have_the_bits_of_single_tokens(name: str, dtype: torch.dtype) -> None:
    target = TransformersTarget(tiny(name, dtype))
    assert target.exact
    tokens = [i * i % 61 for i in range(150)]
    singles = read(target, tokens, 30, 1)
    for width in range(2, 10):
        assert torch.equal(read(target, tokens, 30, width), singles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mistral"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_plain_decoding(name: str, dtype: torch.dtype, temperature: float) -> None:
    target = TransformersTarget(tiny(name, dtype), slots=2)
    params = SamplingParams(max_new_tokens=50, temperature=temperature, seed=3)
    prompt = [5, 6, 7, 8, 9] * 5
    plain = speculate(target, prompt, params, drafter="none")
    small = TransformersTarget(tiny("Qwen3"), slots=2)
    for drafter in (NgramDrafter(), NgramDrafter(1, 1), DraftModelDrafter(small, 61), DraftModelDrafter(target, 61)):
        if isinstance(drafter, DraftModelDrafter) and temperature:
            continue
        model = TransformersTarget(tiny(name, dtype)) if isinstance(drafter, DraftModelDrafter) else target
        assert speculate(model, prompt, params, drafter=drafter, draft_length=6).token_ids == plain.token_ids


def test_float32_tokens_are_the_librarys() -> None:
    model = tiny("Llama")
    prompt = [1, 2, 3, 4] * 5
    own = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[0, len(prompt) :].tolist()
    for exact in (True, False):
        target = TransformersTarget(model, exact=exact)
        assert target.exact is exact
        assert speculate(target, prompt, SamplingParams(max_new_tokens=30)).token_ids == own


def test_the_model_itself_is_left_alone() -> None:
    model = tiny("Llama")
    before = copy.deepcopy(model.state_dict())
    tokens = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        logits = model(tokens).logits
        target = TransformersTarget(model)
        speculate(target, [1, 2, 3], SamplingParams(max_new_tokens=5))
        assert torch.equal(model(tokens).logits, logits)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.config._attn_implementation != "surefoot_exact"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_partial_commit_forgets_the_rest() -> None:
    target = TransformersTarget(tiny("Llama"), slots=2)
    tokens = [i * 7 % 61 for i in range(40)]
    want = read(target, tokens, 10, 1)
    for slot in (0, 1):
        list(target.prefill(slot, tokens[:10]))
    for keep in (1, 2, 3, 4):
        at = 10 + keep * (keep - 1) // 2
        window = Window(0, (*tokens[at : at + keep], 60, 60, 60)[: max(4, keep)])
        other = Window(1, tuple(tokens[at : at + keep]))
        scores = target.verify([window, other])
        assert torch.equal(scores[0].logits[:keep], want[at - 10 : at - 10 + keep])
        assert torch.equal(scores[1].logits, want[at - 10 : at - 10 + keep])
        target.commit(0, keep)
        target.commit(1, keep)


@pytest.mark.parametrize("name", ["Mamba", "Lfm2", "Qwen3_5Text"])
def test_recurrent_state_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"expected a (model whose cache|cache that) can be cropped, found"):
        TransformersTarget(tiny(name))


def test_an_inexact_model_says_so_before_it_starts() -> None:
    model = tiny("Llama", attention_bias=False)
    model.model.layers[1].mlp.act_fn = SumOfRows()
    with pytest.warns(InexactWarning, match="LlamaForCausalLM runs as it is: tokens may differ"):
        target = TransformersTarget(model)
    assert not target.exact
    with warnings.catch_warnings():
        warnings.simplefilter("error", InexactWarning)
        assert not TransformersTarget(model, exact=False).exact


class SumOfRows(torch.nn.Module):
    """An activation that looks at all rows of the pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-3 * x.sum(dim=1, keepdim=True)


def test_eos_and_limits_of_the_model() -> None:
    model = tiny("Llama", eos_token_id=[4, 9], max_position_embeddings=40)
    target = TransformersTarget(model)
    assert target.eos_token_ids == (4, 9)
    assert target.max_len == 40
    out = speculate(target, [1] * 30, SamplingParams(max_new_tokens=50, ignore_eos=True))
    assert (len(out.token_ids), out.finish_reason) == (10, "length")
    with pytest.raises(InputError, match="max_len: expected an integer of at least 1 and at most 40"):
        TransformersTarget(model, max_len=41)
    wrong: list[Any] = [0, 1.5, "a"]
    for slots in wrong:
        with pytest.raises(InputError, match="slots"):
            TransformersTarget(model, slots=slots)
    with pytest.raises(InputError, match="prefill_chunk"):
        TransformersTarget(model, prefill_chunk=0)
    for other in (None, "gpt2", model.model, type(model)):
        with pytest.raises(InputError, match="model: expected a transformers model with a language model head"):
            TransformersTarget(other)
    with pytest.raises(InputError, match=r"such as TransformersTarget\(model\), found LlamaForCausalLM"):
        speculate(model, [1])
    many = TransformersTarget(model, slots=2**70)  # slots cost nothing until they are used
    assert len(speculate(many, [1], SamplingParams(max_new_tokens=2, ignore_eos=True)).token_ids) == 2
    with pytest.raises(InputError, match=r"prompt\[1\]: expected a token id from 0 to 60, found 61"):
        speculate(target, [1, 61])
