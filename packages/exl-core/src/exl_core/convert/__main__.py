"""`python -m exl_core.convert SRC DST --bits 4.5 --head-bits 6`: a float folder to EXL2 or GPTQ by round to nearest."""

from exl_kernels.quantize.command import main

from .quantize import quantize_model

if __name__ == "__main__":
    raise SystemExit(main(quantize=quantize_model, prog="python -m exl_core.convert", description=__doc__))
