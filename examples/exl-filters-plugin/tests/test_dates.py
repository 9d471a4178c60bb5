"""Dates against the calendar of the standard library."""

import datetime
import re
from pathlib import Path

from exl_filters_iso_date import IsoDateFilter, possible, whole
from hypothesis import given
from hypothesis import strategies as st

import exl_filters

VOCAB = exl_filters.Vocabulary([*"0123456789-", "20", "-0", "29", "</s>"], eos_token_id=14, special_ids=[14])


@given(st.from_regex(r"\d{4}-\d\d-\d\d", fullmatch=True))
def test_whole_is_what_the_library_reads(text: str) -> None:
    try:
        datetime.date.fromisoformat(text)
        exists = text.isascii()
    except ValueError:
        exists = False
    assert whole(text.encode()) == exists


@given(st.dates(), st.integers(0, 10))
def test_every_beginning_of_a_date_is_possible(date: datetime.date, length: int) -> None:
    assert possible(date.isoformat()[:length].encode())


def test_it_is_found_by_name() -> None:
    assert isinstance(exl_filters.create("iso-date", VOCAB), IsoDateFilter)


def test_leap_years() -> None:
    f = IsoDateFilter(None, VOCAB)
    for token in VOCAB.encode("2023-02-2")[0]:
        f.feed(token)
    allowed, _ = f.next()
    assert allowed is not None
    assert 9 not in allowed
    f.begin()
    for token in VOCAB.encode("2024-02-29")[0]:
        f.feed(token)
    assert f.ended()


def test_the_readme() -> None:
    readme = Path(__file__).parents[1] / "README.md"
    for example in re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(example, str(readme), "exec"), {})  # noqa: S102 - our own README
