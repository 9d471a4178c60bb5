"""`exllamav2.ext`: the compiled extension, which has no counterpart; `exl_kernels` has the operators here."""

import torch

from exllamav2._names import stand_in, without_counterpart

__all__ = ["exllamav2_ext", "ext_c", "none_tensor"]

exllamav2_ext = ext_c = stand_in("exllamav2.ext.ext_c")
none_tensor = torch.empty((1, 1), device="meta")

__getattr__ = without_counterpart(__name__)
