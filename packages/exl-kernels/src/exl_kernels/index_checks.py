"""Optional checks for mistakes that the GPU ignores: slots, rows, positions and page numbers out of range.

A check takes a read-back, which a decode step cannot afford; `EXL_CUDA_CHECKS=1` turns the checks on for debugging.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .errors import ShapeError

__all__ = ["CHECKS_VARIABLE", "check_slots", "check_tables", "checks_enabled"]

CHECKS_VARIABLE = "EXL_CUDA_CHECKS"


def checks_enabled() -> bool:
    """Return whether the environment asks for the checks and no graph is being captured."""
    asked = os.environ.get(CHECKS_VARIABLE, "0").strip() not in ("", "0")
    return asked and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def check_slots(what: str, key: Tensor, slots: Tensor) -> None:
    """Raise ShapeError for slots [T] that are neither -1 nor in pages whose keys are [pages, page_size, ..]."""
    limit = key.shape[0] * key.shape[1]
    found = slots.cpu()
    wrong = (found < -1) | (found >= limit)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ShapeError(
            f"{what}: slot {int(found[at])} of token {at}; the pages hold slots 0 to {limit - 1}, -1 is none"
        )


def check_tables(what: str, key: Tensor, block_table: Tensor, rows: Tensor, positions: Tensor, window: int) -> None:
    """Raise ShapeError for rows outside the block table, positions beyond it, and needed pages that do not exist."""
    num_pages, page_size = key.shape[:2]
    table, row, position = block_table.cpu().long(), rows.cpu().long(), positions.cpu().long()
    batch, width = table.shape
    wrong = (row < 0) | (row >= batch)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ShapeError(f"{what}: row {int(row[at])} of token {at}; the block table has rows 0 to {batch - 1}")
    wrong = position >= width * page_size
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ShapeError(
            f"{what}: position {int(position[at])} of token {at}; "
            f"{width} pages of {page_size} end at {width * page_size - 1}"
        )
    index = torch.arange(width)
    first = (position - window + 1).clamp(min=0) // page_size if window else torch.zeros_like(position)
    needed = (position >= 0)[:, None] & (index >= first[:, None]) & (index <= (position // page_size)[:, None])
    wrong = needed & ((table[row] < 0) | (table[row] >= num_pages))
    if bool(wrong.any()):
        token, page = (int(i) for i in wrong.nonzero()[0])
        raise ShapeError(
            f"{what}: page {page} of token {token} is number {int(table[row[token], page])}; "
            f"there are pages 0 to {num_pages - 1}"
        )
