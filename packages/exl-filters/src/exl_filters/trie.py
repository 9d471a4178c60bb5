"""A trie over token bytes, as flat arrays.

Tokens are sorted by their bytes. So the tokens under a node are one contiguous range of the sorted order, beginning
with those that end exactly at the node. Nodes are numbered level by level; the children of a node are contiguous and
ascending by byte.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["ByteTrie"]

ROOT = 0
_Ints = npt.NDArray[np.int64]


class ByteTrie:
    """A trie over token bytes. Node 0 is the root. Tokens without bytes are left out."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        ids = sorted((i for i, raw in enumerate(tokens) if raw), key=tokens.__getitem__)
        self.order: npt.NDArray[np.int64] = np.array(ids, dtype=np.int64)
        lengths = np.array([len(tokens[i]) for i in ids], dtype=np.int64)
        blob = np.frombuffer(b"".join(tokens[i] for i in ids), dtype=np.uint8)
        starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
        self._build(lengths, blob, starts)

    def _build(self, lengths: _Ints, blob: npt.NDArray[np.uint8], starts: _Ints) -> None:
        """Build level by level: among tokens sorted by bytes, a new node begins where the parent or the next byte
        changes.
        """
        count = len(lengths)
        node_of = np.zeros(count, dtype=np.int64)
        node_bytes, parents, los, his = [np.zeros(1, np.uint8)], [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], []
        his.append(np.array([count], dtype=np.int64))
        nodes, depth = 1, 0
        active = np.arange(count, dtype=np.int64)
        while True:
            active = active[lengths[active] > depth]
            if len(active) == 0:
                break
            byte = blob[starts[active] + depth]
            parent = node_of[active]
            new = np.ones(len(active), dtype=bool)
            new[1:] = (parent[1:] != parent[:-1]) | (byte[1:] != byte[:-1])
            first = np.flatnonzero(new)
            node_of[active] = nodes + np.cumsum(new) - 1
            node_bytes.append(byte[first])
            parents.append(parent[first])
            los.append(active[first])
            his.append(active[np.append(first[1:], len(active)) - 1] + 1)
            nodes += len(first)
            depth += 1
        parent_all = np.concatenate(parents)
        counts = np.bincount(parent_all[1:], minlength=nodes)
        first_child = 1 + np.concatenate([[0], np.cumsum(counts)])
        # Tokens that end exactly at a node come first in its range, up to the start of its first child's range.
        lo, hi = np.concatenate(los), np.concatenate(his)
        exact_hi = hi.copy()
        has_child = np.flatnonzero(counts)
        exact_hi[has_child] = lo[first_child[has_child]]
        self._bytes = np.concatenate(node_bytes).tobytes()
        self._first = array("q", first_child.astype(np.int64).tobytes())
        self._lo, self._hi = array("q", lo.tobytes()), array("q", hi.tobytes())
        self._exact_hi = array("q", exact_hi.tobytes())
        self.node_count = nodes

    def child(self, node: int, byte: int) -> int:
        """Return the child of `node` along `byte`, or -1."""
        return self._bytes.find(byte, self._first[node], self._first[node + 1])

    def children(self, node: int) -> Iterable[tuple[int, int]]:
        """Yield `(byte, child)` pairs, ascending."""
        first, end = self._first[node], self._first[node + 1]
        return zip(self._bytes[first:end], range(first, end), strict=True)

    def find(self, text: bytes, node: int = ROOT) -> int:
        """Return the node reached from `node` along `text`, or -1."""
        for byte in text:
            node = self.child(node, byte)
            if node < 0:
                return -1
        return node

    def exact(self, node: int) -> tuple[int, ...]:
        """Return the ids of tokens that end at `node` (several when texts repeat)."""
        return tuple(self.order[self._lo[node] : self._exact_hi[node]].tolist())

    def exact_range(self, node: int) -> tuple[int, int]:
        """Return the range of `order` with the tokens that end at `node`."""
        return self._lo[node], self._exact_hi[node]

    def range(self, node: int) -> tuple[int, int]:
        """Return the range of `order` with the tokens at and under `node`."""
        return self._lo[node], self._hi[node]

    def under(self, node: int) -> npt.NDArray[np.int64]:
        """Return the ids of all tokens at and under `node`, in byte order."""
        return self.order[self._lo[node] : self._hi[node]]

    def longest(self, text: bytes, position: int = 0) -> tuple[int, int]:
        """Return `(length, id)` of the longest token that `text` continues with at `position`; (0, -1) when there is
        none.
        """
        node, best, found = ROOT, 0, -1
        for index in range(position, len(text)):
            node = self.child(node, text[index])
            if node < 0:
                break
            if self._exact_hi[node] > self._lo[node]:
                best, found = index - position + 1, int(self.order[self._lo[node]])
        return best, found
