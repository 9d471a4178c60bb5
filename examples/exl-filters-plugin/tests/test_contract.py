"""The laws every filter must obey."""

from exl_filters_iso_date import IsoDateFilter, possible, whole
from hypothesis import strategies as st

from exl_filters.testing import Language, filter_laws

DATES = Language(
    "dates", possible, whole, st.dates().map(lambda d: d.isoformat().encode()), [b"2024-02-29", b"1999-12-31"]
)


@filter_laws(lambda vocab: IsoDateFilter(None, vocab), language=DATES, profile="quick", examples=8)
def test_contract(law):
    law()
