"""`surefoot chat`: a conversation in the terminal, or one that is piped in."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from surefoot.cli.generate import statistics
from surefoot.cli.options import ChatOptions, number_or_file
from surefoot.cli.progress import LateBar
from surefoot.cli.session import Run, TextStream
from surefoot.drafters.draft_model import DraftModelDrafter
from surefoot.engine.arguments import check_weights, parse_device, parse_dtype
from surefoot.engine.drafting import (
    NAMES,
    NEED_HEAD,
    check_drafter,
    check_takes_confidence,
    check_takes_vocabulary,
    usual_draft_length,
)
from surefoot.engine.engine import MAX_SIZE, Engine
from surefoot.engine.loaded import LoadedModel
from surefoot.errors import InputError, SurefootError, shown
from surefoot.loading.checkpoint import MtpPolicy
from surefoot.loading.tokenizer import Tokenizer, require_tokenizer
from surefoot.sampling import SamplingParams, require_int
from surefoot.server.parsing import ChatParser, Delta
from surefoot.types import Drafter

DIM, UNDIM = "\x1b[2m", "\x1b[22m"
BLOCK = '"""'
PREFIX_BYTES = 2**29  # of what was read of the conversation, kept for its next turn
HELP = """\
/stats             speed and acceptance of the last answer
/drafter NAME [K]  draft with mtp, ngram, suffix, mtp+ngram, mtp+suffix, draft-model, auto or none, K tokens a step
/system TEXT       what the model is told before the conversation; nothing takes it back
/reset             forget the conversation
/save FILE         write the conversation as JSON
/quit              leave (so does Ctrl-D)
A line that ends in \\ goes on in the next one; \"\"\" begins and ends several lines. Ctrl-C stops an answer."""


def chat(options: ChatOptions) -> None:
    """Read messages and commands from standard input until it ends or one says /quit. Answers go to standard output,
    errors of one message or command to standard error."""
    params = options.sampling()
    talk = Conversation(Models.load(options), params)
    if sys.stdin.isatty():
        _edit_lines()
        print(f"{talk.engine.drafter.name} drafts; /help lists the commands.", file=sys.stderr)
    while (message := read_message()) is not None:
        try:
            if message.startswith("/"):
                if not _command(talk, message):
                    return
            elif message.strip():
                talk.say(message.removeprefix(BLOCK))
        except SurefootError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)


@dataclass
class Models:
    """The weights, once, and engines over them, which take turns."""

    options: ChatOptions
    loaded: LoadedModel
    draft_model: Drafter | None

    @classmethod
    def load(cls, options: ChatOptions) -> Models:
        """Check the options, then read the files. An MTP head is read if there is one, whatever drafts at first."""
        device, dtype = parse_device(options.device), parse_dtype(options.dtype)
        check_weights(options.weights, device)
        usual_draft_length(check_drafter(options.drafter), options.draft_length, device)
        require_int("max_len", options.max_len, low=1, high=MAX_SIZE)
        if options.drafter == "draft-model" and options.draft_model is None:
            raise InputError("--drafter draft-model: expected --draft-model, found none")
        if options.draft_vocab is not None:
            check_takes_vocabulary(options.drafter)
        check_takes_confidence(options.drafter, options.min_confidence)

        def read(name: str, mtp: MtpPolicy) -> LoadedModel:
            with LateBar("loading") as bar:
                return LoadedModel.from_checkpoint(
                    name, device=device, dtype=dtype, max_len=options.max_len, mtp=mtp, weights=options.weights,
                    progress=bar,
                )  # fmt: skip

        with torch.inference_mode():
            loaded = read(options.model, "require" if options.drafter in NEED_HEAD else "if-present")
            second = None
            if options.draft_model is not None:
                target = read(options.draft_model, "skip").target(1)
                second = DraftModelDrafter(target, loaded.config.vocab_size)
        return cls(options, loaded, second)

    def engine(self, drafter: str, draft_length: int | None) -> Engine:
        """One that drafts so. Raises InputError if it cannot."""
        if self.draft_model is not None and drafter in ("auto", "draft-model"):
            chosen: str | Drafter = self.draft_model
        elif drafter == "draft-model":
            raise InputError("/drafter draft-model: expected a model loaded with --draft-model, found none")
        else:
            chosen = drafter
        vocabulary = self.options.draft_vocab if drafter in (*NEED_HEAD, "auto") and chosen == drafter else None
        least = self.options.min_confidence if drafter in NEED_HEAD else 0.0
        with LateBar("recording the step") as bar, torch.inference_mode():
            engine = Engine.over(self.loaded, drafter=chosen, draft_length=draft_length,
                                 draft_vocab=number_or_file(vocabulary), min_confidence=least,
                                 prefix_cache_bytes=PREFIX_BYTES, progress=bar)  # fmt: skip
        for note in engine.notes:
            print(f"note: {note}", file=sys.stderr)
        return engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's. Raises TokenizerError if it has none, or no chat template."""
        tokenizer = require_tokenizer(self.loaded.tokenizer, "surefoot chat")
        tokenizer.apply_chat([{"role": "user", "content": "Hello"}])
        return tokenizer


