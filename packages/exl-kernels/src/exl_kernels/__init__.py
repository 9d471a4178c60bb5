"""Operators of quantized language models on torch tensors, on the CPU and on NVIDIA GPUs, and their file formats.

The package knows no models. A tensor's device decides where an operator runs. `threads` and `device` have the settings
of the process.

| module | what it has |
|---|---|
| `linear` | `QuantMatrix`: matmuls with EXL2, GPTQ and float matrices at the bits per weight of their files |
| `moe` | routing of rows to experts and the grouped matmuls of the experts, on a GPU |
| `kv`, `attention` | keys and values in pages (FP16, FP8, Q8, Q6, Q4), attention that reads them as they are stored |
| `norm`, `rope`, `activation` | the elementwise operators between the matmuls of a layer |
| `sampling` | from rows of logits to tokens, all transforms in one call |
| `drafting` | guesses at the next tokens of a text, for speculative decoding |
| `block`, `fused`, `linear.fused`, `staging` | parts of a layer or a step in one launch, bitwise identical |
| `formats`, `safetensors_file`, `quantize` | matrices exactly as files hold them; a float folder to EXL2 or GPTQ |
| `device`, `threads` | which GPU is here and why one is not used; the CPU kernels' threads |
| `errors` | one base class, `ExlError`; messages name the value, the limit and the remedy |
| `reference` | plain-torch twins of the operators: the tests' oracle, and an explanation |
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
