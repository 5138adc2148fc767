"""Held-out perplexity, acceptance of the MTP head by position, and samples of an exported folder.

    python training/evaluate.py --model FOLDER --tokens DIR --text DIR/text --device cuda --out eval.json

Teacher-forced: on held-out text, how often the head's argmax at depth k equals the target's argmax
when it is fed the true tokens. Free-running: the target continues held-out prompts greedily, and
drafting, verifying and skipping ahead are played through on what it wrote (fed tokens and target
argmax then coincide, so one pass of the head over the finished text gives every draft).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from model import ModelConfig, SurefootModel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from train import make_parts

DEPTH = 4


def load(folder: Path, device: str, dtype: str) -> SurefootModel:
    """Read an exported folder back into the training model."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    known = {f.name for f in fields(ModelConfig)}
    config = ModelConfig(**{k: v for k, v in values.items() if k in known})
    rope = values["rope_parameters"]
    config = replace(
        config,
        compute_dtype=dtype,
        rope_theta=rope["rope_theta"],
        partial_rotary_factor=rope["partial_rotary_factor"],
        mrope_section=tuple(rope["mrope_section"]),
    )
    model = SurefootModel(config, make_parts(device, compiled=False, backward=False))
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        state |= load_file(file)
    model.load_state_dict({k: v.float() for k, v in state.items()})
    return model.to(device).eval()


@torch.no_grad()
def on_text(model: SurefootModel, tokens: np.ndarray, length: int, rows: int, device: str) -> dict[str, Any]:
    """Loss over the whole file in windows of ``length``, and teacher-forced agreement by depth."""
    span = length + DEPTH
    starts = list(range(0, len(tokens) - span - 1, length))
    loss_sum, count = 0.0, 0
    hits = torch.zeros(DEPTH)
    prefix = torch.zeros(DEPTH)
    for first in range(0, len(starts), rows):
        window = torch.from_numpy(
            np.stack([tokens[s : s + span + 1] for s in starts[first : first + rows]]).astype(np.int64)
        ).to(device)
        hidden = model.hidden(window[:, :span])
        logits = model.logits(hidden).float()
        loss_sum += F.cross_entropy(
            logits[:, :length].flatten(0, 1), window[:, 1 : length + 1].flatten(), reduction="sum"
        ).item()
        count += window.shape[0] * length
        best = logits.argmax(-1)
        del logits
        drafts = model.mtp(model.embedding, hidden[:, :length], window[:, 1:span], DEPTH, model.parts)
        kept = torch.ones(window.shape[0], length, dtype=torch.bool, device=device)
        for k, draft in enumerate(drafts):
            equal = model.logits(draft).argmax(-1) == best[:, k + 1 : k + 1 + length]
            kept &= equal
            hits[k] += equal.sum().item()
            prefix[k] += kept.sum().item()
    loss = loss_sum / count
    return {
        "tokens": count,
        "loss": loss,
        "perplexity": math.exp(loss),
        "agree_by_depth": (hits / count).tolist(),
        "agree_up_to_depth": (prefix / count).tolist(),
    }


@torch.no_grad()
def continue_greedily(model: SurefootModel, prompts: Tensor, new: int, total: int) -> Tensor:
    """prompts [B, P] -> [B, P + new]. Reads the whole padded row anew for each token: slow and plain."""
    rows, length = prompts.shape
    tokens = torch.zeros(rows, total, dtype=torch.long, device=prompts.device)
    tokens[:, :length] = prompts
    for position in range(length, length + new):
        logits = model.logits(model.hidden(tokens)[:, position - 1])
        tokens[:, position] = logits.float().argmax(-1)
    return tokens[:, : length + new]


@torch.no_grad()
def free_running(model: SurefootModel, tokens: Tensor, prompt: int, stop: int) -> dict[str, Any]:
    """Play speculative decoding with four drafts over greedily written rows [B, T]."""
    length = tokens.shape[1] - DEPTH
    hidden = model.hidden(tokens)[:, :length]
    drafts = model.mtp(model.embedding, hidden, tokens[:, 1 : length + DEPTH], DEPTH, model.parts)
    equal = torch.stack(
        [
            model.logits(d).float().argmax(-1) == tokens[:, k + 2 : k + 2 + length]
            if k + 2 + length <= tokens.shape[1]
            else torch.cat(
                [
                    model.logits(d[:, :-1]).float().argmax(-1) == tokens[:, k + 2 : k + 1 + length],
                    torch.zeros(len(tokens), 1, dtype=torch.bool, device=tokens.device),
                ],
                1,
            )
            for k, d in enumerate(drafts)
        ],
        -1,
    ).cpu()
    rows = tokens.cpu()
    offered, accepted = [0] * DEPTH, [0] * DEPTH
    steps = written = 0
    for row in range(len(rows)):
        # Position p is the last one whose target hidden state exists; x_{p+1} is known from it.
        p = prompt - 1
        while p < length - 1 and int(rows[row, p + 1]) != stop:
            steps += 1
            taken = 0
            while taken < DEPTH:
                offered[taken] += 1
                if not bool(equal[row, p, taken]):
                    break
                accepted[taken] += 1
                taken += 1
                if int(rows[row, p + 1 + taken]) == stop:
                    break
            written += taken + 1
            p += taken + 1
    return {
        "steps": steps,
        "tokens_per_step": written / max(1, steps),
        "accepted_given_offered": [a / max(1, o) for a, o in zip(accepted, offered, strict=True)],
        "accepted_up_to_position": [a / max(1, steps) for a in accepted],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="evaluate an exported folder on held-out text")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="type of the matrix products (bfloat16 on a GPU)")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--limit", type=int, default=None, help="tokens of each validation file to use")
    parser.add_argument("--prompts", type=int, default=48, help="prompts per domain for free running")
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--new", type=int, default=192)
    a = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    model = load(a.model, a.device, a.dtype or ("bfloat16" if a.device == "cuda" else "float32"))
    tokenizer = Tokenizer.from_file(str(a.model / "tokenizer.json"))
    bytes_per_token = json.loads((a.tokens / "bytes_per_token.json").read_text())
    result: dict[str, Any] = {}
    samples: list[dict[str, str]] = []
    for domain in ("code", "english"):
        tokens = np.load(a.tokens / f"val_{domain}.npy")[: a.limit]
        row = on_text(model, tokens, a.length, a.rows, a.device)
        row["bits_per_byte"] = row["loss"] / math.log(2) / bytes_per_token[f"val_{domain}"]
        starts = np.linspace(0, len(tokens) - a.prompt_length, a.prompts).astype(int)
        prompts = torch.from_numpy(np.stack([tokens[s : s + a.prompt_length] for s in starts]).astype(np.int64)).to(
            a.device
        )
        total = -(-(a.prompt_length + a.new) // 64) * 64
        written = continue_greedily(model, prompts, a.new, total)
        row["free_running"] = free_running(model, written, a.prompt_length, stop=0)
        result[domain] = row
        for number in range(0, a.prompts, max(1, a.prompts // 4)):
            samples.append(
                {
                    "domain": domain,
                    "prompt": tokenizer.decode(prompts[number, -64:].tolist()),
                    "continuation": tokenizer.decode(written[number, a.prompt_length :][:96].tolist()),
                }
            )
        print(json.dumps({domain: row}), flush=True)
    result["samples"] = samples
    a.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
