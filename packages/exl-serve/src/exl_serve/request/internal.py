"""The internal request: every public API translates into it, and nothing else reaches an engine.

The structs are arrays on the wire (msgpack), so the order of their fields is part of the protocol: add new fields at
the end, with a default.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

__all__ = ["Constraint", "EngineRequest", "MediaRef", "Sampling", "id_bytes", "ids_of"]


class Sampling(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Sampling settings by the names of `ExLlamaV2Sampler.Settings`. The defaults are neutral: they change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_a: float = 0.0
    min_p: float = 0.0
    tfs: float = 0.0
    typical: float = 0.0
    skew: float = 0.0
    temperature_last: bool = False
    smoothing_factor: float = 0.0
    min_temp: float = 0.0
    max_temp: float = 0.0
    temp_exponent: float = 1.0
    mirostat: bool = False
    mirostat_tau: float = 1.5
    mirostat_eta: float = 0.1
    token_repetition_penalty: float = 1.0
    token_repetition_range: int = -1
    token_repetition_decay: int = 0
    token_frequency_penalty: float = 0.0
    token_presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    dry_sequence_breakers: tuple[int, ...] | None = None
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    cfg_scale: float | None = None
    #: added to the logits of these tokens; -infinity bans one
    logit_bias: dict[int, float] = {}
    #: tokens outside of it are banned; None allows all
    allowed_token_ids: tuple[int, ...] | None = None


class Constraint(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A grammar that output must follow, as data: the engine compiles it."""

    #: json_schema: the text of a schema; json_object: any object, `source` is empty; regex: a pattern for the whole
    #: text; choice: a JSON list of texts; lark, gbnf: a grammar; plugin: a registered filter's name; budget: of
    #: reasoning, `options` are the arguments of `ThinkingBudget`
    kind: Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf", "plugin", "budget"]
    source: str
    #: it begins after this token id or text; None: at the first token
    after: int | str | None = None
    #: what happens when it has ended: the answer ends, anything may follow, or it waits for `after` again
    then: Literal["stop", "release", "rearm"] = "stop"
    #: the request's field, for error messages
    param: str = "response_format"
    #: of a plugin
    options: dict[str, Any] = {}
    #: Lark rules, among them `answer`, which refers to `source` as `content`; "": the answer is the content alone
    around: str = ""
    #: fields of the schemas that the grammar was made from, by the first number in the names of its rules, to find the
    #: one that is at fault
    parts: tuple[str, ...] = ()
    #: with `after`: a text whose first character, after spaces, is this one follows the grammar from its beginning
    leading: str = ""
    #: with `after`, which does not count in reasoning: the token that opens it, the token or text that closes it, and
    #: whether the text begins in it
    reasoning: tuple[int | None, int | str, bool] | None = None
    #: with `after`: the text may not end before it
    awaited: bool = False


class MediaRef(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A decoded image of a request: RGB bytes, row by row.

    They are in a file that its writer deletes once the engine has accepted the request, or in the message itself.
    """

    width: int
    height: int
    #: of the size and the pixels
    digest: bytes
    path: str = ""
    data: bytes = b""


class EngineRequest(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One prompt and its n completions."""

    id: str
    #: token ids, int32 little endian; -1 - k is image k of `media`
    prompt: bytes
    sampling: Sampling
    #: one for each completion
    seeds: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    #: the prompt to write away from; with sampling.cfg_scale
    negative_prompt: bytes | None = None
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    #: EOS tokens of the model end an answer too, unless this is set
    ignore_eos: bool = False
    banned_strings: tuple[str, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    token_healing: bool = False
    #: special tokens are part of the text
    special_text: bool = False
    #: None: off; k: the log-probability of each token, and the k most likely
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    media: tuple[MediaRef, ...] = ()
    #: name of a loaded adapter
    adapter: str | None = None
    cache_salt: bytes = b""
    #: seconds since the epoch after which the request is given up
    deadline: float | None = None
    #: name of the API key, for fairness; "" for none
    key: str = ""
    weight: float = 1.0
    #: 0 urgent, 1 interactive, 2 batch
    priority: int = 1
    #: ids that an earlier run of the same request has produced, int32 little endian, one entry for each completion
    resume: tuple[bytes, ...] = ()
    #: max_tokens is the rest of the context: the engine subtracts the tokens of images
    fill: bool = False
    #: an engine that has ended had accepted this request, so its client waits: no full queue rejects it
    again: bool = False
    #: completions that had ended there, which are not run
    over: tuple[int, ...] = ()

    @property
    def n(self) -> int:
        """Number of completions of this request."""
        return len(self.seeds)

    @property
    def open_choices(self) -> tuple[int, ...]:
        """The completions to run: all that are not over."""
        return tuple(choice for choice in range(self.n) if choice not in self.over)


def ids_of(data: bytes) -> list[int]:
    """Return the token ids of `id_bytes`."""
    found = array("i", data)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()


def id_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as int32, little endian. Raises OverflowError for a larger number."""
    found = array("i", ids)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()
