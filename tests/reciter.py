"""A model that recites: a target whose answers to chats are known, with thoughts and calls as Qwen writes them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from tokenizers import AddedToken

from surefoot.engine import Engine
from surefoot.loading.tiny import byte_tokenizer
from surefoot.loading.tokenizer import Tokenizer
from surefoot.prove.table import Sometimes, TableTarget

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PARIS = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
TURNS = {
    "hello": "<think>\nA greeting: 😀\n</think>\n\nHello, wörld! 世界 <b>",
    "weather?": f"<think>\nHm.\n</think>\n\nLet me see.\n\n{PARIS}",
    "two": f"<think>\n\n</think>\n\n{PARIS}\n{PARIS}",
    "forced": f"<think>\n\n</think>\n\n{PARIS}",
    "count": "<think>\n\n</think>\n\none two three four five",
    "json": '<think>\nx\n</think>\n\n{"a": 1}',
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TEMPLATE = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<function=...><|im_end|>
{% endif %}
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def reciting_tokenizer() -> Tokenizer:
    """Bytes, and Qwen's marks, which are tokens of their own but no special ones."""
    backend = byte_tokenizer()
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return Tokenizer(backend, TEMPLATE, {"eos_token": "<|endoftext|>"})


@dataclass
class Reciter:
    """A target and a drafter that is right most of the time. To the last user's message it answers with the turn that
    `turns` has for it; to what is none of them, with the message itself."""

    turns: dict[str, str]
    slots: int = 4
    delay: float = 0.0

    def engine(self) -> Engine:
        """An engine of it."""
        tokenizer = reciting_tokenizer()
        size = tokenizer.vocab_size + 3  # some ids are padding
        end = tokenizer.encode("<|im_end|>")[0]
        begin = tokenizer.encode("<|im_start|>")[0]
        scripts: dict[tuple[int, ...], list[int]] = {}

        def row(prefix: tuple[int, ...]) -> torch.Tensor:
            start = max((place for place, token in enumerate(prefix) if token == begin), default=0)
            head = prefix[:start]
            if head not in scripts:
                asked = tokenizer.decode(head, skip_special_tokens=False).rpartition("<|im_start|>user\n")[2]
                asked = asked.partition("<|im_end|>")[0]
                scripts[head] = tokenizer.encode("<|im_start|>assistant\n" + self.turns.get(asked, asked))
            said = len(prefix) - start
            script = scripts[head]
            logits = torch.zeros(size)
            logits[script[said] if said < len(script) else end] = 100.0
            time.sleep(self.delay)
            return logits

        target = TableTarget(row, size, max_len=2048, slots=self.slots, hidden=True)
        return Engine(target, Sometimes(row), 3, tokenizer=tokenizer, eos_token_ids=[end, tokenizer.eos_token_id or 0])
