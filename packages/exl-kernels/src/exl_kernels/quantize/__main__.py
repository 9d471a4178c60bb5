"""`python -m exl_kernels.quantize`: quantize a float model folder."""

from .command import main

if __name__ == "__main__":
    raise SystemExit(main())
