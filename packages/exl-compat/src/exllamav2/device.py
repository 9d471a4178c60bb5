"""`exllamav2.device`: streams and scratch buffers of a device, which torch and the kernels manage here."""

from exllamav2._names import without_counterpart

__all__: list[str] = []

__getattr__ = without_counterpart(__name__)
