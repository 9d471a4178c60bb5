"""Choose the replica of a request by the cost of its prompt there. Pure functions and data; imports nothing of Ray."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from exl_serve.request.labels import LABEL_BYTES

__all__ = ["Index", "Load", "rank"]

PREFILL_RATE = 2000.0
"""Prompt tokens a second of a replica without measurements."""
ROW_SECONDS = 0.5
"""Assumed cost, in seconds, of one waiting request to the requests after it."""
BUSY_WEIGHT = 0.02
"""Seconds that a full batch costs a new request, because its steps take longer."""
CLOSE = 0.1
"""Replicas within this share of the best cost count as equal."""
MOST_LABELS = 1 << 18
LOST_SECONDS = 30.0
"""A request that was sent so long ago, and that no report counts, has not arrived."""


@dataclass(slots=True)
class Load:
    """State of one replica as a router knows it: its last report, and the requests sent there since."""

    running: int = 0
    queued: int = 0
    queued_tokens: int = 0
    batch: int = 16
    prefill_rate: float = 0.0
    #: of the engine process: a new one has an empty cache
    boot: bytes = b""
    #: number of the last report
    report: int = -1
    #: requests that the last report does not count
    sent: int = 0
    #: prompt tokens of those that are not computed yet, as far as its speed tells, at `sent_at`
    sent_tokens: float = 0.0
    sent_at: float = 0.0

    @property
    def speed(self) -> float:
        """Prompt tokens a second."""
        return self.prefill_rate or PREFILL_RATE

    def advance(self, now: float) -> None:
        """Subtract the tokens computed since `sent_at`."""
        self.sent_tokens = max(0.0, self.sent_tokens - self.speed * (now - self.sent_at))
        self.sent_at = now


def rank(
    matched: Mapping[str, int], prompt_tokens: int, loads: Mapping[str, Load], first_label: bytes = b""
) -> list[list[str]]:
    """Return the replicas in ranks, best first, by the seconds until the first token.

    `matched` are the prompt tokens that a replica has in its cache. Replicas whose cost is within 10 % of the best are
    ordered by a rendezvous hash of the first label. So every router spreads prefixes that no replica has in the same
    way.
    """
    costs = {name: _cost(load, prompt_tokens - matched.get(name, 0)) for name, load in loads.items()}
    if not costs:
        return []
    limit = min(costs.values()) * (1 + CLOSE) + 1e-6
    near = [name for name in costs if costs[name] <= limit]
    # A holder comes before replicas that would have to compute the prefix: otherwise the prefix would spread over all.
    near.sort(key=lambda name: (-matched.get(name, 0), _hash(name, first_label)))
    far = sorted(
        (name for name in costs if costs[name] > limit), key=lambda name: (costs[name], _hash(name, first_label))
    )
    return [[name] for name in near] + [[name] for name in far]


def _cost(load: Load, new_tokens: int) -> float:
    jobs = load.running + load.queued + load.sent
    over = max(0, jobs + 1 - load.batch)
    waiting = (max(0, new_tokens) + load.queued_tokens + load.sent_tokens) / load.speed
    return waiting + over * ROW_SECONDS + BUSY_WEIGHT * min(1.0, jobs / load.batch)


def _hash(name: str, label: bytes) -> bytes:
    return hashlib.blake2b(name.encode(), key=label[:64], digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request that was sent to a replica. Tags of an ingress grow."""

    ingress: str
    tag: int
    new_tokens: int
    at: float

    def is_open(self, tags: Mapping[object, int], now: float) -> bool:
        """Whether a report with these highest tags, by ingress, does not count the request, and it may still arrive."""
        return self.tag > tags.get(self.ingress, 0) and now - self.at < LOST_SECONDS


