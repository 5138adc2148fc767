"""Which drafter suits a text? Tokens per step and acceptance of each, on prompts of one's own (counts, not times).

python examples/compare_drafters.py src/surefoot/bench/heldout.jsonl 96 3
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from surefoot import Engine, SamplingParams

PROMPT = '{"name": "ada", "age": 36, "city": "london"}\n{"name": "alan", "age": 41, "city": "wilmslow"}\n'


def read_prompts(file: str) -> dict[str, list[str]]:
    """Texts by kind from a file of JSON lines, `{"kind": ..., "text": ...}`."""
    prompts: dict[str, list[str]] = {}
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        prompts.setdefault(entry["kind"], []).append(entry["text"])
    return prompts


def main() -> None:
    """Print one row per drafter and kind of prompt."""
    arguments = sys.argv[1:] + [""] * (3 - len(sys.argv[1:]))
    prompts = read_prompts(arguments[0]) if arguments[0] else {"records": [PROMPT]}
    params = SamplingParams(max_new_tokens=int(arguments[1] or 32), ignore_eos=True)
    draft_length = int(arguments[2] or 3)

    plain = Engine.from_pretrained("surefoot-demo", drafter="none", max_len=2048)
    expected = {kind: [plain.generate(text, params).token_ids for text in texts] for kind, texts in prompts.items()}
    print(f"K = {draft_length}    kind     tokens per step   kept of drafted")
    for drafter in ("ngram", "mtp", "mtp+ngram"):
        engine = Engine.from_pretrained("surefoot-demo", drafter=drafter, draft_length=draft_length, max_len=2048)
        for kind, texts in prompts.items():
            outputs = [engine.generate(text, params) for text in texts]
            assert [out.token_ids for out in outputs] == expected[kind]  # no number without this
            tokens, steps, kept, drafted = (
                sum(getattr(out.stats, name) for out in outputs) for name in ("tokens", "steps", "accepted", "proposed")
            )
            share = kept / max(drafted, 1)
            print(f"{drafter:9}  {kind:8} {tokens / steps:15.2f} {f'{kept} of {drafted}':>17} ({share:.0%})")


if __name__ == "__main__":
    main()
