"""Run a generator to the end and inspect its results."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from exl_generate.dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.dynamic.pages import Page

__all__ = ["check_pages", "drain", "streamed_text", "streamed_tokens"]

Results = dict[ExLlamaV2DynamicJob, list[dict[str, Any]]]


def drain(generator: ExLlamaV2DynamicGenerator, limit: int = 10_000) -> Results:
    """Iterate until the queue is empty; returns results by job, in order. Raises after more than `limit` steps."""
    results: Results = defaultdict(list)
    for _ in range(limit):
        for result in generator.iterate():
            results[result["job"]].append(result)
        if generator.num_remaining_jobs() == 0:
            for result in generator.iterate():
                results[result["job"]].append(result)
            return results
    raise AssertionError(f"{generator.num_remaining_jobs()} jobs are left after {limit} steps")


def streamed_text(results: list[dict[str, Any]]) -> str:
    """Return all text of one job."""
    return "".join(result.get("text", "") for result in results)


def streamed_tokens(results: list[dict[str, Any]]) -> list[int]:
    """Return all token ids of one job."""
    return [int(i) for result in results if "token_ids" in result for i in result["token_ids"][0]]


def check_pages(generator: ExLlamaV2DynamicGenerator) -> None:
    """Check the invariants of page accounting between the table and the jobs. Raises `AssertionError`."""
    table = generator.page_table
    users: dict[int, list[tuple[bytes, ...]]] = defaultdict(list)
    for job in generator.active_jobs:
        for sequence in job.sequences:
            size = table.page_size
            for k, page in enumerate(sequence.allocated_pages):
                before = sequence.keys[: (k + 1) * size].tobytes()
                users[page.index].append((repr(sequence.loras).encode(), before))
                held = sequence.keys[k * size : min((k + 1) * size, sequence.kv_position)]
                _require(page.valid >= len(held), page, "holds less than the sequence has computed")
                _require(page.label is not None or page.valid == len(held), page, "claims K/V that were rewound")
                _require(bool((page.tokens[: len(held)] == held).all()), page, "holds other tokens than its sequence")
    for page in table.pages:
        _require(page.ref_count == len(users[page.index]), page, f"has {len(users[page.index])} users")
        _require(page.label is None or table.find(page.label, page.tokens) is page, page, "is not found by its label")
        if page.ref_count > 1:
            _require(page.label is not None, page, "is shared while its end is open")
            _require(len(set(users[page.index])) == 1, page, "is shared by different prefixes")
        if page.ref_count == 0:
            prefix = page.parent is not None
            _require((page.valid > 0) == prefix, page, "keeps content without a prefix, or a prefix only")
            _require(page.label is None or page.valid == table.page_size, page, "promises what nobody will compute")
            _require(page.drafted <= page.valid, page, "claims draft K/V after its content")
    free = sum(page.ref_count == 0 for page in table.pages)
    if free != table.unreferenced or not 0 <= table.reserved <= free:
        raise AssertionError(f"{free} free pages, {table.unreferenced} in eviction order, {table.reserved} reserved")
    cached = sum(page.ref_count == 0 and page.valid > 0 for page in table.pages)
    if table.cached != cached:
        raise AssertionError(f"{cached} unreferenced pages have content, {table.cached} are counted")
    if not generator.active_jobs and table.reserved:
        raise AssertionError(f"{table.reserved} pages stay reserved without a job")


def _require(condition: bool, page: Page, what: str) -> None:
    if not condition:
        raise AssertionError(f"{page} {what}")