@dataclass
class Conversation:
    """What has been said. `system` is what the model is told before it, "" for nothing."""

    models: Models
    params: SamplingParams
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    last: Run | None = None

    def __post_init__(self) -> None:
        self.tokenizer = self.models.tokenizer
        self.engine = self.models.engine(self.models.options.drafter, self.models.options.draft_length)

    def everything(self) -> list[dict[str, Any]]:
        """All messages, the system's first."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages

    def say(self, text: str) -> None:
        """Send a message, print the answer as it comes, and keep both. Stopped before anything came, neither is kept;
        nor is a message that is refused: raises InputError (the conversation is too long, say) or TokenizerError."""
        before = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._answer()
            if answer["content"] or "reasoning_content" in answer:
                self.messages.append(answer)
        finally:
            if len(self.messages) == before + 1:
                del self.messages[before:]

    def _answer(self) -> dict[str, Any]:
        prompt = self.tokenizer.apply_chat(self.everything())
        run = Run(self.engine, self.tokenizer.encode(prompt, add_special_tokens=False), self.params)
        text = TextStream(run)
        parser = ChatParser(thinking=prompt.rstrip().endswith("<think>"))
        output = Shown()
        with _stoppable() as stopped, closing(run.steps()) as steps:
            self.last = run
            try:
                for step in steps:
                    stopped.later = True
                    output.add(parser.feed(text.push(step.record.tokens)))
                    if stopped.asked:
                        break
            except KeyboardInterrupt:  # while the prompt was read
                stopped.asked = True
        output.add(parser.feed(text.flush()) + parser.finish())
        output.end()
        if stopped.asked:
            run.finish_reason = "Ctrl-C"
            print("stopped", file=sys.stderr)
        elif run.finish_reason == "length":
            print(f"cut after {len(run.tokens)} tokens (--max-new-tokens, --max-len)", file=sys.stderr)
        thought = {"reasoning_content": output.reasoning} if output.reasoning else {}
        return {"role": "assistant", "content": output.content, **thought}


class Shown:
    """An answer on standard output: thoughts dimmed on a terminal, left out elsewhere."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self._coloured = sys.stdout.isatty()

    def add(self, deltas: list[Delta]) -> None:
        """Print what came."""
        for delta in deltas:
            if delta.content and self.reasoning and not self.content and self._coloured:
                sys.stdout.write("\n\n")
            self.content += delta.content
            self.reasoning += delta.reasoning
            sys.stdout.write(delta.content)
            if delta.reasoning and self._coloured:
                sys.stdout.write(DIM + delta.reasoning + UNDIM)
        sys.stdout.flush()

    def end(self) -> None:
        """End the line."""
        sys.stdout.write("\n")
        sys.stdout.flush()


