"""Labels of a prompt's full pages, as in the engine's page table, computed without the engine, for routing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

__all__ = ["LABEL_BYTES", "joined_labels", "page_labels", "salted"]

LABEL_BYTES = 8
"""Leading bytes of a label that identify a page well enough: a mistake costs time and changes no answer."""
MOST_LABELS = 128
ALL_UP_TO = 32
MOST_TOLD = 4096
"""Labels in a report."""


def salted(root: bytes, salt: bytes, adapter: str | None) -> bytes:
    """Return the root of a request's labels, from that of its model.

    Only the engine knows an adapter's root: requests of one adapter get another root, which is the same in every
    ingress.
    """
    if adapter is not None:
        root = hashlib.blake2b(root + adapter.encode(), digest_size=16).digest()
    if not salt:
        return root
    parts = "\0".join((root.hex(), f"salt {salt.hex()}"))
    return hashlib.blake2b(parts.encode(), digest_size=16, person=b"exl-namespace").digest()


def joined_labels(labels: Iterable[bytes | None]) -> bytes:
    """Return the first bytes of each label that is set, joined: a replica's report of its pages."""
    return b"".join(label[:LABEL_BYTES] for label in labels if label is not None)[: MOST_TOLD * LABEL_BYTES]


def page_labels(root: bytes, prompt: bytes, page_size: int) -> list[tuple[int, bytes]]:
    """Return (pages so far, label) of a prompt's full pages.

    Labels of each of the first 32 pages, every second up to 64, every fourth up to 128 and so on. `prompt` is int32
    little endian. Only the engine knows the labels of pages after an image, so they are left out.
    """
    ids = np.frombuffer(prompt, dtype="<i4").astype("<i8")
    images = np.flatnonzero(ids < 0)
    if len(images):
        ids = ids[: images[0]]
    found: list[tuple[int, bytes]] = []
    label, step = root, 1
    for page in range(1, len(ids) // page_size + 1):
        label = hashlib.blake2b(
            label + ids[(page - 1) * page_size : page * page_size].tobytes(), digest_size=16
        ).digest()
        if page > ALL_UP_TO * step:
            step *= 2
        if page % step == 0 and len(found) < MOST_LABELS:
            found.append((page, label[:LABEL_BYTES]))
    return found
