"""`python -m exl_kernels.quantize SRC DST --bits 4.5 --head-bits 6`: a float folder to EXL2 by round to nearest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .errors import ExlError
from .quantize_folder import quantize_folder

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m exl_kernels.quantize", description=__doc__)
    parser.add_argument("source", metavar="SRC", help="folder with config.json and float .safetensors files")
    parser.add_argument("target", metavar="DST", help="new or empty folder")
    parser.add_argument("--bits", type=float, default=4.0, help="average bits per weight of the layers (default 4.0)")
    parser.add_argument("--head-bits", type=int, default=6, help="2, 3, 4, 5, 6, 8, or 16 for a float head (default 6)")
    parser.add_argument("--fast", action="store_true", help="skip the search for each group's best scale")
    parser.add_argument("--no-reorder", action="store_true", help="keep the order of the input features")
    options = parser.parse_args(arguments)
    try:
        report = quantize_folder(
            options.source,
            options.target,
            bits=options.bits,
            head_bits=options.head_bits,
            fast=options.fast,
            reorder=not options.no_reorder,
            progress=lambda done, total, key: print(f"{done}/{total} {key}", file=sys.stderr),
        )
    except ExlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{options.target}: {report.bits_per_weight:.3f} bits per weight in the layers, "
        f"{report.head_bits_per_weight:.3f} in the head, {report.nbytes / 1e6:.1f} MB in {len(report.files)} file(s)"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
