"""CUDA tests on the CPU: the harness around the interpreter of rust/exl-ptx."""
