"""`exllamav2.rope`: rotation tables, which `ExLlamaV2Config.rope_settings` describes here."""

from exllamav2._names import without_counterpart

__all__: list[str] = []

__getattr__ = without_counterpart(__name__)
