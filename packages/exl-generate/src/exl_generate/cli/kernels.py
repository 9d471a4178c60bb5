"""`exl info --kernels`: which GPU kernels a model's steps and their sampling run, and why not faster ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exl_core import ExLlamaV2Config
from exl_core.execution.kernels import KEYS, PROMPTS, ROWS, WAY, KernelUse, kernel_uses
from exl_generate.cli.models import model_folder
from exl_generate.cli.tables import show_table
from exl_generate.sampling import Settings
from exl_generate.sampling.plan import plan_of
from exl_generate.sampling.vocabulary import Vocabulary
from exl_kernels.device import cuda_status
from exl_kernels.errors import DeviceError
from exl_kernels.kv import KVKind
from exl_kernels.selection import Card, known_cards

__all__ = ["facts", "run", "show"]


def run(folder: Path | None, card: str | None, cache: KVKind, as_json: bool, adapter_rank: int | None = None) -> None:
    """Print the report for the model in `folder` (None: the bundled one), as tables or as one line of JSON."""
    found = facts(ExLlamaV2Config(model_folder(folder)), card, cache, adapter_rank)
    if as_json:
        print(json.dumps(found))
    else:
        show(found)


def facts(config: ExLlamaV2Config, card: str | None, cache: KVKind, adapter_rank: int | None = None) -> dict[str, Any]:
    """Card, code and kernels. `card` names one of `known_cards`; None is the first GPU of this machine that can be
    used. `adapter_rank`: of adapters that each row has. Raises DeviceError."""
    chosen = _card(card)
    uses = [
        *kernel_uses(config, chosen, cache=cache, keys=KEYS, adapter_rank=adapter_rank),
        *_sampling_uses(config, chosen),
    ]
    return {
        "card": chosen.name,
        "code": chosen.code,
        "features": sorted(chosen.features),
        "keys": KEYS,
        "uses": [
            {
                "operation": use.operation,
                "rows": use.rows,
                "tokens": use.tokens,
                "kernel": use.kernel,
                "calls": list(use.calls),
                "why": list(use.why),
            }
            for use in uses
        ],
    }


def _sampling_uses(config: ExLlamaV2Config, card: Card) -> list[KernelUse]:
    """Return the kernels that sample the tokens of a step with default settings and greedily, one token a sequence."""
    vocabulary = Vocabulary(None, config.vocab_size)
    found = []
    for name, settings in (("sampling", Settings()), ("sampling, greedy", Settings(top_k=1))):
        plan = plan_of(settings, vocabulary)
        for rows, tokens in (*((n, 1) for n in ROWS), *((n, n) for n in PROMPTS)):
            selected = card.sampling(plan, rows // tokens, config.vocab_size)
            found.append(KernelUse(name, rows, tokens, selected.kernel, selected.reasons))
    return found


def _card(name: str | None) -> Card:
    if name is not None:
        return Card.named(name)
    status = cuda_status()
    for device in status.devices:
        if status.available and device.reason is None:
            return Card.device(device.index)
    raise DeviceError(
        f"no GPU can be used here ({status.reason}): name the card to list the kernels of with --card, "
        f"one of {', '.join(known_cards())}"
    )


def show(found: dict[str, Any]) -> None:
    """Print the table of kernels by rows, and below it the reasons with what they apply to."""
    uses = [KernelUse(**{**use, "why": tuple(use["why"]), "calls": tuple(use["calls"])}) for use in found["uses"]]
    operations = list(dict.fromkeys(use.operation for use in uses))
    passes = dict.fromkeys((use.rows, use.tokens) for use in uses)
    by_place = {(use.operation, use.rows, use.tokens): use.kernel for use in uses}
    show_table(
        f"kernels on {found['card']} (code for sm_{found['code']}), by rows of a step; attention of {found['keys']} "
        "keys or those of the prompt",
        ["operation", *(f"{rows} (a prompt)" if tokens > 1 else str(rows) for rows, tokens in passes)],
        [[operation, *(by_place.get((operation, *one), "") for one in passes)] for operation in operations],
    )
    reasons: dict[str, dict[str, list[int]]] = {}
    for use in uses:
        for why in use.why if use.operation != WAY else ():
            reasons.setdefault(why, {}).setdefault(use.operation, []).append(use.rows)
    ways = dict.fromkeys((use.kernel, why) for use in uses if use.operation == WAY for why in use.why)
    if ways:
        show_table("why the pass runs this way", ["way", "reason"], [list(one) for one in ways])
    if reasons:
        show_table(
            "why nothing faster",
            ["reason", "operations", "rows"],
            [[why, ", ".join(places), _rows(places)] for why, places in reasons.items()],
        )


def _rows(places: dict[str, list[int]]) -> str:
    return ", ".join(str(rows) for rows in sorted({rows for found in places.values() for rows in found}))
