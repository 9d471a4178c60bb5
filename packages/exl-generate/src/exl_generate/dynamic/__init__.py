"""The dynamic generator: jobs, scheduler, page table, batches, stop rules, results."""

from exl_generate.dynamic.columns import COLUMN_FLAGS, StepColumns
from exl_generate.dynamic.generator import ExLlamaV2DynamicGenerator
from exl_generate.dynamic.job import ExLlamaV2DynamicJob
from exl_generate.dynamic.pages import PAGED_PAGE_SIZE
from exl_generate.dynamic.snapshot import GeneratorSnapshot

__all__ = [
    "COLUMN_FLAGS",
    "PAGED_PAGE_SIZE",
    "ExLlamaV2DynamicGenerator",
    "ExLlamaV2DynamicJob",
    "GeneratorSnapshot",
    "StepColumns",
]
