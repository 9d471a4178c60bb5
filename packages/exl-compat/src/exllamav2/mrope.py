"""`exllamav2.mrope`: positions on three axes, which follow from an image's embeddings here."""

from exllamav2._names import without_counterpart

__all__: list[str] = []

__getattr__ = without_counterpart(__name__)
