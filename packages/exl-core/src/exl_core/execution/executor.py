"""The interface of executors and of the models that they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from ..language_model import LanguageModel

if TYPE_CHECKING:
    from ..contracts import ForwardResult
    from .captured import DecodeGraphs

__all__ = ["ExecutableModel", "Executor", "Refused"]


class ExecutableModel(LanguageModel, Protocol):
    """A model with its captured steps."""

    @property
    def decode(self) -> DecodeGraphs:
        """The captured steps of the model."""


class Refused(NamedTuple):
    """The result of an executor that found, when it began to run a pass, that it cannot. Nothing has been computed."""

    reason: str


PassT = TypeVar("PassT", contravariant=True)


class Executor(Protocol[PassT]):
    """One way to run forward passes, or one pass that it was made for. `select` returns it; it chooses nothing.

    Captured steps take a pass as its caller asks for it, all others a checked one.
    """

    def run(self, model: ExecutableModel, asked: PassT) -> ForwardResult | Refused | None:
        """Run a pass, store its keys and values, and move `cache.current_seq_len`.

        Returns:
            The keys of `ExLlamaV2.forward_chunk` that apply. None if the pass was aborted; current_seq_len is then
            unchanged. Refused by a captured step that cannot be recorded or whose inputs are invalid: `select` with
            this reason then returns the next way.

        Raises:
            DeviceError: the GPU ran out of memory or was lost.
            InputError, SequenceTooLongError: places of the tokens are invalid. Raised before anything is computed.
        """
        ...
