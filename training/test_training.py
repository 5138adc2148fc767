"""CPU checks of the training recipe on tiny sizes: ``pytest training/test_training.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))

import evaluate
import export
import train
import train_tokenizer
from fla_backend import chunk_gradients
from model import ModelConfig, SurefootModel, delta_rule_reference

TINY = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=8,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    mrope_section=(2, 1, 1),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)


def noisy_model(seed: int = 0) -> SurefootModel:
    """A tiny model whose every parameter, norms included, is away from its initial value."""
    torch.manual_seed(seed)
    model = SurefootModel(TINY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" not in name and "dt_bias" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def test_logits_equal_transformers() -> None:
    """Same weights, same logits as the reference implementation, within 1e-3 in fp32."""
    transformers = pytest.importorskip("transformers")
    model = noisy_model()
    configuration = transformers.Qwen3_5TextConfig(**{k: v for k, v in TINY.to_hf().items() if k != "dtype"})
    other = transformers.Qwen3_5ForCausalLM(configuration).float().eval()
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("mtp.")}
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    other.tie_weights()
    tokens = torch.randint(97, (2, 150))
    with torch.no_grad():
        ours = model.logits(model.hidden(tokens))
        theirs = other(tokens).logits
    assert theirs.abs().max() > 1
    assert (ours - theirs).abs().max() < 1e-3


def test_delta_rule_equals_the_loop() -> None:
    """The chunked form against the recurrence, token by token, in fp64-free fp32."""
    torch.manual_seed(1)
    rows, length, key_heads, heads, dk, dv = 2, 131, 2, 4, 8, 8
    q, k = (F.normalize(torch.randn(rows, length, key_heads, dk), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(rows, length, heads, dv), -torch.rand(rows, length, heads), torch.rand(rows, length, heads)
    found = delta_rule_reference(q, k, v, g, beta)
    state = torch.zeros(rows, heads, dk, dv)
    for t in range(length):
        query, key = (x[:, t].repeat_interleave(heads // key_heads, 1) for x in (q, k))
        state = state * g[:, t].exp()[..., None, None]
        delta = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, key))
        state = state + torch.einsum("bhk,bhv->bhkv", key, delta)
        wanted = torch.einsum("bhkv,bhk->bhv", state, query * dk**-0.5)
        assert torch.allclose(found[:, t], wanted, atol=1e-5)


def test_chained_head_equals_step_by_step_drafting() -> None:
    """The one-pass chained head gives what drafting with a cache gives from each position alone."""
    model = noisy_model(2)
    tokens = torch.randint(97, (1, 40))
    length, depth = 36, 4
    with torch.no_grad():
        hidden = model.hidden(tokens[:, :length])
        together = model.mtp(model.embedding, hidden, tokens[:, 1:], depth, model.parts)
        for start in (0, 7, 35):
            # A plain causal pass over the rows a cache would hold: target rows, then own rows.
            rows, fed = hidden[:, : start + 1], tokens[:, 1 : start + 2]
            for step in range(depth):
                out = model.mtp(model.embedding, rows, fed, 1, model.parts)[0][:, -1:]
                assert torch.allclose(out[:, 0], together[step][:, start], atol=1e-4)
                rows = torch.cat([rows, out], 1)
                fed = torch.cat([fed, tokens[:, start + step + 2 : start + step + 3]], 1)


def test_chunk_gradients_match_autograd() -> None:
    """The PyTorch form of the library's backward kernel against autograd of one chunk's output.

    With a zero incoming state and a zero gradient of the outgoing one only the intra-chunk part
    is left: o = tril(q k^T * exp2(g_i - g_j)) v * scale.
    """
    torch.manual_seed(3)
    q, k = (torch.randn(1, 64, 1, 8, requires_grad=True) for _ in range(2))
    v, do = torch.randn(1, 64, 2, 8), torch.randn(1, 64, 2, 8)
    g = (-torch.rand(1, 64, 2)).cumsum(1).requires_grad_()
    difference = (g.transpose(1, 2).unsqueeze(-1) - g.transpose(1, 2).unsqueeze(-2)).tril()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * torch.exp2(difference)
    o = torch.einsum("bhij,bjhd->bihd", scores.tril() * 0.3, v)
    torch.autograd.backward(o, do)
    zero = torch.zeros(1, 1, 2, 8, 8)
    dq, dk, _, dg = chunk_gradients(q, k, v, do, zero, zero, v, g, v, 0.3)
    for found, wanted in ((dq, q.grad), (dk, k.grad), (dg * 0.6931472, g.grad)):
        assert wanted is not None
        assert torch.allclose(found, wanted, atol=1e-4)


def _tokens(folder: Path) -> Path:
    """Small random token files in the layout that data.py writes."""
    generator = np.random.default_rng(0)
    for name, size in (("train", 4000), ("val_code", 600), ("val_english", 600)):
        np.save(folder / f"{name}.npy", (generator.zipf(1.5, size) % 8192).astype(np.uint16))
    return folder


def _run(tokens: Path, out: Path, *extra: str) -> train.Run:
    arguments = train.parser().parse_args(
        [
            "--tokens",
            str(tokens),
            "--out",
            str(out),
            "--config",
            "tiny",
            "--length",
            "64",
            "--rows",
            "4",
            "--micro-rows",
            "2",
            "--log-every",
            "1",
            "--validate-every",
            "0",
            "--warmup",
            "2",
            "--steps",
            "8",
            *extra,
        ]
    )
    return train.Run(arguments)


def _losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "held_out" not in row]


def test_resumed_run_repeats_the_uninterrupted_one(tmp_path: Path) -> None:
    """Stopping after four steps and starting again gives the same losses as eight steps at once."""
    tokens = _tokens(tmp_path)
    _run(tokens, tmp_path / "whole", "--save-every", "0").run()
    _run(tokens, tmp_path / "parts", "--save-every", "4").run(until=4)
    resumed = _run(tokens, tmp_path / "parts", "--save-every", "4")
    assert resumed.step == 4
    resumed.run()
    whole, parts = _losses(tmp_path / "whole"), _losses(tmp_path / "parts")
    assert len(whole) == len(parts) == 8
    assert whole == parts


def test_export_is_read_by_transformers(tmp_path: Path) -> None:
    """The exported folder loads, ignores the MTP head and gives our logits (bf16 weights, fp32 sums)."""
    transformers = pytest.importorskip("transformers")
    run = _run(_tokens(tmp_path), tmp_path / "run")
    run.run()
    tokenizer = train_tokenizer.train_tokenizer(iter(["def f(x):\n    return x\n"] * 3), vocabulary_size=262)
    train_tokenizer.write_tokenizer(tokenizer, tmp_path / "tokenizer")
    export.export(run.model.state_dict(), run.config, tmp_path / "tokenizer", tmp_path / "model")
    ours = evaluate.load(tmp_path / "model", "cpu", "float32")
    theirs = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokens = torch.randint(8192, (1, 70))
    with torch.no_grad():
        assert (ours.logits(ours.hidden(tokens)) - theirs(tokens).logits).abs().max() < 1e-3
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len([name for name in index["weight_map"] if name.startswith("mtp.")]) == 15
