"""`exllamav2.tensor_p`: matrices cut over devices."""

from exl_core.execution.sharded.context import TensorParallel
from exllamav2._names import stand_in, without_counterpart

__all__ = ["TPContext"]

TPContext = stand_in("exllamav2.tensor_p.TPContext", TensorParallel)

__getattr__ = without_counterpart(__name__)
