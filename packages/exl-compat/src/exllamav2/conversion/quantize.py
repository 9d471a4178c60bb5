"""`exllamav2.conversion.quantize`: steps of the converter, whose counterpart is `python -m exl_core.convert`."""

from exllamav2._names import without_counterpart
from exllamav2.util import list_live_tensors

__all__ = ["list_live_tensors"]

__getattr__ = without_counterpart(__name__)
