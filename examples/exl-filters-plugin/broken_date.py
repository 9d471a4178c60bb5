"""The filter of this plugin with a fault put in, to see what the law kit says of it:

exl-filters check broken_date:make

Its language is that of the good filter: what is told of it is the fault's doing.
"""

from exl_filters_iso_date import IsoDateFilter
from exl_filters_iso_date.oracle import dates


class BrokenDateFilter(IsoDateFilter):
    """Forgets what was written before the last token."""

    def _advance(self, state, token):
        return self.vocabulary.bytes_of(token), b""


def make(vocab):
    """FACTORY takes one argument, the kit's vocabulary, which is also the filter's tokenizer."""
    return BrokenDateFilter(None, vocab)


make.language = dates
