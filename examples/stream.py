"""Print text as it is accepted: each step of the loop brings one token or several.

python examples/stream.py "The history of" 0.8
"""

from __future__ import annotations

import sys

from surefoot import Engine, SamplingParams
from surefoot.loading.tokenizer import StreamDecoder


def main() -> None:
    """Stream one prompt's continuation; a bar marks where a step ended."""
    prompt = sys.argv[1] if len(sys.argv) > 1 else "def read_lines(path):\n"
    temperature = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0

    engine = Engine.from_pretrained("surefoot-demo", drafter="mtp", max_len=1024)
    assert engine.tokenizer is not None
    text = StreamDecoder(engine.tokenizer)  # holds back the bytes of an unfinished character

    print(prompt, end="")
    for step in engine.stream(prompt, SamplingParams(max_new_tokens=48, temperature=temperature, seed=1)):
        new = step.sequence.tokens[step.position : step.position + step.emitted]
        print(text.push(new), end="|", flush=True)
    print(text.flush())


if __name__ == "__main__":
    main()
