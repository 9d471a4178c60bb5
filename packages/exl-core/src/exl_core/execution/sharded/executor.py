"""The sharded executor: module by module, with matrices and attention heads on several devices."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from ...errors import UnsupportedError
from ..attn_params import PagedParams
from ..eager import Eager, first_step

if TYPE_CHECKING:
    from torch import Tensor

    from ...contracts import ForwardResult
    from ...language_model import LanguageModel
    from ..batch import Step
    from ..forward_pass import CheckedPass

__all__ = ["SHARDED", "Sharded"]


class Sharded(Eager):
    """Run module by module.

    What `shard_modules` gave each layer to run its heads, features and experts knows their devices; a linear's loaded
    matrix knows where its parts are. Results meet on the home device through the context's exchange, three times a
    layer where sums are exchanged: attention's outputs, o's outputs, down's sums. Where down is cut by outputs, the
    hidden features are one more.
    """

    @torch.no_grad()
    def run(self, model: LanguageModel, asked: CheckedPass) -> ForwardResult | None:
        """Run a checked pass; see `Executor.run`. Where devices have processes, all of them run it.

        Raises:
            PeerError: another process is gone, or runs another pass.
            UnsupportedError: several processes and an abort event, which they would not see at the same time.
        """
        assert model.tp_context is not None, "selected for sharded models"
        exchange = model.tp_context.exchange
        if not exchange.whole:
            if asked.abort_event is not None:
                raise UnsupportedError(
                    "abort_event and a process for each device exclude each other: load in one process"
                )
            exchange.check_same("a forward pass", _digest(asked))
        return super().run(model, asked)

    def step(self, model: LanguageModel, asked: CheckedPass) -> Step:
        """Build the step with the model's sharding."""
        return first_step(model, asked, model.tp_context)


SHARDED = Sharded()


def _digest(asked: CheckedPass) -> bytes:
    """Return 8 bytes that differ for passes of different tokens, places, results or adapters."""
    found = hashlib.blake2b(digest_size=8)

    def add(value: Tensor | None) -> None:
        found.update(b"-" if value is None else f"{tuple(value.shape)}".encode() + value.cpu().numpy().tobytes())

    params = asked.params
    add(asked.ids)
    for tensor in (asked.input_mask, params.position_offsets, params.rope_offsets):
        add(tensor)
    if isinstance(params, PagedParams):
        for tensor in (params.block_index, params.cache_seqlens, params.q_lens):
            add(tensor)
    results = (asked.preprocess_only, asked.last_id_only, asked.return_last_state, sorted(asked.extract))
    places = None if isinstance(params, PagedParams) else params.past_len
    adapters = [sorted(adapter.touched) for adapter in asked.adapters]
    found.update(repr((places, *results, adapters)).encode())
    return found.digest()
