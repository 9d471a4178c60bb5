"""exl-kernels alone: an EXL2 matrix of a model file as a torch module. Nothing of exl-core is needed.

python examples/kernels_alone.py FILE.safetensors MATRIX      (example: model.layers.0.mlp.down_proj)
"""

import sys

import torch

from exl_kernels.linear import QuantMatrix
from exl_kernels.safetensors_file import read_safetensors_header, read_tensor


class QuantLinear(torch.nn.Module):
    """y = x W + b with W as the file has it, about 4 bits a weight. For inference: it has no gradients."""

    def __init__(self, file: str, key: str) -> None:
        super().__init__()
        entries = read_safetensors_header(file).entries
        parts = {name: entry for name, entry in entries.items() if name.startswith(f"{key}.q_")}
        tensors = {name.removeprefix(f"{key}."): read_tensor(entry) for name, entry in parts.items()}
        self.matrix = QuantMatrix.from_exl2(tensors, name=key, compute="exact")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matrix.matmul(x)

    def extra_repr(self) -> str:
        return repr(self.matrix)


layer = QuantLinear(sys.argv[1], sys.argv[2])
network = torch.nn.Sequential(torch.nn.LayerNorm(layer.matrix.in_features), layer, torch.nn.GELU())
print(network)

x = torch.randn(3, layer.matrix.in_features, generator=torch.Generator().manual_seed(0))
y = network(x)
dense = torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, x.shape[-1:]) @ layer.matrix.dequantize().float())
print(f"{layer.matrix.nbytes / dense.shape[1] / x.shape[1] * 8:.2f} bits a weight in memory")
print(f"largest difference from the dequantized matrix: {(y - dense).abs().max():.1e}")
