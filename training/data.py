"""Token files and the windows that training reads from them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor


def tokenize_documents(tokenizer: Tokenizer, texts: list[str], batch: int = 2048) -> np.ndarray:
    """Token ids of all documents in order, each followed by ``<|endoftext|>``; uint16."""
    end = tokenizer.token_to_id("<|endoftext|>")
    pieces: list[np.ndarray] = []
    for first in range(0, len(texts), batch):
        for encoding in tokenizer.encode_batch_fast(texts[first : first + batch], add_special_tokens=False):
            pieces.append(np.asarray([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(pieces)


def tokenize_folder(text: Path, tokenizer_file: Path, out: Path) -> None:
    """text/{train.bin,val.bin,val.index.jsonl} -> out/{train,val_code,val_english}.npy."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    out.mkdir(parents=True, exist_ok=True)
    train = [body.decode("utf-8") for body in (text / "train.bin").read_bytes().split(b"\x00") if body]
    sizes = {"train": (tokenize_documents(tokenizer, train), sum(len(t.encode()) for t in train))}
    bodies = [body.decode("utf-8") for body in (text / "val.bin").read_bytes().split(b"\x00") if body]
    rows = [json.loads(line) for line in (text / "val.index.jsonl").read_text().splitlines()]
    if len(rows) != len(bodies):
        raise ValueError(f"val.index.jsonl: expected {len(bodies)} rows, found {len(rows)}")
    for domain in ("code", "english"):
        chosen = [body for body, row in zip(bodies, rows, strict=True) if row["domain"] == domain]
        sizes[f"val_{domain}"] = (tokenize_documents(tokenizer, chosen), sum(len(t.encode()) for t in chosen))
    for name, (ids, size) in sizes.items():
        np.save(out / f"{name}.npy", ids)
        print(f"{name}: {len(ids)} tokens, {size / len(ids):.2f} bytes a token", flush=True)
    (out / "bytes_per_token.json").write_text(json.dumps({k: size / len(ids) for k, (ids, size) in sizes.items()}))


class Windows:
    """Windows of ``span`` tokens, ``length`` apart, in a fresh order and at a fresh offset every epoch.

    The order depends on the seed and on the number of the row alone, so a resumed run reads on
    exactly where it stopped.
    """

    def __init__(self, tokens: np.ndarray, length: int, span: int, seed: int, device: str) -> None:
        if len(tokens) < 2 * length + span:
            raise ValueError(f"token file: expected at least {2 * length + span} tokens, found {len(tokens)}")
        # Ids are below 2**15, so 16 bits hold them, and the whole set fits on the device.
        self.tokens = torch.from_numpy(tokens.astype(np.int16)).to(device)
        self.length, self.span, self.seed, self.device = length, span, seed, device
        self.count = (len(tokens) - span - length) // length
        self._orders: dict[int, Tensor] = {}

    def _starts(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
            offset = int(torch.randint(self.length, (1,), generator=generator))
            self._orders = {epoch: torch.randperm(self.count, generator=generator) * self.length + offset}
        return self._orders[epoch]

    def batch(self, first_row: int, rows: int) -> Tensor:
        """Rows ``first_row`` onwards -> token ids [rows, span], int64."""
        starts = []
        while rows:
            epoch, inside = divmod(first_row, self.count)
            taken = self._starts(epoch)[inside : inside + rows]
            starts.append(taken)
            first_row, rows = first_row + len(taken), rows - len(taken)
        index = torch.cat(starts).to(self.device).unsqueeze(1) + torch.arange(self.span, device=self.device)
        return self.tokens[index].long()


def validation_rows(tokens: np.ndarray, rows: int, span: int, device: str) -> Tensor:
    """Evenly spaced windows of a validation file -> [rows, span]; they may overlap when it is small."""
    if len(tokens) < span:
        raise ValueError(f"validation file: expected at least {span} tokens, found {len(tokens)}")
    starts = np.linspace(0, len(tokens) - span, rows).astype(np.int64)
    return torch.from_numpy(np.stack([tokens[s : s + span] for s in starts]).astype(np.int64)).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description="turn the text into token files")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tokenize_folder(arguments.text, arguments.tokenizer, arguments.out)


if __name__ == "__main__":
    main()
