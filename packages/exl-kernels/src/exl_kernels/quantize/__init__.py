"""Quantize a float model folder to EXL2 or GPTQ by round to nearest, without calibration."""

from .folder import QuantizeReport, quantize_folder

__all__ = ["QuantizeReport", "quantize_folder"]