@dataclass
class Index:
    """The pages of each replica as one router knows them: from reports, and from requests sent since."""

    page_size: int = 256
    clock: Callable[[], float] = time.monotonic
    loads: dict[str, Load] = field(default_factory=dict)
    #: by replica: label -> the last request with it that was sent there (None: it is reported)
    _labels: dict[str, OrderedDict[bytes, _Sent | None]] = field(default_factory=dict)
    #: by replica: requests that no report has counted
    _sent: dict[str, list[_Sent]] = field(default_factory=dict)

    def keep(self, names: Sequence[str]) -> None:
        """Keep these replicas and forget all others."""
        for gone in set(self.loads) - set(names):
            del self.loads[gone], self._labels[gone], self._sent[gone]
        for name in names:
            self.loads.setdefault(name, Load())
            self._labels.setdefault(name, OrderedDict())
            self._sent.setdefault(name, [])

    def report(self, name: str, stats: Mapping[str, object]) -> None:
        """Store a replica's report if it is new and valid; an invalid one changes nothing."""
        load = self.loads.get(name)
        number, boot, labels = stats.get("report"), stats.get("boot"), stats.get("labels", b"")
        if load is None or not isinstance(number, int) or not isinstance(boot, bytes) or not isinstance(labels, bytes):
            return
        if number == load.report and boot == load.boot:
            return
        values = [stats.get(key) for key in ("running", "queued", "queued_tokens", "batch")]
        rate = stats.get("prefill_rate")
        if not all(isinstance(v, int) and v >= 0 for v in values) or not isinstance(rate, int | float) or rate < 0:
            return
        seen, settled = _tags(stats.get("seen", {})), _tags(stats.get("settled", {}))
        if seen is None or settled is None:
            return
        running, queued, queued_tokens, batch = (int(v) for v in values)  # type: ignore[call-overload]
        now = self.clock()
        fresh: OrderedDict[bytes, _Sent | None] = OrderedDict.fromkeys(
            labels[at : at + LABEL_BYTES] for at in range(0, len(labels), LABEL_BYTES)
        )
        # The pages of a prompt are in the report's labels if it was computed when they were read. Until then the labels
        # of what was sent stay, however late reports are. An engine that was replaced has an empty cache.
        if load.report < 0 or boot == load.boot:
            fresh |= {
                label: one for label, one in self._labels[name].items() if one is not None and one.is_open(settled, now)
            }
        self._labels[name] = fresh
        # A report is on its way for a while. Without what was sent meanwhile, a busy replica would look idle.
        self._sent[name] = left = [one for one in self._sent[name] if one.is_open(seen, now)]
        tokens = sum(one.new_tokens for one in left)
        self.loads[name] = Load(
            running, queued, queued_tokens, max(1, batch), float(rate), boot, number, len(left), float(tokens), now
        )

    def matched(self, name: str, labels: Sequence[tuple[int, bytes]]) -> int:
        """Return the tokens of the longest run of leading pages that a replica has."""
        known = self._labels.get(name, OrderedDict[bytes, _Sent | None]())
        pages = 0
        for page, label in labels:
            if label not in known:
                break
            pages = page
        return pages * self.page_size

    def sent(
        self, name: str, labels: Sequence[tuple[int, bytes]], prompt_tokens: int, ingress: str = "", tag: int = 0
    ) -> None:
        """Record that a request was sent to a replica.

        `ingress` and `tag` identify it. A report names the highest tag of each ingress that it counts, as `seen`, and
        as `settled` that up to which all prompts were computed before its labels were read.
        """
        load = self.loads.get(name)
        if load is None:
            return
        now = self.clock()
        new = max(0, prompt_tokens - self.matched(name, labels))
        one = _Sent(ingress, tag, new, now)
        self._sent[name].append(one)
        load.sent += 1
        load.advance(now)
        load.sent_tokens += new
        kept = self._labels[name]
        for _, label in labels:
            kept[label] = one
            kept.move_to_end(label)
        while len(kept) > MOST_LABELS:
            kept.popitem(last=False)

    def order(self, labels: Sequence[tuple[int, bytes]], prompt_tokens: int) -> list[list[str]]:
        """Return the replicas in ranks for a prompt."""
        now = self.clock()
        for load in self.loads.values():
            load.advance(now)
        matched = {name: self.matched(name, labels) for name in self.loads}
        return rank(matched, prompt_tokens, self.loads, labels[0][1] if labels else b"")


def _tags(value: object) -> dict[object, int] | None:
    """Return the tags of a report by ingress; None for anything else."""
    if not isinstance(value, dict) or not all(isinstance(tag, int) for tag in value.values()):
        return None
    return value
