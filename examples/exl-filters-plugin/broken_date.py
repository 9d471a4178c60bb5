"""The filter of this plugin with a fault, to show the law kit's report:

exl-filters check broken_date:make

Its language is that of the good filter, so the report shows the fault alone.
"""

from exl_filters_iso_date import IsoDateFilter
from exl_filters_iso_date.oracle import dates

from exl_filters import Vocabulary


class BrokenDateFilter(IsoDateFilter):
    """Forgets what was written before the last token."""

    def _advance(self, state: tuple[bytes, bytes], token: int) -> tuple[bytes, bytes]:
        return self.vocabulary.bytes_of(token), b""


def make(vocab: Vocabulary) -> BrokenDateFilter:
    """FACTORY takes one argument, the kit's vocabulary, which is also the filter's tokenizer."""
    return BrokenDateFilter(None, vocab)


make.language = dates  # type: ignore[attr-defined]
