"""Committed states of prompts, kept beyond their requests, so that a prompt that begins alike need not be read again.

A tree: an edge is the tokens of one chunk, a node what a slot held behind them. So beginnings that several prompts
share are kept once, and a node costs its own chunk's keys and values, and one recurrent state.

A state depends on where the chunks of a prompt ended, in its last bits. Reading a prompt cuts it at multiples of the
chunk and at its end. Hence a whole chunk's node serves every prompt that goes on from there, while a shorter edge, the
end of a prompt, serves those alone that end at the same place. What is found is what reading would have given, bit for
bit.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from surefoot.cache.kv import KVCache, copied
from surefoot.sampling import require_int
from surefoot.types import Kept


@dataclass(eq=False)
class Node:
    """What is kept behind the first `stop` tokens of a text: by part, copies that begin where the parent's end."""

    stop: int = 0
    parts: dict[str, Kept] = field(default_factory=dict)
    parent: Node | None = field(default=None, repr=False)
    key: bytes = b""
    children: dict[bytes, Node] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Memory of its copies and of its tokens."""
        return sum(kept.nbytes for kept in self.parts.values()) + len(self.key)

    def path(self, behind: Node | None = None) -> list[Node]:
        """The nodes to this one from the text's beginning, or from behind an earlier one."""
        path: list[Node] = []
        node = self
        while node.parent is not None and node is not behind:
            path.append(node)
            node = node.parent
        return path[::-1]


class PrefixCache:
    """At most `limit` bytes of nodes, of which the one not used for the longest goes first. Only tensors and tokens are
    counted. For one thread. Raises InputError for a limit below 0."""

    def __init__(self, limit: int) -> None:
        require_int("prefix_cache_bytes", limit, low=0)
        self.limit = limit
        self.used = 0
        self.root = Node()
        # The least recently used first. A node is never older here than its children, so the first one is a leaf.
        self._order: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def match(self, tokens: Seq[int], chunk: int, parts: Collection[str], behind: Node | None = None) -> Node:
        """The node furthest along the tokens by whole chunks or to their very end, which has all `parts`, as have those
        before it; the root if there is none. `behind` is where to begin, a node on the way."""
        node = self.root if behind is None else behind
        while node.stop < len(tokens):
            child = self.child(node, tokens[node.stop : node.stop + chunk], parts)
            if child is None:
                break
            node = child
        return node

    def child(self, parent: Node, tokens: Seq[int], parts: Collection[str]) -> Node | None:
        """The node `tokens` behind the parent, if it is there and has all `parts`."""
        child = parent.children.get(_key(tokens))
        if child is None or not child.parts.keys() >= set(parts):
            return None
        self._touch(child)
        return child

    def insert(self, parent: Node, tokens: Seq[int], parts: Mapping[str, Kept]) -> Node | None:
        """Keep the state `tokens` behind the parent, or those parts of it that are not kept yet; None if the parent is
        gone or the limit leaves no room."""
        if parent is not self.root and parent not in self._order:
            return None
        node = parent.children.get(_key(tokens))
        if node is None:
            node = Node(parent.stop + len(tokens), parent=parent, key=_key(tokens))
            needed = len(node.key)
        else:
            needed = 0
        fresh = {name: kept for name, kept in parts.items() if name not in node.parts}
        needed += sum(kept.nbytes for kept in fresh.values())
        self._touch(node if node in self._order else parent)
        if not self._make_room(needed, keep=node if node in self._order else parent):
            return None
        node.parts.update(fresh)
        parent.children[node.key] = node
        self.used += needed
        self._touch(node)
        return node

    def clear(self) -> None:
        """Forget everything."""
        while self._order:
            self._drop(next(iter(self._order)))

    def _make_room(self, needed: int, keep: Node) -> bool:
        """Whether `needed` bytes more fit, once older nodes are gone; not the node to keep or those before it."""
        if needed > self.limit:
            return False
        while self.used + needed > self.limit:
            oldest = next(iter(self._order))
            if oldest is keep:  # the newest leaf, so there is none but on its path
                return False
            self._drop(oldest)
        return True

    def _drop(self, leaf: Node) -> None:
        assert leaf.parent is not None
        assert not leaf.children
        del leaf.parent.children[leaf.key]
        del self._order[leaf]
        self.used -= leaf.nbytes

    def _touch(self, node: Node) -> None:
        """The node and those before it were used just now, the first of them last."""
        for used in reversed(node.path()):
            self._order[used] = None
            self._order.move_to_end(used)


def _key(tokens: Seq[int]) -> bytes:
    return array("q", tokens).tobytes()


class StateLayer(Protocol):
    """A recurrent layer; see `cache.recurrent.RecurrentCache`."""

    def read_state(self, slot: int) -> Tensor:
        """The state."""

    def write_state(self, slot: int, state: Tensor) -> None:
        """Replace it."""

    def conv_past(self, slot: int) -> Tensor:
        """The last inputs of the convolution."""

    def set_past(self, slot: int, rows: Tensor) -> None:
        """Replace them."""


def keep_layers(layers: Seq[KVCache | StateLayer], slot: int, start: int, stop: int) -> Kept:
    """Copies of the layers' keys and values at `start .. stop - 1` and of their recurrent states, in order."""
    tensors: list[Tensor] = []
    for layer in layers:
        if isinstance(layer, KVCache):
            tensors += layer.copy_out(slot, start, stop)
        else:
            tensors += (copied(layer.read_state(slot)), copied(layer.conv_past(slot)))
    return Kept(start, stop, tuple(tensors))


def resume_layers(layers: Seq[KVCache | StateLayer], slot: int, kept: Seq[Kept]) -> None:
    """Put copies back that follow one another; of the states, the last ones."""
    for index, layer in enumerate(layers):
        if isinstance(layer, KVCache):
            for copy in kept:
                layer.copy_in(slot, copy.start, *copy.tensors[2 * index : 2 * index + 2])
        else:
            state, past = kept[-1].tensors[2 * index : 2 * index + 2]
            device = layer.read_state(slot).device
            layer.write_state(slot, state.to(device, copy=True))
            layer.set_past(slot, past.to(device))
