"""Convert float model folders of every architecture: `python -m exl_core.convert SRC DST`."""

from .quantize import folder_layout, quantize_model

__all__ = ["folder_layout", "quantize_model"]
