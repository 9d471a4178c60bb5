"""`exllamav2.generator.ngram`: counts of the tokens that followed each context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["NgramCache", "NgramCacheNode"]


@dataclass
class NgramCacheNode:
    """Counts of the tokens that followed one context."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, token: int) -> None:
        """Count `token` as a successor of the context."""
        self.counts[token] = self.counts.get(token, 0) + 1

    def best(self) -> tuple[int, int]:
        """Return the most frequent successor and its count; the first among equals."""
        token = max(self.counts, key=self.counts.__getitem__)
        return token, self.counts[token]


class NgramCache:
    """Successors of contexts of `min_len` to `max_len` - 1 tokens.

    A context that is new here starts with the counts of `preload`.
    """

    def __init__(self, min_len: int, max_len: int, preload: NgramCache | None = None) -> None:
        self.min_len = min_len
        self.max_len = max_len
        self.preload = preload
        self.nodes: dict[tuple[int, ...], NgramCacheNode] = {}

    def update(self, sequence: Sequence[int]) -> None:
        """Count every transition of `sequence`, including the one into its last token."""
        for end in range(self.min_len + 1, len(sequence) + 1):
            self.update_single(sequence[max(0, end - self.max_len) : end])

    def update_single(self, sequence: Sequence[int]) -> None:
        """Count the last token of `sequence` as the successor of every suffix of the tokens before it."""
        before, token = [int(i) for i in sequence[-self.max_len : -1]], int(sequence[-1])
        for length in range(self.min_len, len(before) + 1):
            context = tuple(before[len(before) - length :])
            node = self.nodes.get(context)
            if node is None:
                known = None if self.preload is None else self.preload.nodes.get(context)
                node = self.nodes[context] = NgramCacheNode(dict(known.counts) if known else {})
            node.add(token)

    def predict_next(self, context: Sequence[int], threshold: int = 1, preload: NgramCache | None = None) -> int | None:
        """Return the most frequent successor of the longest known suffix of `context`, or None.

        Its count must reach `threshold`.
        """
        example = self.preload if preload is None else preload
        for length in range(min(self.max_len - 1, len(context)), self.min_len - 1, -1):
            key = tuple(int(i) for i in context[len(context) - length :])
            node = self.nodes.get(key) or (None if example is None else example.nodes.get(key))
            if node is not None:
                token, count = node.best()
                if count >= threshold:
                    return token
        return None
