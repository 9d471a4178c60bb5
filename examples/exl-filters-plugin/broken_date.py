"""The filter of this plugin with a fault put in, to see what the law kit says of it:

exl-filters check broken_date:make
"""

from exl_filters_iso_date import IsoDateFilter


class BrokenDateFilter(IsoDateFilter):
    """Forgets what was written before the last token."""

    def _advance(self, state, token):
        return self.vocabulary.bytes_of(token), b""


def make(vocab):
    """FACTORY takes one argument, the kit's vocabulary, which is also the filter's tokenizer."""
    return BrokenDateFilter(None, vocab)


make.language = ["2024-02-29", "1999-12-31"]
