"""`iterate_columns`: the same results as those of `iterate`, as arrays."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from effort import trials
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_generate import (
    COLUMN_FLAGS,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
    RequestError,
    StepColumns,
)
from exl_generate.testing import check_pages, drain, streamed_text, streamed_tokens
from exl_generate.testing.small import EOS, job, make, says, speculate

STARTED, FIRST, END, HELD = (COLUMN_FLAGS[name] for name in ("started", "first", "end", "held"))


@dataclass
class Read:
    """Everything that columns have said of one job."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    extra: list[Any] = field(default_factory=list)

    @property
    def end(self) -> Any:
        return self.extra[-1].end


def split(columns: StepColumns) -> dict[int, tuple[str, list[int], int]]:
    """Each entry's text, ids and flags by serial number; checks the types and lengths of the columns."""
    assert columns.serials.dtype == np.uint32
    assert columns.counts.dtype == np.uint16
    assert columns.flags.dtype == np.uint8
    assert isinstance(columns.ids, bytes)
    lengths = {len(columns), len(columns.serials), len(columns.counts), len(columns.flags), len(columns.texts)}
    assert len(lengths) == 1
    ids = np.frombuffer(columns.ids, dtype="<i4").tolist()
    assert len(ids) == columns.counts.sum()
    found = {}
    for serial, count, text, flags in zip(
        columns.serials.tolist(), columns.counts.tolist(), columns.texts, columns.flags.tolist(), strict=True
    ):
        assert serial not in found, "a job has two entries in a step"
        found[serial] = text, ids[:count], flags
        del ids[:count]
    assert set(columns.extra) <= set(found)
    return found


def read(generator: ExLlamaV2DynamicGenerator, limit: int = 2000) -> dict[int, Read]:
    """Run until nothing is left; what was said, by serial number."""
    said: dict[int, Read] = defaultdict(Read)
    for _ in range(limit):
        columns = generator.iterate_columns()
        for serial, (text, ids, flags) in split(columns).items():
            said[serial].text += text
            said[serial].ids += ids
            said[serial].flags.append(flags)
        for serial, extra in columns.extra.items():
            said[serial].extra.append(extra)
        if not generator.has_work:
            return said
    raise AssertionError("jobs are left")


requests = st.fixed_dictionaries(
    {
        "text": st.sampled_from(["abc", "the the", "hello there", "xyxyxy, xy", "abcdefghij" * 4]),
        "new": st.integers(0, 14),
        "stop_conditions": st.sampled_from([None, ["the", EOS], [" ", "xy"], list(range(3, 20, 5))]),
        "banned_strings": st.sampled_from([None, ["a", "xy"], ["the"]]),
        "seed": st.integers(0, 5),
        "return_probs": st.booleans(),
        "return_top_tokens": st.integers(0, 2),
        "return_logits": st.booleans(),
        "token_healing": st.booleans(),
    }
)


@settings(max_examples=trials(40, 12), deadline=None)
@given(asked=st.lists(requests, min_size=1, max_size=5), how=st.sampled_from(["plain", "ngram", "model"]))
def test_columns_equal_the_dicts(asked: list[dict[str, Any]], how: str) -> None:
    def jobs() -> list[ExLlamaV2DynamicJob]:
        return [job(**one, gen_settings=ExLlamaV2Sampler.Settings(temperature=2.0, top_k=0, top_p=0)) for one in asked]

    def generator() -> ExLlamaV2DynamicGenerator:
        return make(max_batch_size=3, max_chunk_size=16) if how == "plain" else speculate(how)

    one, other = generator(), generator()
    wanted, mine = jobs(), jobs()
    one.enqueue(wanted)
    other.enqueue(mine)
    dicts = drain(one)
    columns = read(other)
    assert set(columns) == {own.serial_number for own in mine}
    for own, twin in zip(wanted, mine, strict=True):
        assert twin.serial_number is not None
        results, said = dicts[own], columns[twin.serial_number]
        assert said.ids == streamed_tokens(results)
        assert said.text == streamed_text(results)
        assert sum(flags & STARTED > 0 for flags in said.flags) == 1
        assert sum(flags & FIRST > 0 for flags in said.flags) == (own.time_last_token is not None)
        assert [flags & END > 0 for flags in said.flags] == [False] * (len(said.flags) - 1) + [True]
        assert not said.flags[-1] & HELD
        _same_end(results[-1], said)
        progress = [(r["curr_progress"], r["max_progress"]) for r in results if r["stage"] == "prefill"]
        assert [extra.progress for extra in said.extra if extra.progress is not None] == progress
        _same_reports(own, results, said)
    check_pages(other)


def _same_end(last: dict[str, Any], said: Read) -> None:
    end = said.end
    assert end.reason == last["eos_reason"]
    assert end.stop == last.get("eos_triggering_token_id", last.get("eos_triggering_string"))
    held = last.get("held", {})
    ids = held["token_ids"][0].tolist() if "token_ids" in held else []
    assert (end.held_text, list(end.held_ids)) == (held.get("text", ""), ids)
    for name, value in end.statistics.items():
        if not name.startswith("time_"):
            assert value == last[name]
    assert set(end.statistics) <= set(last)


