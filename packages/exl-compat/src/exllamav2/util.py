"""`exllamav2.util`."""

import gc
from collections import Counter

import torch

from exl_core import SeqTensor, Timer
from exllamav2._names import without_counterpart

__all__ = ["SeqTensor", "Timer", "list_live_tensors"]


def list_live_tensors() -> None:
    """Print the number of live tensors by shape, element type and device, the most frequent first."""
    gc.collect()
    # By type: isinstance asks proxies of all kinds for their class, which may issue a warning.
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    found = Counter((str(list(t.shape)), str(t.dtype), str(t.device)) for t in tensors)
    for (shape, dtype, device), count in found.most_common():
        print(f"{count} x {shape} {dtype} {device}")


__getattr__ = without_counterpart(__name__)
