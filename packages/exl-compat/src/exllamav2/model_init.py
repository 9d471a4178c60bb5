"""`exllamav2.model_init`: command-line arguments to a loaded model and tokenizer."""

from exl_core.model_init import add_args, check_args, init, post_init_load, print_options

__all__ = ["add_args", "check_args", "init", "post_init_load", "print_options"]