@dataclass
class Stop:
    """Whether Ctrl-C was pressed. `later`: the step that is under way ends first."""

    asked: bool = False
    later: bool = False


@contextmanager
def _stoppable() -> Iterator[Stop]:
    """Ctrl-C ends what is inside: after the step that is under way, or at once if there is none yet, or it is pressed
    again."""
    stop = Stop()

    def press(_number: int, _frame: object) -> None:
        if stop.asked or not stop.later:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def read_message() -> str | None:
    """The next message or command, several lines put together; None at the end of the input. What was written as a
    block keeps its opening quotes, so that it is never taken for a command. Raises InputError for what is not UTF-8."""
    line = _line("> ")
    if line is None:
        return None
    if line.lstrip().startswith(BLOCK):
        return BLOCK + _block(line.lstrip().removeprefix(BLOCK))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_line(". ") or "")
    return "\n".join(lines)


def _block(line: str | None) -> str:
    lines: list[str] = []
    while line is not None:
        if line.rstrip().endswith(BLOCK):
            return "\n".join([*lines, line.rstrip().removesuffix(BLOCK)]).strip("\n")
        lines.append(line)
        line = _line(". ")
    return "\n".join(lines).strip("\n")


def _line(prompt: str) -> str | None:
    """One line; on a terminal after a prompt. Ctrl-C there drops it and asks again."""
    while True:
        try:
            if sys.stdin.isatty():
                return input(prompt)
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print("\n/quit or Ctrl-D leaves", file=sys.stderr)
        except UnicodeDecodeError as error:
            raise InputError(f"standard input: expected UTF-8 text, found: {error}") from error


def _edit_lines() -> None:
    """Arrow keys and the lines of before, where Python has them."""
    with suppress(ImportError):
        import readline  # noqa: F401  # `input` uses it


def _command(talk: Conversation, line: str) -> bool:
    """Carry out a command; whether the conversation goes on."""
    name, _, rest = line.partition(" ")
    if name == "/quit":
        return False
    if name not in COMMANDS:
        raise InputError(f"command: expected one of {', '.join([*COMMANDS, '/quit'])}, found {shown(name)}")
    COMMANDS[name](talk, rest.strip())
    return True


def _help(_talk: Conversation, _rest: str) -> None:
    print(HELP)


def _stats(talk: Conversation, _rest: str) -> None:
    print("no answer yet" if talk.last is None or not talk.last.tokens else statistics(talk.last))


def _drafter(talk: Conversation, rest: str) -> None:
    name, _, length = rest.partition(" ")
    if name:
        names = [known for known in NAMES if known != "draft-model" or talk.models.draft_model is not None]
        check_drafter(name, names)
        if length and not length.isdecimal():
            raise InputError(f"/drafter {name}: expected a draft length, found {shown(length)}")
        usual = talk.models.options.draft_length
        talk.engine = talk.models.engine(name, int(length) if length else usual)
    engine = talk.engine
    print(engine.drafter.name if engine.drafter.name == "none" else f"{engine.drafter.name}, K = {engine.draft_length}")


def _system(talk: Conversation, rest: str) -> None:
    talk.system = rest


def _reset(talk: Conversation, _rest: str) -> None:
    talk.messages.clear()


def _save(talk: Conversation, rest: str) -> None:
    if not rest:
        raise InputError("/save: expected a file's name, found none")
    try:
        text = json.dumps(talk.everything(), indent=2, ensure_ascii=False) + "\n"
        Path(rest).expanduser().write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"/save: expected a file that can be written, found: {error}") from error
    print(f"{len(talk.messages)} messages in {rest}")


COMMANDS: dict[str, Callable[[Conversation, str], None]] = {
    "/help": _help,
    "/stats": _stats,
    "/drafter": _drafter,
    "/system": _system,
    "/reset": _reset,
    "/save": _save,
}
