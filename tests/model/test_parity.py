"""Our decoder against `transformers`' implementation on random small models, in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.cache import HybridCache
from surefoot.config import LayerType, ModelConfig
from surefoot.loading.tiny import hf_config_dict, tiny_config
from surefoot.model import Decoder, MTPHead, build_cache
from surefoot.model.spans import Layout
from surefoot.model.tensors import random_tensors

CPU = torch.device("cpu")
LIMIT = 1e-3


def make_config(ratio: int, moe: bool, tied: bool) -> ModelConfig:
    layers: tuple[LayerType, ...] = (
        "linear_attention",
        "linear_attention",
        "full_attention",
        "linear_attention",
        "full_attention",
    )
    return replace(
        tiny_config(moe=moe), layer_types=layers, linear_value_heads=2 * ratio, linear_key_heads=2, tied=tied
    )


def reference_model(config: ModelConfig, tensors: dict[str, Tensor]) -> Any:
    import transformers as hf

    raw = {k: v for k, v in hf_config_dict(config).items() if k not in ("architectures", "model_type")}
    if config.moe is None:
        model = hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**raw))
    else:
        model = hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**raw))
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    weights.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    model.load_state_dict(weights, strict=True)
    return model.eval()


def build(config: ModelConfig, tensors: dict[str, Tensor]) -> tuple[Decoder, HybridCache]:
    decoder = Decoder(config, dict(tensors), max_len=256)
    return decoder, build_cache(config, 1, 256, torch.float32, torch.device("cpu"))


def prefilled(decoder: Decoder, cache: HybridCache, tokens: list[int], chunk: int) -> Tensor:
    cache.reset(0)
    parts = [decoder.prefill(tokens[i : i + chunk], cache, 0) for i in range(0, len(tokens), chunk)]
    return decoder.bulk_logits(torch.cat(parts))


def decoded(decoder: Decoder, cache: HybridCache, tokens: list[int], windows: list[int]) -> Tensor:
    rows, done = [], 0
    for window in windows:
        cache.open_window(0, window)
        hidden = decoder.decode(tokens[done : done + window], cache, Layout.of([(0, cache.length[0], window)], CPU))
        rows.append(decoder.logits(hidden)[:window])
        cache.commit(0, window)
        done += window
    return torch.cat(rows)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("ratio", [1, 2, 3])
@torch.inference_mode()
def test_logits_agree_with_transformers(ratio: int, moe: bool, tied: bool) -> None:
    config = make_config(ratio, moe, tied)
    tensors = random_tensors(config, seed=10 * ratio + moe)
    # A tied head on an embedding of variance one would give logits of scale sqrt(H); trained ones have scale ~1.
    tensors["model.embed_tokens.weight"] *= 0.2 if tied else 1.0
    tokens = torch.randint(config.vocab_size, (150,), generator=torch.Generator().manual_seed(ratio)).tolist()
    reference = reference_model(config, tensors)(torch.tensor([tokens])).logits[0]
    assert reference.std() > 0.1  # a difference would show

    decoder, cache = build(config, tensors)
    for chunk in (150, 64, 37):
        torch.testing.assert_close(prefilled(decoder, cache, tokens, chunk), reference, atol=LIMIT, rtol=0)
    prefilled(decoder, cache, tokens[:100], 70)
    out = decoded(decoder, cache, tokens[100:], [1, 3, 1, 5, 2, 8])
    torch.testing.assert_close(out, reference[100:120], atol=LIMIT, rtol=0)
    cache.reset(0)
    out = decoded(decoder, cache, tokens, [1] * 10)
    torch.testing.assert_close(out, reference[:10], atol=LIMIT, rtol=0)


@torch.inference_mode()
def test_the_parity_test_can_fail() -> None:
    """Decay rates in the order of tiled value heads instead of grouped ones: a mistake that a ratio of one hides."""
    config = make_config(2, moe=False, tied=True)
    tensors = random_tensors(config, seed=1)
    tokens = list(range(60))
    reference = reference_model(config, tensors)(torch.tensor([tokens])).logits[0]
    order = [0, 2, 1, 3]  # as a GGUF file holds value heads
    for name in [name for name in tensors if name.endswith("A_log")]:
        tensors[name] = tensors[name][order]
    decoder, cache = build(config, tensors)
    assert (prefilled(decoder, cache, tokens, 60) - reference).abs().max() > 10 * LIMIT


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@torch.inference_mode()
def test_mtp_head_agrees_with_transformers_layers(moe: bool) -> None:
    """The head's row p from `transformers`' own decoder layer and norms, wired by hand: embedding first, post-norm
    hidden in, the token after p."""
    import transformers.models.qwen3_5.modeling_qwen3_5 as dense
    import transformers.models.qwen3_5_moe.modeling_qwen3_5_moe as sparse

    config = make_config(2, moe, tied=True)
    tensors = random_tensors(config, seed=4)
    model = reference_model(config, tensors)
    layer_class: Any = sparse.Qwen3_5MoeDecoderLayer if moe else dense.Qwen3_5DecoderLayer
    full = config.layer_types.index("full_attention")
    layer = layer_class(model.config, layer_idx=full).eval()
    prefix = "mtp.layers.0."
    layer.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt() * (1 + tensors[f"mtp.{name}.weight"])

    tokens = torch.randint(config.vocab_size, (41,), generator=torch.Generator().manual_seed(0))
    hidden = model.model(tokens[None, :-1]).last_hidden_state[0]
    embedded = tensors["model.embed_tokens.weight"][tokens[1:]]
    joined = torch.cat([norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")], -1)
    x = (joined @ tensors["mtp.fc.weight"].T)[None]
    rope = model.model.rotary_emb(x, torch.arange(40).expand(3, 1, -1))
    mask = torch.full((40, 40), -torch.inf).triu_(1)[None, None]
    out = layer(x, position_embeddings=rope, attention_mask=mask)
    expected = norm((out[0] if isinstance(out, tuple) else out)[0], "norm")

    decoder, _ = build(config, tensors)
    head = MTPHead(decoder, dict(tensors))
    lane = head.build_lane(1)
    following = tokens[1:].tolist()
    torch.testing.assert_close(head.prefill(hidden, following, lane, 0, 0), expected, atol=LIMIT, rtol=0)
    got = torch.cat([
        head.decode(hidden[p : p + 4], following[p : p + 4], lane, Layout.of([(0, p, 4)], CPU)) for p in range(0, 40, 4)
    ])  # fmt: skip
    torch.testing.assert_close(got, expected, atol=LIMIT, rtol=0)
