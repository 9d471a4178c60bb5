"""How the adapters of a pass are added to the results of its matrices.

| way | launches | for |
|---|---|---|
| matmul | none: it adds them itself (`LoraGroup.multiply`) | one or two rows of captured steps; `LoraGroup.fits` |
| group | one before each joined matmul and one after it (`LoraGroup`) | captured steps; `refusal_of_group` |
| table | one call after each matmul, for all rows (`LoraTable`) | other rows on a GPU that `LoraTable.takes` |
| torch | two matmuls after each matmul, for the rows of each pair (`LoraPair.forward`) | everything else |

The first way that applies adds, matrix by matrix. A step with adapters is captured only where kernels add all of them
(`refusal_of_capture`): torch's way decides on the host which rows a pair has. All but torch's are bitwise
identical.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from exl_kernels.selection import refusal_of_adapted_shapes

if TYPE_CHECKING:
    from ..contracts import Adapter, AdapterPair
    from ..language_model import LanguageModel

__all__ = ["refusal_of_capture", "refusal_of_group", "refusal_of_kernels"]


def refusal_of_capture(model: LanguageModel, sets: Sequence[tuple[Adapter, ...]]) -> str | None:
    """Return why rows of captured steps cannot have these adapters, or None."""
    # The head and routers return float32, which the kernels of adapters cannot add to.
    specs = (linear.spec for linear in model.linears())
    keys = {spec.key for spec in specs if spec.role != "head" and not spec.in_mixture}
    for adapter in (adapter for adapters in sets for adapter in adapters):
        if adapter.replacements or adapter.embedding is not None or adapter.embedding_pair is not None:
            return "an adapter brings whole matrices or changes the embedding"
        if not keys.issuperset(adapter.touched):
            return "an adapter changes the head or a layer of experts"
        if (why := refusal_of_kernels(adapter.pairs.values())) is not None:
            return why
    return None


def refusal_of_group(pairs: Sequence[AdapterPair], in_features: int, widths: Sequence[int]) -> str | None:
    """Return why pairs of the matrices of one joined matmul are not added as a `LoraGroup`, or None.

    Args:
        pairs: the pairs that change any of the matrices.
        in_features: inputs of the matrices.
        widths: outputs of each matrix.
    """
    if not pairs:
        return None
    return refusal_of_adapted_shapes(in_features, widths) or refusal_of_kernels(pairs)


def refusal_of_kernels(pairs: Iterable[AdapterPair]) -> str | None:
    """Return why no kernels add these pairs, whatever the rows, or None."""
    if all(pair.for_kernels for pair in pairs):
        return None
    return "an adapter has values or a shape that its kernels do not support"
