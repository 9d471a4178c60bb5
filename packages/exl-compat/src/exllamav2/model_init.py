"""`exllamav2.model_init`: command-line arguments to a loaded model and tokenizer."""

import argparse

from exl_core import model_init
from exl_core.errors import ConfigFileError
from exl_core.model_init import add_args, init, post_init_load, print_options

__all__ = ["add_args", "check_args", "init", "post_init_load", "print_options"]


def check_args(args: argparse.Namespace) -> None:
    """End the script with a message unless the folder holds config.json, a tokenizer and weights."""
    try:
        model_init.check_args(args)
    except ConfigFileError as error:
        raise SystemExit(f" ## Error: {error}") from None
