"""From a checkpoint on disk to the first token, in a process of its own: loading, recording graphs, first token.

The checkpoint has random weights of a published shape and is written first, unless it is there. The first run compiles
the kernels, the next find them in Triton's cache.

    python -m benchmarks.startup --shape qwen3.5-9b --folder /tmp/checkpoint --runs 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from surefoot import Engine, SamplingParams
from surefoot.loading.shapes import SHAPES
from surefoot.loading.tiny import Style, tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors

SHARD = 4 * 2**30
NAMED = SHAPES | {"tiny": tiny_config()}


def write(shape: str, folder: Path, device: str) -> None:
    """Random bfloat16 weights, published names."""
    tensors = random_tensors(NAMED[shape], 0, device, torch.bfloat16)
    cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
    write_checkpoint(folder, NAMED[shape], cpu, style=Style(shard_bytes=SHARD))


def start(folder: Path, device: str, prompt: int, began: float) -> dict[str, float]:
    """Seconds from the process's start (`began`, by the clock) until each stage was done."""
    seconds = {"imported": time.time() - began}
    engine = Engine.from_pretrained(folder, device=device, dtype="bfloat16", drafter="mtp", draft_length=3,
                                    max_len=prompt + 512)  # fmt: skip
    seconds["loaded and recorded"] = time.time() - began
    stream = engine.stream(list(range(100, 100 + prompt)), SamplingParams(max_new_tokens=8, ignore_eos=True))
    next(iter(stream))
    seconds["first tokens"] = time.time() - began
    return seconds


def main() -> None:
    """Write, then start as often as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-9b", choices=list(NAMED))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--began", type=float, help="start in this process, which began then, and print JSON")
    args = parser.parse_args()
    if args.began is not None:
        print(json.dumps(start(args.folder, args.device, args.prompt, args.began)))
        return
    if not (args.folder / "config.json").exists():
        write(args.shape, args.folder, args.device)
    command = [sys.executable, "-m", "benchmarks.startup", "--folder", str(args.folder), "--device", args.device,
               "--prompt", str(args.prompt), "--shape", args.shape, "--began"]  # fmt: skip
    for number in range(args.runs):
        result = subprocess.run([*command, str(time.time())], stdout=subprocess.PIPE, text=True, check=True)
        stages = json.loads(result.stdout.splitlines()[-1])
        text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items())
        print(f"run {number + 1}: {text}")


if __name__ == "__main__":
    main()
