"""`exllamav2.conversion.optimize`: choosing a quantization per layer.

The counterpart of the converter is `python -m exl_core.convert`.
"""

from exllamav2._names import without_counterpart

__all__: list[str] = []

__getattr__ = without_counterpart(__name__)
