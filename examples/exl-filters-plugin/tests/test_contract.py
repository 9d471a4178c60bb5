"""The laws every filter must obey, and the oracle that judges."""

from collections.abc import Callable

from exl_filters_iso_date import IsoDateFilter, possible
from exl_filters_iso_date.oracle import dates, prefix
from hypothesis import example, given
from hypothesis import strategies as st

from exl_filters.testing import filter_laws


@filter_laws(lambda vocab: IsoDateFilter(None, vocab), language=dates, profile="quick", examples=8)
def test_contract(law: Callable[[], None]) -> None:
    law()


@given(st.text("0123456789-", max_size=11) | st.dates().map(lambda d: d.isoformat()), st.integers(0, 11))
@example("2023-02-29", 11)
@example("2023-02-3", 11)
@example("2023-04-3", 11)
@example("000", 11)
@example("0000", 11)
def test_the_oracle_and_the_filter_agree_on_beginnings(text: str, length: int) -> None:
    beginning = text[:length].encode()
    assert prefix(beginning) == possible(beginning)
