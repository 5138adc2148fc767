"""An answer as a row of blocks, each of one kind, for the forms that show it so."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from surefoot.server.parsing import Delta

Kind = Literal["thinking", "text", "tool"]


@dataclass
class Block:
    """Thoughts, text, or a tool call with `text` as its arguments; `id` and `name` are the call's."""

    index: int
    kind: Kind
    text: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Change:
    """A block begins, grows by `text`, or is done."""

    what: Literal["begin", "grow", "done"]
    block: Block
    text: str = ""


class Blocks:
    """Puts pieces of a message into blocks, one behind the other."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: tuple[Kind, int] | None = None  # and which call it is

    def add(self, deltas: Seq[Delta]) -> Iterator[Change]:
        """What the pieces change."""
        for delta in deltas:
            if delta.reasoning:
                yield from self._grow("thinking", 0, delta.reasoning)
            if delta.content:
                yield from self._grow("text", 0, delta.content)
            if (tool := delta.tool) is not None:
                yield from self._grow("tool", tool.index, tool.arguments, tool.id or "", tool.name or "")

    def close(self) -> Iterator[Change]:
        """The last block is done; a message without any has an empty text."""
        if not self.all:
            yield from self._grow("text", 0, "")
        if self._open is not None:
            self._open = None
            yield Change("done", self.all[-1])

    def _grow(self, kind: Kind, which: int, text: str, call_id: str = "", name: str = "") -> Iterator[Change]:
        if self._open != (kind, which):
            if self._open is not None:
                yield Change("done", self.all[-1])
            self._open = (kind, which)
            self.all.append(Block(len(self.all), kind, id=call_id, name=name))
            yield Change("begin", self.all[-1])
        if text:
            self.all[-1].text += text
            yield Change("grow", self.all[-1], text)
