"""`exllamav2.attn`: the parameter objects of an attention call, and the features of attention.

The flags tell scripts whether paged batches, sliding windows and softcaps work. They do for every model, by this
project's own kernels. Neither flash-attn nor xformers is used.
"""

from exl_core import AttentionParams, PagedParams
from exl_core.layers import Attention
from exllamav2._names import stand_in

__all__ = [
    "ExLlamaV2Attention",
    "PagedParams",
    "Params",
    "assert_paged_attn",
    "has_flash_attn",
    "has_flash_attn_with_paged",
    "has_flash_attn_with_softcap",
    "has_flash_attn_with_window",
    "has_lower_right_sdpa",
    "has_xformers",
]

Params = AttentionParams

has_flash_attn = True
has_flash_attn_with_paged = True
has_flash_attn_with_window = True
has_flash_attn_with_softcap = True
has_lower_right_sdpa = False
has_xformers = False

ExLlamaV2Attention = stand_in(
    "exllamav2.attn.ExLlamaV2Attention", Attention, Params=AttentionParams, PagedParams=PagedParams
)


def assert_paged_attn() -> None:
    """Return, since paged attention is always available. exllamav2 raises without a recent flash-attn."""
