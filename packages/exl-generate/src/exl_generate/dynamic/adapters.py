"""Names for sets of adapters, so that K/V computed under one set is never taken for another's."""

from __future__ import annotations

from collections.abc import Sequence

from exl_generate.contracts import Adapter

__all__ = ["adapter_names"]


def adapter_names(loras: Sequence[Adapter]) -> list[str]:
    """A name for each adapter's effect, the same in every process, in the order given: several adapters add up in their
    order, and the first replacement of a matrix counts."""
    return [f"adapter {lora.content_digest.hex()} x {lora.lora_scaling!r}" for lora in loras]
