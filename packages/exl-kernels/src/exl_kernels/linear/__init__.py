"""Matmuls with EXL2, GPTQ and float matrices at the bits per weight of their files.

| module | contents |
|---|---|
| `matrix` | the public class for every device |
| `cuda` | one matrix on a GPU |
| `fused` | several matrices that share an input, with their prologue and epilogue |
| `planned` | what plans of such matmuls answer, also for shapes alone |
| `lora` | adapters of rows on a GPU |
| `workspace` | the memory of inter-block reductions |
"""

from .matrix import QUARTERS, Compute, Format, QuantMatrix

__all__ = ["QUARTERS", "Compute", "Format", "QuantMatrix"]
