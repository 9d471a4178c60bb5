"""`exllamav2.attn_params`."""

from exl_core import AttentionParams, PagedParams

__all__ = ["PagedParams", "Params"]

Params = AttentionParams
