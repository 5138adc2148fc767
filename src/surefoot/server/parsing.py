"""An answer's text in parts: what was said, what was thought, which tools were called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolDelta:
    """A piece of a tool call: `id` and `name` come with the first piece, `arguments` is a piece of JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class Delta:
    """What a piece of text added."""

    content: str = ""
    reasoning: str = ""
    tool: ToolDelta | None = None


class ChatParser:
    """All text is content."""

    def feed(self, text: str) -> list[Delta]:
        """What the text adds."""
        return [Delta(content=text)] if text else []

    def finish(self) -> list[Delta]:
        """What was held back."""
        return []
