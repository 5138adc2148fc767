"""Write a checkpoint of ``train.py`` or ``distill_head.py`` as a Hugging Face folder.

    python training/export.py --checkpoint DIR/distilled.pt --tokenizer DIR --out FOLDER

bf16 safetensors shards of at most 15 MB with an index; the head is tied, so no ``lm_head.weight``
is written; the MTP head's ``mtp.*`` tensors stand in the same index.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from model import ModelConfig
from safetensors.torch import save_file
from train import CONFIGS

SHARD_BYTES = 15_000_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def shards(state: dict[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    """Cut the tensors, in order, into groups of at most ``limit`` bytes."""
    groups: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        length = tensor.numel() * tensor.element_size()
        if length > limit:
            raise ValueError(f"{name}: {length} bytes do not fit a shard of {limit}")
        if size + length > limit:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += length
    return groups


def export(state: dict[str, torch.Tensor], config: ModelConfig, tokenizer: Path, out: Path) -> None:
    """Write config, tokenizer files, shards and index into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("model-*.safetensors"):
        old.unlink()
    (out / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, out / name)
    state = {name: tensor.detach().cpu().to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    groups = shards(state, SHARD_BYTES)
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, out / file, metadata={"format": "pt"})
        places |= dict.fromkeys(group, file)
    total = sum(t.numel() * t.element_size() for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    print(f"{len(state)} tensors, {total / 1e6:.1f} MB in {len(groups)} shards -> {out.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description="write the Hugging Face folder")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    saved = torch.load(arguments.checkpoint, map_location="cpu", weights_only=True)
    export(saved["model"], CONFIGS[saved["config"]], arguments.tokenizer, arguments.out)


if __name__ == "__main__":
    main()
