"""Phase 1: joint training of the target and its MTP head.

    python training/train.py --tokens DIR --out DIR --device cuda --budget-seconds 850

The number of steps is planned from the speed measured after warm-up, so that the learning rate
reaches zero when the wall-clock budget ends; ``--steps`` fixes it instead. The run saves its whole
state every ``--save-every`` steps and goes on from there when started again with the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import Windows, validation_rows
from model import ModelConfig, Parts, SurefootModel
from optim import make_optimisers, schedule

CONFIGS = {
    "demo": ModelConfig(),
    "tiny": ModelConfig(
        hidden_size=64,
        num_hidden_layers=4,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        mrope_section=(3, 3, 2),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
}


def make_parts(device: str, compiled: bool, backward: bool = True) -> Parts:
    """The hand-written delta rule on a GPU, the PyTorch one elsewhere; compiled regions if asked."""
    parts = Parts()
    if device == "cuda":
        from fla_backend import fla_delta_rule

        parts.delta_rule = fla_delta_rule(backward=backward)
    return parts.compiled() if compiled else parts


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write next to the target and rename, so that a killed run never leaves half a file."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


class Run:
    """State of a training run and the loop over its steps."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.a = arguments
        torch.manual_seed(arguments.seed)
        torch.set_float32_matmul_precision("high")
        dtype = "bfloat16" if arguments.device == "cuda" else "float32"
        self.config = replace(CONFIGS[arguments.config], compute_dtype=dtype)
        self.model = SurefootModel(self.config, make_parts(arguments.device, arguments.compile)).to(arguments.device)
        self.optimisers = make_optimisers(
            list(self.model.named_parameters()),
            arguments.lr_muon,
            arguments.lr_adam,
            arguments.weight_decay,
            fused=arguments.device == "cuda",
        )
        self.base = [[group["lr"] for group in o.param_groups] for o in self.optimisers]
        self.span = arguments.length + arguments.depth + 1
        self.windows = Windows(
            np.load(arguments.tokens / "train.npy"), arguments.length, self.span, arguments.seed, arguments.device
        )
        self.held_out = {
            name: validation_rows(
                np.load(arguments.tokens / f"val_{name}.npy"), arguments.micro_rows, self.span, arguments.device
            )
            for name in ("code", "english")
        }
        self.step, self.total, self.seconds = 0, int(arguments.steps or 0), 0.0
        arguments.out.mkdir(parents=True, exist_ok=True)
        self.checkpoint = arguments.out / "checkpoint.pt"
        self.log_path = arguments.out / "train.jsonl"
        if self.checkpoint.exists():
            self.resume()

    def resume(self) -> None:
        """Take up weights, optimiser states, step and plan from the checkpoint."""
        saved = torch.load(self.checkpoint, map_location=self.a.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimiser, state in zip(self.optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.total = saved["total"]
        print(f"resumed at step {self.step} of {self.total or 'an unplanned run'}", flush=True)

    def save(self) -> None:
        """Write the checkpoint."""
        save_atomically(
            {
                "model": self.model.state_dict(),
                "optimisers": [o.state_dict() for o in self.optimisers],
                "step": self.step,
                "total": self.total,
                "seconds": self.seconds,
                "config": self.a.config,
            },
            self.checkpoint,
        )

    def log(self, row: dict[str, Any]) -> None:
        """Append one line to the log and print it."""
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
        with self.log_path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def train_step(self) -> torch.Tensor:
        """One optimiser step; returns [main loss, MTP loss per depth] without waiting for the device."""
        a = self.a
        factor = schedule(self.step, self.total or 10**9, a.warmup, a.hold)
        for optimiser, rates in zip(self.optimisers, self.base, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        weights = [a.mtp_weight * share for share in a.depth_shares[: a.depth]]
        parts = a.rows // a.micro_rows
        seen = torch.zeros(1 + a.depth, device=a.device)
        for part in range(parts):
            window = self.windows.batch(self.step * a.rows + part * a.micro_rows, a.micro_rows)
            main, ahead = self.model.losses(window, a.length, a.depth)
            loss = main
            for weight, term in zip(weights, ahead, strict=True):
                loss = loss + weight * term
            torch.autograd.backward(loss / parts)
            seen += torch.stack([main.detach(), *(x.detach() for x in ahead)]) / parts
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return seen

    def validate(self) -> None:
        """Losses on fixed held-out rows. Gradients stay enabled so that the compiled code is reused."""
        for name, rows in self.held_out.items():
            main, ahead = self.model.losses(rows, self.a.length, self.a.depth)
            self.log(
                {
                    "step": self.step,
                    "tokens": self.step * self.a.rows * self.a.length,
                    "held_out": name,
                    "loss": main.item(),
                    **{f"mtp{i + 1}": x.item() for i, x in enumerate(ahead)},
                }
            )

    def run(self, until: int | None = None) -> None:
        """Train until the plan (or ``until``, for tests) is fulfilled."""
        a = self.a
        started, before = time.monotonic(), self.seconds
        marks: list[tuple[int, float]] = []
        window: list[torch.Tensor] = []
        while (not self.total or self.step < self.total) and (until is None or self.step < until):
            window.append(self.train_step())
            if self.step % a.log_every == 0:
                means = torch.stack(window).mean(0).tolist()
                window = []
                self.seconds = before + time.monotonic() - started
                marks.append((self.step, self.seconds))
                speed = 0.0
                if len(marks) > 1:
                    (s0, t0), (s1, t1) = marks[-2:]
                    speed = (s1 - s0) * a.rows * a.length / (t1 - t0)
                self.log(
                    {
                        "step": self.step,
                        "tokens": self.step * a.rows * a.length,
                        "loss": means[0],
                        **{f"mtp{i + 1}": x for i, x in enumerate(means[1:])},
                        "seconds": self.seconds,
                        "tokens_per_second": speed,
                    }
                )
                if not self.total and a.budget_seconds and len(marks) >= 4:
                    # The first interval holds compilation. Three per cent go to saving and validation.
                    (s0, t0), (s1, t1) = marks[1], marks[-1]
                    left = (a.budget_seconds - self.seconds) * 0.97
                    self.total = self.step + int(left * (s1 - s0) / (t1 - t0))
                    self.log({"step": self.step, "planned_steps": self.total})
                if means[0] != means[0]:
                    raise RuntimeError(f"step {self.step}: the loss is not a number")
            if a.validate_every and self.step % a.validate_every == 0:
                self.validate()
            if a.save_every and self.step % a.save_every == 0:
                self.save()
        self.seconds = before + time.monotonic() - started
        if until is None:
            self.validate()
            self.save()
            (a.out / "finished").write_text(f"{self.step} steps\n")


def parser() -> argparse.ArgumentParser:
    """Command line of this program."""
    p = argparse.ArgumentParser(description="train the target and its MTP head together")
    p.add_argument("--tokens", type=Path, required=True, help="folder written by data.py")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--config", choices=sorted(CONFIGS), default="demo")
    p.add_argument("--device", default="cpu")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--rows", type=int, default=64, help="rows of a step")
    p.add_argument("--micro-rows", type=int, default=64, help="rows that are on the device at once")
    p.add_argument("--depth", type=int, default=2, help="MTP steps chained in training")
    p.add_argument("--mtp-weight", type=float, default=0.3)
    p.add_argument("--depth-shares", type=float, nargs="+", default=[0.7, 0.3, 0.2, 0.1])
    p.add_argument("--steps", type=int, default=None)
    p.add_argument("--budget-seconds", type=float, default=None)
    p.add_argument("--warmup", type=int, default=150)
    p.add_argument("--hold", type=float, default=0.3)
    p.add_argument("--lr-muon", type=float, default=5e-3)
    p.add_argument("--lr-adam", type=float, default=3e-3)
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--log-every", type=int, default=20)
    p.add_argument("--validate-every", type=int, default=500)
    p.add_argument("--save-every", type=int, default=500)
    return p


def main() -> None:
    arguments = parser().parse_args()
    if not arguments.steps and not arguments.budget_seconds:
        raise SystemExit("train.py: give --steps or --budget-seconds")
    Run(arguments).run()


if __name__ == "__main__":
    main()
