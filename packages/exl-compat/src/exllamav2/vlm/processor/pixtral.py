"""`exllamav2.vlm.processor.pixtral`: preparation of images, which the image tower does here."""

from exllamav2._names import without_counterpart

__all__: list[str] = []

__getattr__ = without_counterpart(__name__)
