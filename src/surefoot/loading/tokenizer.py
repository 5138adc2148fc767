"""Text to token ids and back: `tokenizer.json` through the `tokenizers` library, chat templates through Jinja.

A folder without `tokenizer.json` has no tokenizer; such a model works with token ids, and `require_tokenizer` gives
the error for whoever needs text all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer as Backend

from surefoot.errors import CheckpointError, InputError, TokenizerError, shown
from surefoot.loading.files import is_there, read_json
from surefoot.sampling import check_token_ids

if TYPE_CHECKING:
    from jinja2 import Template

MOST_IDS = 2**32  # the library's ids have 32 bits
UNFINISHED = "\ufffd"  # what a decoder prints for bytes that are not (yet) a character


class Tokenizer:
    """A model's tokenizer. `specials` are its named special tokens ("eos_token", ...), as chat templates see them."""

    def __init__(
        self, backend: Backend, chat_template: str | None = None, specials: Mapping[str, str] | None = None
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.specials = dict(specials or {})
        self._compiled: Template | None = None

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer | None:
        """The folder's tokenizer, or None if it has no `tokenizer.json`. Raises CheckpointError if it cannot be read.

        The chat template is `chat_template.jinja`, else the one in `tokenizer_config.json`.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not is_there(file):
            return None
        try:
            backend = Backend.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain Exception for whatever is wrong in the file
            raise CheckpointError(f"{file}: expected a tokenizer, found: {error}") from error
        settings_file = folder / "tokenizer_config.json"
        settings = read_json(settings_file) if is_there(settings_file) else {}
        template = _template_file(folder / "chat_template.jinja") or _template_setting(settings.get("chat_template"))
        return cls(backend, template, _specials(settings))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-sequence token that the tokenizer's own config names, if it names one."""
        token = self.specials.get("eos_token")
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it count as themselves. `add_special_tokens` lets the
        tokenizer put its own around it (a text from `apply_chat` has them already)."""
        if not isinstance(text, str):
            raise InputError(f"text: expected a string, found {shown(text)}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"text: expected characters that UTF-8 can hold, found {error}") from error
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids without a token (padding rows of the embedding) give nothing."""
        return self.backend.decode(check_token_ids("tokens", tokens, MOST_IDS), skip_special_tokens=skip_special_tokens)

    def apply_chat(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True, **kwargs: object
    ) -> str:
        """The chat template filled with messages (`{"role": ..., "content": ...}`), as text to encode without further
        special tokens. `kwargs` go to the template (`enable_thinking=False`, `tools=[...]`).

        Raises TokenizerError if there is no template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise TokenizerError("chat template: expected one in the model's folder, found none; pass plain text")
        try:
            if self._compiled is None:
                self._compiled = _compile(self.chat_template)
            values = {**self.specials, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
            return self._compiled.render({**values, **kwargs})
        except Exception as error:  # a template is a program, and may fail like one
            raise TokenizerError(f"chat template: expected messages that it accepts, found: {error}") from error


class StreamDecoder:
    """Decodes tokens as they come and gives text only once it is final.

    A token may end inside a character, so its bytes are held back until the rest has come. All that `push` and one last
    `flush` return, put together, is the `decode` of all tokens: for byte-level tokenizers (this family's) whatever the
    tokens are, for those with byte-fallback tokens if the bytes are valid UTF-8 (there, a broken byte changes how the
    bytes before it are printed).
    """

    KEEP = 4  # tokens of context: some decoders treat the first token of a text differently
    LONG = 16  # tokens after which the window is cut, so that a long output is not decoded anew at every token

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that have been returned

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._window += tokens
        text = self._decode(self._window)
        final = text.rstrip(UNFINISHED)
        new = final[self._given :]
        self._given += len(new)
        if final == text and len(self._window) > self.LONG:
            self._cut()
        return new

    def flush(self) -> str:
        """What is still held back: the end of the text, where an unfinished character shows as U+FFFD."""
        rest = self._decode(self._window)[self._given :]
        self._window, self._given = [], 0
        return rest

    def _cut(self) -> None:
        """Drop old tokens at a moment when the text ends with a whole character. A window that now begins inside one
        shows U+FFFD there, but the same U+FFFD in every later decode, so the count of given characters holds."""
        tail = self._window[-self.KEEP :]
        text = self._decode(tail)
        if text and not text.endswith(UNFINISHED):
            self._window, self._given = tail, len(text)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, self._skip)


def require_tokenizer(tokenizer: Tokenizer | None, wanted: str) -> Tokenizer:
    """The tokenizer, or TokenizerError saying that `wanted` needs one."""
    if tokenizer is None:
        raise TokenizerError(f"{wanted}: expected a model folder with tokenizer.json, found none; use token ids")
    return tokenizer


def _template_file(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8") if is_there(file) else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: expected a chat template in UTF-8, found: {error}") from error


def _template_setting(value: object) -> str | None:
    """One template, or of several named ones the one called "default"."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        if named and isinstance(named[-1].get("template"), str):
            return str(named[-1]["template"])
    raise CheckpointError(f"tokenizer_config.json: chat_template: expected a template, found {shown(value, 100)}")


def _specials(settings: Mapping[str, object]) -> dict[str, str]:
    """The named special tokens; each is a string or an object with the string under "content"."""
    found = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise CheckpointError(f"tokenizer_config.json: {key}: expected UTF-8 text, found {error}") from error
            found[key] = text
    return found


def _compile(source: str) -> Template:
    # Templates come with checkpoints, from anyone: they run in the sandbox, and cannot change what they are given.
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson  # Jinja's own escapes for HTML
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)
