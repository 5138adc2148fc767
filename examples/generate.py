"""Continue a prompt with the bundled model, and check that speculation changed nothing.

python examples/generate.py "def fibonacci(n):"
"""

from __future__ import annotations

import sys

from surefoot import Engine, SamplingParams


def main() -> None:
    """Decode one prompt with drafts and without; print the text and the statistics."""
    prompt = sys.argv[1] if len(sys.argv) > 1 else "def read_lines(path):\n"
    params = SamplingParams(max_new_tokens=48)

    engine = Engine.from_pretrained("surefoot-demo", drafter="mtp", draft_length=3, max_len=1024)
    out = engine.generate(prompt, params)
    print(prompt + out.text)

    stats = out.stats
    print(f"\n{stats.tokens} tokens in {stats.steps} steps, ended by {out.finish_reason!r}")
    print(f"drafted {stats.proposed}, kept {stats.accepted}; kept by draft position: {stats.accepted_by_position}")

    plain = Engine.from_pretrained("surefoot-demo", drafter="none", max_len=1024)
    assert plain.generate(prompt, params).token_ids == out.token_ids
    print("plain decoding gives the same tokens")


if __name__ == "__main__":
    main()
