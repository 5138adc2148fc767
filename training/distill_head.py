"""Phase 2: fit the MTP head alone to the frozen target's own distribution.

    python training/distill_head.py --tokens DIR --run DIR --device cuda --budget-seconds 170

``--run`` is the folder of phase 1. The head is chained to depth four exactly as decoding chains it
(see ``MtpHead.forward``); step k is trained against the target's softmax at the position it drafts
for, plus a share of cross entropy against the target's argmax, which is what greedy verification
compares with. Writes ``distilled.pt`` (weights only) and ``distill.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from data import Windows
from model import SurefootModel
from optim import make_optimisers, schedule
from train import CONFIGS, make_parts, save_atomically


def distil(a: argparse.Namespace) -> None:
    """Train the head, planning the number of steps from the measured speed."""
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision("high")
    saved = torch.load(a.run / "checkpoint.pt", map_location=a.device, weights_only=True)
    dtype = "bfloat16" if a.device == "cuda" else "float32"
    config = replace(CONFIGS[saved["config"]], compute_dtype=dtype)
    model = SurefootModel(config, make_parts(a.device, a.compile, backward=False)).to(a.device)
    model.load_state_dict(saved["model"])
    model.model.requires_grad_(False)
    # The target will be served from bf16 weights: teach the head on exactly those.
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    optimisers = make_optimisers(list(model.mtp.named_parameters()), a.lr_muon, a.lr_adam, 0.0, a.device == "cuda")
    base = [[group["lr"] for group in o.param_groups] for o in optimisers]
    windows = Windows(np.load(a.tokens / "train.npy"), a.length, a.length + a.depth, a.seed, a.device)
    weights = torch.tensor(a.depth_weights[: a.depth], device=a.device)
    total, started, step = int(a.steps or 0), time.monotonic(), 0
    marks: list[tuple[int, float]] = []
    history: list[torch.Tensor] = []
    log = (a.run / "distill.jsonl").open("w")
    while not total or step < total:
        factor = schedule(step, total or 10**9, a.warmup, a.hold)
        for optimiser, rates in zip(optimisers, base, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        window = windows.batch(step * a.rows, a.rows)
        with torch.no_grad():
            hidden = model.hidden(window)
            teacher = model.logits(hidden)
        drafts = model.mtp(model.embedding, hidden[:, : a.length], window[:, 1:], a.depth, model.parts)
        losses, agreements = [], []
        for k, draft in enumerate(drafts):
            # Step k+1 at row p drafts x_{p+k+2}, which the target predicts from position p+k+1.
            wanted = teacher[:, k + 1 : k + 1 + a.length].contiguous()
            loss, agreement = model.parts.distil_loss(model.embedding, draft, wanted, config.dtype, a.hard)
            losses.append(loss)
            agreements.append(agreement)
        torch.autograd.backward((torch.stack(losses) * weights).sum())
        torch.nn.utils.clip_grad_norm_(model.mtp.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        history.append(torch.stack([*losses, *agreements]).detach())
        if step % a.log_every == 0:
            means = torch.stack(history).mean(0).tolist()
            history = []
            marks.append((step, time.monotonic() - started))
            row = {"step": step, "tokens": step * a.rows * a.length, "seconds": round(marks[-1][1], 2)}
            row |= {f"loss{k + 1}": round(x, 4) for k, x in enumerate(means[: a.depth])}
            row |= {f"agree{k + 1}": round(x, 4) for k, x in enumerate(means[a.depth :])}
            print(json.dumps(row), flush=True)
            log.write(json.dumps(row) + "\n")
            if not total and a.budget_seconds and len(marks) >= 3:
                (s0, t0), (s1, t1) = marks[0], marks[-1]
                total = step + max(1, int((a.budget_seconds - t1) * 0.97 * (s1 - s0) / (t1 - t0)))
                print(json.dumps({"planned_steps": total}), flush=True)
        if a.save_every and step % a.save_every == 0:
            save_atomically({"model": model.state_dict(), "config": saved["config"]}, a.run / "distilled.pt")
    log.close()
    save_atomically({"model": model.state_dict(), "config": saved["config"]}, a.run / "distilled.pt")


def main() -> None:
    p = argparse.ArgumentParser(description="fit the MTP head to the frozen target")
    p.add_argument("--tokens", type=Path, required=True)
    p.add_argument("--run", type=Path, required=True)
    p.add_argument("--device", default="cpu")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--rows", type=int, default=32)
    p.add_argument("--depth", type=int, default=4)
    p.add_argument("--depth-weights", type=float, nargs="+", default=[1.0, 0.8, 0.6, 0.5])
    p.add_argument("--hard", type=float, default=0.5, help="weight of the argmax term")
    p.add_argument("--steps", type=int, default=None)
    p.add_argument("--budget-seconds", type=float, default=None)
    p.add_argument("--warmup", type=int, default=30)
    p.add_argument("--hold", type=float, default=0.3)
    p.add_argument("--lr-muon", type=float, default=3e-3)
    p.add_argument("--lr-adam", type=float, default=1e-3)
    p.add_argument("--log-every", type=int, default=20)
    p.add_argument("--save-every", type=int, default=200)
    arguments = p.parse_args()
    if not arguments.steps and not arguments.budget_seconds:
        raise SystemExit("distill_head.py: give --steps or --budget-seconds")
    distil(arguments)


if __name__ == "__main__":
    main()
