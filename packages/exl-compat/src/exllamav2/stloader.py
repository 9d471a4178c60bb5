"""`exllamav2.stloader`: reading weight files."""

from exllamav2._names import without_counterpart

__all__ = ["cleanup_stfiles"]


def cleanup_stfiles() -> None:
    """Do nothing: no weight file stays open after loading."""


__getattr__ = without_counterpart(__name__)
