"""`exl convert`: write a quantized model folder from a float one."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exl_core.convert import quantize_model
from exl_generate.cli.progress import conversion_progress
from exl_generate.errors import RequestError
from exl_kernels.errors import ExlError
from exl_kernels.quantize.folder import QuantizeReport

__all__ = ["Options", "run"]

#: Rows of a GPTQ group when nobody says how many.
DEFAULT_GROUP_SIZE = 128


@dataclass(frozen=True)
class Options:
    """The parsed arguments."""

    source: Path
    target: Path
    format: Literal["exl2", "gptq"]
    bits: float
    head_bits: int | None
    group_size: int | None
    fast: bool
    reorder: bool


def run(options: Options, as_json: bool) -> None:
    """Convert the folder, with progress on standard error, and print what was written.

    Ctrl-C and errors remove what was written. Raises RequestError, and the errors of `quantize_model`.
    """
    if options.format == "exl2" and options.group_size is not None:
        raise RequestError(
            f"--group-size {options.group_size} is for --format gptq: EXL2 chooses the groups of each matrix by --bits"
        )
    try:
        with _single_interrupt(), conversion_progress(options.target.name) as progress:
            report = quantize_model(
                options.source,
                options.target,
                bits=options.bits,
                head_bits=options.head_bits,
                format=options.format,
                group_size=DEFAULT_GROUP_SIZE if options.group_size is None else options.group_size,
                fast=options.fast,
                reorder=options.reorder,
                progress=progress,
            )
    except ExlError:  # some are OSErrors too
        raise
    except OSError as error:
        place = options.target if error.filename is None else error.filename
        raise RequestError(f"{place}: {error.strerror or error}; nothing was written to {options.target}") from error
    _show(options, report, as_json)


@contextmanager
def _single_interrupt() -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt and ignore further ones, which would stop the removal of files."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _show(options: Options, report: QuantizeReport, as_json: bool) -> None:
    if as_json:
        facts = {
            "folder": str(options.target),
            "format": options.format,
            "bits_per_weight": report.bits_per_weight,
            "head_bits_per_weight": report.head_bits_per_weight,
            "bytes": report.nbytes,
            "files": [file.name for file in report.files],
            "plans": report.plans,
        }
        print(json.dumps(facts))
        return
    count = len(report.files)
    print(
        f"{options.target}: {report.bits_per_weight:.3f} bits per weight in the layers, "
        f"{report.head_bits_per_weight:.3f} in the head, {report.nbytes / 1e6:.1f} MB in {count} "
        f"file{'' if count == 1 else 's'}"
    )
