"""Matrices sharded over several devices by their outputs."""

from .context import TensorParallel
from .matrix import Part, SplitMatrix, load_split, over_parts
from .shares import Shares
from .transfer import send

__all__ = ["Part", "Shares", "SplitMatrix", "TensorParallel", "load_split", "over_parts", "send"]
