"""`exllamav2.util`."""

from exl_core import SeqTensor, Timer

__all__ = ["SeqTensor", "Timer"]
