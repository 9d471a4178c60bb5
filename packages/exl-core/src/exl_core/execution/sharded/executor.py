"""The sharded executor: module by module, with attention heads on several devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..eager import Eager, first_step

if TYPE_CHECKING:
    from ...language_model import LanguageModel
    from ..batch import Step
    from ..forward_pass import ForwardPass

__all__ = ["SHARDED", "Sharded"]


class Sharded(Eager):
    """Run module by module.

    `Step.sharding` knows the device of each head; a linear's loaded matrix knows where its output features are, and
    gathers them.
    """

    def step(self, model: LanguageModel, asked: ForwardPass) -> Step:
        """Build the step with the model's sharding."""
        return first_step(model, asked, model.tp_context)


SHARDED = Sharded()