def _same_reports(own: ExLlamaV2DynamicJob, results: list[dict[str, Any]], said: Read) -> None:
    probabilities = [p for r in results if "token_probs" in r for p in r["token_probs"][0].tolist()]
    assert torch.tensor([p for extra in said.extra for p in extra.probabilities]).tolist() == probabilities
    top = [row for extra in said.extra for row in extra.top_tokens]
    dicts = [row for r in results if "top_k_tokens" in r for row in r["top_k_tokens"][0].tolist()]
    assert [ids.tolist() for ids, _ in top] == dicts
    assert len(top) == (len(said.ids) if own.return_top_tokens else 0)
    logits = [row for r in results if "logits" in r for row in r["logits"][0]]
    assert all(map(torch.equal, [row for extra in said.extra for row in extra.logits], logits))
    assert sum(len(extra.logits) for extra in said.extra) == len(logits) == (len(said.ids) if own.return_logits else 0)
    gone = [(r["suppressed_text"], r["suppressed_tokens"][0].tolist()) for r in results if "suppressed_text" in r]
    assert [(text, list(ids)) for extra in said.extra for text, ids in extra.suppressed] == gone


def test_most_rounds_have_nothing_extra_and_no_tensors() -> None:
    generator = make(lambda context: 3)
    generator.enqueue([job("ab", 9), job("cd", 9)])
    rounds = [generator.iterate_columns() for _ in range(9)]
    assert all(not one.extra for one in rounds[1:-1])
    assert all(len(one) == 2 and one.counts.tolist() == [1, 1] for one in rounds)
    assert sorted(rounds[-1].extra) == [0, 1]
    assert all(one.end.reason == "max_new_tokens" for one in rounds[-1].extra.values() if one.end is not None)
    assert len(generator.iterate_columns()) == 0


def test_held_text_is_flagged() -> None:
    generator = make(says("hxqq", after=1))
    generator.enqueue(job("z", 4, stop_conditions=["xylophone"]))
    rounds = [split(generator.iterate_columns())[0] for _ in range(4)]
    assert [(text, flags & HELD > 0) for text, _, flags in rounds] == [
        ("h", False),
        ("", True),
        ("xq", False),
        ("q", False),
    ]
    assert [flags & FIRST > 0 for _, _, flags in rounds] == [True, False, False, False]


def test_an_error_and_a_cancelled_job() -> None:
    generator = make()
    bad, gone, good = job("abq", 9), job("cd", 9), job("ef", 9)
    generator.model.faults[int(bad.sequence.ids[-1])] = RuntimeError("broken")  # type: ignore[attr-defined]
    generator.enqueue([bad, gone, good])
    generator.iterate_columns()
    generator.cancel(gone)
    said = read(generator)
    assert said[1].end.reason == "cancelled"
    assert said[2].end.reason == "max_new_tokens"
    assert bad.has_failed


def test_the_exception_is_in_extra() -> None:
    generator = make()
    bad = job("abq", 9)
    broken = RuntimeError("broken")
    generator.model.faults[int(bad.sequence.ids[-1])] = broken  # type: ignore[attr-defined]
    generator.enqueue(bad)
    said = read(generator)[0]
    assert (said.end.reason, said.end.error) == ("error", broken)


def test_hidden_states_cannot_be_read_by_columns() -> None:
    option = "return_hidden_state"
    generator = make()
    wanting = job("ab", 4, **{option: True})
    generator.enqueue([job("cd", 4), wanting])
    before = generator.snapshot()
    with pytest.raises(RequestError, match=option):
        generator.iterate_columns()
    assert generator.snapshot() == before, "nothing has happened"
    assert len(drain(generator)) == 2
    generator.iterate_columns()
    with pytest.raises(RequestError, match=f"{option}.*iterate"):
        generator.enqueue(job("ab", 4, **{option: True}))
    generator.iterate()
    generator.enqueue(job("ab", 4, **{option: True}))
    assert len(drain(generator)) == 1


def test_dicts_and_columns_in_turn_lose_nothing() -> None:
    generator = make()
    one = job("hello", 10)
    generator.enqueue(one)
    tokens: list[int] = []
    while not one.is_finished:
        tokens += [i for _, ids, _ in split(generator.iterate_columns()).values() for i in ids]
        tokens += streamed_tokens(generator.iterate())
    assert tokens == one.sequence.ids[5:].tolist()


def test_generate_during_columns_keeps_its_own_results() -> None:
    generator = make()
    generator.enqueue(job("hello", 10))
    generator.iterate_columns()
    alone = make().generate("abc", max_new_tokens=12, gen_settings=ExLlamaV2Sampler.Settings.greedy())
    settings = ExLlamaV2Sampler.Settings.greedy()
    answer = generator.generate("abc", max_new_tokens=12, gen_settings=settings, return_logits=True)
    assert answer == alone
    assert len(read(generator)[0].ids) == 9
