"""The version of exllamav2 whose interface this is; exl-compat's own is in its metadata."""

__all__ = ["__version__"]

__version__ = "0.3.2"
