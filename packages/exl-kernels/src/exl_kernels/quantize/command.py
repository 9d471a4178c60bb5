"""`python -m exl_kernels.quantize SRC DST --bits 4.5 --head-bits 6`: a float folder to EXL2 or GPTQ, round to nearest.

This command knows llama-like tensor names only; `python -m exl_core.convert` takes the same options for every
architecture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from ..errors import ExlError
from .folder import QuantizeReport, quantize_folder

__all__ = ["main"]


def main(
    arguments: Sequence[str] | None = None,
    quantize: Callable[..., QuantizeReport] = quantize_folder,
    prog: str = "python -m exl_kernels.quantize",
    description: str | None = __doc__,
) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: command line; None for `sys.argv`.
        quantize: function with the signature of `quantize_folder`.
        prog: name of the program in messages.
        description: text of `--help`.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("source", metavar="SRC", help="folder with config.json and float .safetensors files")
    parser.add_argument("target", metavar="DST", help="new or empty folder")
    parser.add_argument("--bits", type=float, default=4.0, help="average bits per weight of the layers (default 4.0)")
    parser.add_argument("--head-bits", type=int, help="2, 3, 4, 5, 6, 8, or 16 for a float head (default 6; GPTQ 16)")
    parser.add_argument("--format", choices=("exl2", "gptq"), default="exl2", help="default exl2")
    parser.add_argument("--group-size", type=int, help="GPTQ only: rows of a group, -1 for one group (default 128)")
    parser.add_argument("--fast", action="store_true", help="skip the search for each group's best scale")
    parser.add_argument("--no-reorder", action="store_true", help="keep the order of the input features")
    options = parser.parse_args(arguments)
    if options.format == "exl2" and options.group_size is not None:
        parser.error("--group-size is an option of --format gptq; EXL2 chooses the groups of each matrix by --bits")
    try:
        report = quantize(
            options.source,
            options.target,
            bits=options.bits,
            head_bits=options.head_bits,
            format=options.format,
            group_size=128 if options.group_size is None else options.group_size,
            fast=options.fast,
            reorder=not options.no_reorder,
            progress=lambda done, total, key: print(f"{done}/{total} {key}", file=sys.stderr),
        )
    except (ExlError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{options.target}: {report.bits_per_weight:.3f} bits per weight in the layers, "
        f"{report.head_bits_per_weight:.3f} in the head, {report.nbytes / 1e6:.1f} MB in {len(report.files)} file(s)"
    )
    return 0
