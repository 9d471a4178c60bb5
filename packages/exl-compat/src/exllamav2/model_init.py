"""`exllamav2.model_init`."""

from exl_core.model_init import add_args, check_args, init, post_init_load, print_options

__all__ = ["add_args", "check_args", "init", "post_init_load", "print_options"]
