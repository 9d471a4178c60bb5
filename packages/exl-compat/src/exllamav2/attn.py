"""`exllamav2.attn`: the parameter objects of an attention call."""

from exl_core import AttentionParams, PagedParams

__all__ = ["ExLlamaV2Attention"]


class ExLlamaV2Attention:
    """The names under which callers of `model.forward_chunk` find the parameter objects."""

    Params = AttentionParams
    PagedParams = PagedParams
