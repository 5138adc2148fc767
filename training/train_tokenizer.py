"""Train the 8192-entry byte-level BPE and write it with its chat template.

    python training/train_tokenizer.py --text DIR/text/train.bin --out DIR/tokenizer

The pre-tokenizer keeps what code needs: a line break together with the indentation that follows
is one piece (less the last blank, which goes to the word after it), an identifier part may carry
one leading mark (``.append``, ``_name``), and every digit stands alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY_SIZE = 8192
PIECES = "|".join(
    [
        r"[^\s\p{L}\p{N}]?\p{L}+|[ ]\p{L}+",  # a word, with one leading mark or blank
        r"[ ]?\p{N}",  # a digit
        r"[ ]?[^\s\p{L}\p{N}]+",  # other marks
        r"\s*\n(?=\S)",  # line breaks before unindented text
        r"\s+(?!\S)",  # blanks, less the one that the next word takes
        r"\s+",
    ]
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def documents(path: Path, every: int) -> Iterator[str]:
    """Every n-th NUL-terminated document of a text file."""
    for number, body in enumerate(path.read_bytes().split(b"\x00")):
        if number % every == 0 and body:
            yield body.decode("utf-8")


def train_tokenizer(texts: Iterator[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Byte-level BPE; the special tokens take ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise ValueError(f"tokenizer: expected {vocabulary_size} entries, found {tokenizer.get_vocab_size()}")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, out: Path, max_length: int = 8192) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL_TOKENS}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "eos_token_id": [ids["<|endoftext|>"], ids["<|im_end|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "do_sample": False,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="train the byte-level BPE")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=4, help="use every n-th document")
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(documents(arguments.text, arguments.every))
    write_tokenizer(tokenizer, arguments.out)
    sample = "def f(self, x_max=10):\n        return self.x_max + 128.5\n\n\nclass A:\n    pass\n"
    encoded = tokenizer.encode(sample)
    print(encoded.tokens)
    if tokenizer.decode(encoded.ids) != sample:
        raise ValueError("tokenizer: decode(encode(text)) is not the text")


if __name__ == "__main__":
    main()
