"""`exllamav2.generator.dynamic`: the dynamic generator with exllamav2's ways of cancelling and failing."""

from __future__ import annotations

import exl_generate
from exl_filters import ExLlamaV2Filter
from exl_generate import PAGED_PAGE_SIZE, ExLlamaV2DynamicJob
from exl_generate.dynamic.pages import Page as CachePage
from exl_generate.dynamic.speculation import NGramTrie
from exllamav2.generator.sampler import ExLlamaV2Sampler

__all__ = [
    "PAGED_PAGE_SIZE",
    "CachePage",
    "ExLlamaV2DynamicGenerator",
    "ExLlamaV2DynamicJob",
    "ExLlamaV2Filter",
    "ExLlamaV2Sampler",
    "NGramTrie",
]


class ExLlamaV2DynamicGenerator(exl_generate.ExLlamaV2DynamicGenerator):
    """The dynamic generator of exl_generate with exllamav2's way of cancelling and failing.

    A cancelled job has no last result, and `iterate` raises a failed job's error. Such a job has ended. Other jobs
    continue, and their results come with the next call of `iterate`.
    """

    raises_job_errors = True

    def cancel(self, job: ExLlamaV2DynamicJob) -> None:
        """End a job without any further result. A job that is unknown or finished is ignored."""
        self.discard(job)
