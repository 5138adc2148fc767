"""What every command does between its options and its output: open the engine, encode the prompt, follow one run."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from surefoot.cli.options import ModelOptions, Options, number_or_file
from surefoot.cli.progress import LateBar
from surefoot.cli.prompt import read_prompt
from surefoot.engine.engine import Engine
from surefoot.engine.loop import StepRecord
from surefoot.engine.stats import Stats
from surefoot.engine.text import OutputText
from surefoot.errors import InputError
from surefoot.loading.tokenizer import require_tokenizer
from surefoot.sampling import SamplingParams
from surefoot.sequence import TokenLogprobs


@dataclass
class Session:
    """An engine with a request for it, all checked."""

    options: Options
    engine: Engine
    prompt: list[int]
    params: SamplingParams

    @classmethod
    def open(cls, options: Options) -> Session:
        """Check the options, read the prompt, load the model, encode; notes go to standard error."""
        params = options.sampling()
        prompt = read_prompt(options)
        if options.chat and not isinstance(prompt, str):
            raise InputError("--chat: expected a text prompt, found token ids")
        engine = load_engine(options)
        return cls(options, engine, _encode(engine, prompt, options.chat), params)

    def settings(self) -> dict[str, Any]:
        """The options in force, with the drafter that was chosen; without the prompt."""
        hidden = ("prompt", "file", "token_ids", "as_json")
        values = {name: value for name, value in asdict(self.options).items() if name not in hidden}
        chosen = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        return chosen | {"drafter": self.engine.drafter.name}


@dataclass(frozen=True)
class Step:
    """One step and the seconds that its parts took."""

    record: StepRecord
    seconds: dict[str, float]


class Run:
    """One request as it is decoded: iterate over its steps; `tokens` and `stats` grow with them."""

    def __init__(self, engine: Engine, prompt: list[int], params: SamplingParams) -> None:
        self.engine = engine
        self.prompt = prompt
        self.params = params
        self.stats = Stats()
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None

    def __iter__(self) -> Iterator[Step]:
        return self.steps()

    def steps(self) -> Generator[Step, None, None]:
        """The steps as they are made; closed early, the engine is free again."""
        clock = self.engine.clock
        start = last = clock.copy()
        with LateBar("reading the prompt") as bar:
            records = self.engine.stream(self.prompt, self.params, progress=bar)
            first = next(records)  # reads the whole prompt; every run has a step
        for record in chain([first], records):
            self.tokens += record.tokens
            self.logprobs += record.logprobs or ()
            self.stats.add(record)
            vars(self.stats).update(clock.since(start))
            self.finish_reason = record.sequence.finish_reason
            seconds, last = clock.since(last), clock.copy()
            yield Step(record, seconds)

    def finish(self) -> Run:
        """Decode to the end."""
        for _ in self:
            pass
        return self

    @property
    def text(self) -> str | None:
        """The output as text; None for a model without a tokenizer."""
        if self.engine.tokenizer is None:
            return None
        text = TextStream(self)
        return text.push(self.tokens) + text.flush()

    def result(self) -> dict[str, Any]:
        """The finished run as JSON has it."""
        logprobs = {} if self.params.logprobs is None else {"logprobs": [asdict(entry) for entry in self.logprobs]}
        return {
            "token_ids": self.tokens,
            "text": self.text,
            "finish_reason": self.finish_reason,
            **logprobs,
            "stats": stats_dict(self.stats),
        }


class TextStream:
    """A run's tokens as printable text, as they come; token ids for a model without a tokenizer."""

    def __init__(self, run: Run) -> None:
        tokenizer, params = run.engine.tokenizer, run.params
        self._text = None if tokenizer is None else OutputText(tokenizer, params.stop, params.min_new_tokens)

    def push(self, tokens: Seq[int]) -> str:
        """What can be printed after these tokens."""
        if self._text is None:
            return "".join(f"{token} " for token in tokens)
        return self._text.push(tokens)

    def flush(self) -> str:
        """What was held back."""
        return "" if self._text is None else self._text.flush()


def stats_dict(stats: Stats) -> dict[str, Any]:
    """Counts, seconds, and the rates that follow from them."""
    rates = ("proposed", "accepted", "acceptance_rate", "tokens_per_step", "tokens_per_second")
    return asdict(stats) | {name: getattr(stats, name) for name in rates}


def load_engine(options: ModelOptions, slots: int = 1) -> Engine:
    """The engine that the options ask for; notes go to standard error."""
    drafter = "draft-model" if options.drafter == "auto" and options.draft_model is not None else options.drafter
    second = "recording the step" if options.draft_model is None else "loading the draft model"
    with LateBar("loading", second) as bar:
        engine = Engine.from_pretrained(
            options.model,
            device=options.device,
            dtype=options.dtype,
            weights=options.weights,
            drafter=drafter,
            draft_length=options.draft_length,
            slots=slots,
            max_len=options.max_len,
            draft_model=options.draft_model,
            draft_vocab=number_or_file(options.draft_vocab),
            min_confidence=options.min_confidence,
            progress=bar,
        )
    for note in engine.notes:
        print(f"note: {note}", file=sys.stderr)
    return engine


def _encode(engine: Engine, prompt: str | list[int], chat: bool) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if not chat:
        return engine.encode(prompt)
    tokenizer = require_tokenizer(engine.tokenizer, "--chat")
    # The template writes the special tokens itself.
    return tokenizer.encode(tokenizer.apply_chat([{"role": "user", "content": prompt}]), add_special_tokens=False)
