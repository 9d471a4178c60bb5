"""Time decode steps of each feature through the dynamic generator, and greedy ones in the same run.

    python benchmarks/bench_features.py [--feature NAME ...] [--batch 1 32] [--shape 8b] [--rounds 3] [--quick]

The model is a folder of random weights (make_random_model.py), made once and kept in `--folder`; `--shape bundled` is
the model that comes with the package, the default without a GPU. Jobs have prompts of 64 tokens; after 10 new tokens,
48 steps are timed by the host clock between two synchronizations of the device. Greedy steps are timed before each
feature; `share_of_greedy` is their time divided by the feature's, the median over the rounds. `ratio_vs_reference`
compares with the steps that `reference_name` names, such as those of twice the sequences for CFG.

Tokens are checked first: features that do not change tokens must give those of greedy jobs, and every feature the same
tokens in every round. A feature that fails has no line. JSON lines, then a table.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_step import CACHES, PAGE, bytes_of_step, check, replay_time, report
from feature_cases import DRAFTS, FEATURES, Feature, Parts, with_references
from gpu_timing import emit, environment, read_roof
from make_random_model import SHAPES, make_model

from exl_core import ExLlamaV2, ExLlamaV2CacheBase, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_core.execution.sections import SectionGraphs
from exl_core.layers import RMSNorm
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.bundled import default_model_dir, draft_model_dir
from exl_generate.dynamic.draft_length import FixedDraftLength
from exl_generate.dynamic.speculation import Drafter
from exl_generate.dynamic.text_drafter import Found, TextDrafter
from exl_kernels import _native

BITS = 4.0
LENGTH = 1024  # longest sequence
BUNDLED = "bundled"


def factors(shape: str) -> tuple[float, float]:
    """Return the factors of the last norm that make logits flat, and such that few ids are likely."""
    return (0.02, 1.0) if shape == BUNDLED else (1.0, 4.0)


@dataclass(frozen=True)
class Plan:
    """How features are measured."""

    prompt: int
    warmup: int
    steps: int

    def new_tokens(self, drafts: int) -> int:
        """Most tokens of a job, which must not end while it is measured."""
        return max(200, (self.warmup + self.steps + 8) * (1 + drafts))


@dataclass
class Run:
    """One measurement of a feature."""

    us: float
    spans: list[float]
    tokens: int
    ids: list[list[int]]
    captured: int
    reason: str | None
    left_to_cpu: int
    graph_us: float
    nodes: int


class AlwaysDrafting(TextDrafter):
    """Look up guesses in the text and fill up each job's guesses, so that every step has as many rows as possible."""

    def _guesses(self, job: ExLlamaV2DynamicJob, text: Any, room: int) -> Found:
        tokens, chances = super()._guesses(job, text, room)
        missing = room - len(tokens)
        return tokens + [int(job.sequence.ids[-1])] * missing, chances + [0.0] * missing


class Generator(ExLlamaV2DynamicGenerator):
    """Draft from text with `AlwaysDrafting`."""

    def _make_drafter(self, shared_ngram_tokens: int) -> Drafter:
        if not self.use_ngram_draft:
            return super()._make_drafter(shared_ngram_tokens)
        return AlwaysDrafting(self.num_draft_tokens, self.max_ngram, LENGTH, self.model.device)


def not_finite(cache: ExLlamaV2CacheBase) -> list[str]:
    """The first layers of a cache of halves whose keys or values are NaN or infinite, a line each."""
    found = []
    for layer, states in enumerate(zip(cache.key_states, cache.value_states, strict=True)):
        for name, state in zip(("keys", "values"), states, strict=True):
            if state is None or state.dtype != torch.float16:
                continue
            rows = (~state.isfinite()).flatten(0, 1).flatten(1).any(1).nonzero().flatten()
            if len(rows):
                first = state.flatten(0, 1).flatten(1)[rows[0]]
                elements = (~first.isfinite()).nonzero().flatten().tolist()
                found.append(
                    f"{name} of layer {layer}, {len(rows)} tokens, the first at {int(rows[0])} of the cache: "
                    f"{len(elements)} elements from {elements[0]} on"
                )
    return found[:8]


class Bench:
    """A model with everything that features need."""

    def __init__(self, model: ExLlamaV2, draft_folder: Path, scratch: Path, flat: float, peaked: float) -> None:
        self.model, self._flat, self._peaked = model, flat, peaked
        self.tokenizer = ExLlamaV2Tokenizer(model.config)
        self.parts = Parts(model, self.tokenizer, scratch)
        self.cuda = model.device is not None and model.device.type == "cuda"
        self._draft_folder = draft_folder
        self._draft: ExLlamaV2 | None = None
        self.caches: dict[tuple[str, str], ExLlamaV2CacheBase] = {}
        self._scale = 1.0

    @property
    def draft(self) -> ExLlamaV2:
        if self._draft is None:
            self._draft = load(self._draft_folder)
        return self._draft

    def model_of(self, feature: Feature) -> ExLlamaV2:
        return self.draft if feature.model == "draft" else self.model

    def cache(self, model: ExLlamaV2, kind: str, tokens: int) -> ExLlamaV2CacheBase:
        """Return a cache of that kind and length: the same one for every feature, whose captured steps it keeps."""
        key = ("draft" if model is self._draft else "main", kind)
        held = self.caches.get(key)
        if held is None or held.max_seq_len != tokens:
            self.caches.pop(key, None)
            held = self.caches[key] = CACHES[kind](model, max_seq_len=tokens)
        return held

    def forget_caches(self) -> None:
        """Free the caches and the captured steps over them."""
        self.caches.clear()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def shape_logits(self, *, peaked: bool) -> None:
        """Scale the last norm: many ids are about as likely, or few."""
        factor = self._peaked if peaked else self._flat
        if factor == self._scale:
            return
        norm = self.model.modules[-2]
        assert isinstance(norm, RMSNorm), "the module before the head"
        with torch.inference_mode():
            norm.loaded_weight.mul_(factor / self._scale)
        self._scale = factor
        self.model.decode.clear()  # matmuls with this norm keep a copy of its weight

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def generator(self, feature: Feature, batch: int, plan: Plan) -> ExLlamaV2DynamicGenerator:
        model = self.model_of(feature)
        # Drafted tokens take more room: all caches of a batch are as long as those need.
        each = -(-(plan.prompt + plan.new_tokens(DRAFTS) + 8) // PAGE) * PAGE
        most = 2 * batch
        tokens = most * each
        cache = self.cache(model, feature.cache, tokens)
        more: dict[str, Any] = {}
        if feature.drafter == "ngram":
            more = {"use_ngram_draft": True}
        elif feature.drafter == "model":
            more = {"draft_model": self.draft, "draft_cache": self.cache(self.draft, "fp16", tokens)}
        if feature.drafts:
            more["num_draft_tokens"] = feature.drafts
        made = Generator(model, cache, self.tokenizer, max_batch_size=most, max_chunk_size=2048, **more)
        if feature.drafts:
            made.drafter.length = FixedDraftLength(feature.drafts)
        return made

    def jobs(self, feature: Feature, batch: int, plan: Plan) -> list[ExLlamaV2DynamicJob]:
        vocab = self.model.config.vocab_size
        lowest = min(300, vocab // 4)

        def prompt(seed: int) -> torch.Tensor:
            return torch.randint(lowest, vocab, (1, plan.prompt), generator=torch.Generator().manual_seed(seed))

        made = []
        for index in range(batch * feature.jobs):
            ids: Any = prompt(index)
            if feature.sequences == 2:
                ids = [ids, prompt(1000 + index)]
            arguments = {"stop_conditions": [], **feature.job(self.parts, index)}
            new = plan.new_tokens(feature.drafts)
            made.append(ExLlamaV2DynamicJob(ids, new, seed=index, decode_special_tokens=True, **arguments))
        return made

    def fault(self, feature: Feature, batch: int, end: dict[str, Any], made: list[int]) -> str:
        """Return the known facts of a job that ended early; made: tokens of each job."""
        job = end["job"]
        lines = [
            f"{feature.name} at batch {batch}: a job ended early ({end['eos_reason']}): {end.get('exception')!r}",
            f"it had {job.new_tokens} tokens, and the jobs {made}",
        ]
        for (_, kind), cache in self.caches.items():
            lines += [f"{kind} cache: {line}" for line in not_finite(cache)]
        return "\n".join(lines)

    def measure(self, feature: Feature, batch: int, plan: Plan) -> Run:
        """Time the steps of a feature. Ends the program if a job ends before."""
        model = self.model_of(feature)
        generator, jobs = self.generator(feature, batch, plan), self.jobs(feature, batch, plan)

        def go(count: int) -> list[float]:
            times = [time.perf_counter()]
            for _ in range(count):
                for end in generator.iterate():
                    if end.get("eos"):
                        sys.exit(self.fault(feature, batch, end, [job.new_tokens for job in jobs]))
                times.append(time.perf_counter())
            return [b - a for a, b in pairwise(times)]

        generator.enqueue(jobs)
        while min(job.new_tokens for job in jobs) < plan.warmup:
            go(1)
        with counted_on_cpu() as left:
            made, captured = sum(job.new_tokens for job in jobs), model.decode.steps
            self.synchronize()
            began = time.perf_counter()
            spans = go(plan.steps)
            self.synchronize()
            us = (time.perf_counter() - began) * 1e6 / plan.steps
        captured, made = model.decode.steps - captured, sum(job.new_tokens for job in jobs) - made
        reason = None if captured >= plan.steps or not self.cuda else model.decode.reason
        graph_us, nodes = (
            self.graph(model, feature, batch, max(len(job.sequence) for job in jobs)) if captured else (0.0, 0)
        )
        ids = [job.sequence.ids[plan.prompt :].tolist() for job in jobs]
        generator.clear_queue()
        return Run(us, spans, made, ids, captured, reason, left[0] if self.cuda else 0, graph_us, nodes)

    def graph(self, model: ExLlamaV2, feature: Feature, batch: int, longest: int) -> tuple[float, int]:
        """Return the us of a replay of the captured step that was used, and its nodes; (0.0, 0) if it is not found."""
        import ctypes

        rows, q_len, pages = batch * feature.jobs * feature.sequences, 1 + feature.drafts, -(-longest // PAGE)
        place = self.caches[feature.model, feature.cache]
        fit = [
            (bucket.batch, bucket.pages, number, held.graph)
            for key, group in model.decode._graphs.items()
            for number, (bucket, held) in enumerate(group.items())
            if key[0] == id(place) and bool(held.adapters) == feature.name.startswith("lora")
            if bucket.batch >= rows and bucket.q_len == q_len and bucket.pages >= pages
        ]
        if not fit:
            return 0.0, 0
        graph = min(fit, key=lambda found: found[:3])[-1]
        count = ctypes.c_size_t(0)
        if not isinstance(graph, SectionGraphs):  # one graph, since the model is on one device
            ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
                ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
            )
        return replay_time(graph.replay)[0], count.value

    def bytes_of_adapters(self, feature: Feature, sequences: int) -> int:
        """Return the bytes of the adapters that the jobs use."""
        used = [feature.job(self.parts, index).get("loras", []) for index in range(sequences)]
        return sum(pair.nbytes for adapter in {a for some in used for a in some} for pair in adapter.pairs.values())

    def candidates(self, plan: Plan) -> int:
        """Return how many ids are at least 0.05 times as likely as the likeliest, the median over a prompt."""
        ids = self.jobs(FEATURES["greedy"], 1, plan)[0].sequence.ids[None].copy()
        logits = self.model.forward(torch.from_numpy(ids), None)[0, :, : self.model.config.vocab_size].float()
        near = logits >= logits.max(-1, keepdim=True).values + torch.tensor(0.05).log().item()
        return int(near.sum(-1).median())


@contextmanager
def counted_on_cpu() -> Iterator[list[int]]:
    """Count the rows that are sampled on the CPU meanwhile."""
    counts, sample = [0], _native.sample_rows

    def counted(rows: Any) -> Any:
        counts[0] += len(rows)
        return sample(rows)

    with unittest.mock.patch.object(_native, "sample_rows", counted):
        yield counts


# -------------------------------------------------------------------------------------------------------------- models
def load(folder: Path) -> ExLlamaV2:
    config = ExLlamaV2Config(str(folder))
    config.max_seq_len = min(config.max_seq_len, LENGTH)
    model = ExLlamaV2(config)
    model.load()
    return model


def folders(shape: str, kept: Path) -> tuple[Path, Path]:
    """Return the folder of the model and that of its draft model, made if they are not there yet."""
    if shape == BUNDLED:
        return default_model_dir(), draft_model_dir()
    found = []
    for name, one in ((shape, SHAPES[shape]), ("draft", replace(SHAPES["tinyllama"], vocab=SHAPES[shape].vocab))):
        folder = kept / f"{name}-{one.vocab}-{BITS}"
        if not folder.exists():
            began = time.perf_counter()
            part = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=kept))
            make_model(part, one, BITS)
            part.rename(folder)
            print(f"# made {folder} in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        found.append(folder)
    return found[0], found[1]


# --------------------------------------------------------------------------------------------------------------- lines
@dataclass
class Measured:
    """The runs of a feature, one a round, and the greedy run before each."""

    runs: list[Run] = field(default_factory=list)
    greedy: list[Run] = field(default_factory=list)


Results = dict[str, Measured]


def tokens_are_right(bench: Bench, feature: Feature, batch: int, found: Measured, greedy: Measured) -> bool:
    """Check a feature's tokens: the same in every round and, where it changes none, those of greedy jobs."""
    runs = found.runs
    if any(not alike(run.ids, runs[0].ids) for run in runs):
        return report(f"{feature.name}: tokens differ between rounds")
    alike_up_to = bench.model.invariant_tokens()
    few = alike_up_to is None or batch * (1 + feature.drafts) <= alike_up_to
    if feature.as_greedy or (feature.drafts and few):
        return alike(runs[0].ids, greedy.runs[0].ids) or report(f"{feature.name}: tokens differ from greedy ones")
    if feature.name == "lora-half" and few:
        own, others = runs[0].ids[1::2], greedy.runs[0].ids[1::2]
        return alike(own, others) or report(f"{feature.name}: tokens of jobs without an adapter changed")
    return True


def alike(some: list[list[int]], others: list[list[int]]) -> bool:
    """Whether sequences begin with the same tokens; some may have more of them."""
    return all(a[: len(b)] == b[: len(a)] for a, b in zip(some, others, strict=True))


def line_of(
    bench: Bench, feature: Feature, batch: int, results: Results, plan: Plan, roof: float | None
) -> dict[str, Any]:
    """Return the figures of a feature in a batch."""
    found = results[feature.name]
    runs = found.runs
    us = statistics.median(run.us for run in runs)
    spans = sorted(span * 1e3 for run in runs for span in run.spans)
    share = statistics.median(greedy.us / run.us for greedy, run in zip(found.greedy, runs, strict=True))
    references = {name: times for name, times in feature.references.items() if name != feature.name}
    ratio = None
    if references:
        parts = [
            sum(
                times * (found.greedy if name == "greedy" else results[name].runs)[turn].us
                for name, times in references.items()
            )
            for turn in range(len(runs))
        ]
        ratio = statistics.median(part / run.us for part, run in zip(parts, runs, strict=True))
    model = bench.model_of(feature)
    context = plan.prompt + plan.warmup + plan.steps // 2
    sequences = batch * feature.jobs * feature.sequences
    read = bytes_of_step(model, bench.caches[feature.model, feature.cache], context, sequences)
    read += bench.bytes_of_adapters(feature, sequences)
    if feature.drafter == "model":
        read += feature.drafts * bytes_of_step(bench.draft, bench.caches["draft", "fp16"], context, sequences)
    last = runs[-1]
    target = None if feature.target is None else {1: feature.target[0], 32: feature.target[1]}.get(batch)
    return {
        "feature": feature.name,
        "about": feature.about,
        "cache": feature.cache,
        "batch": batch,
        "bs": batch,
        "ctx": context,
        "us": us,
        "ms_p50": spans[len(spans) // 2],
        "ms_p10": spans[len(spans) // 10],
        "ms_p90": spans[len(spans) * 9 // 10],
        "tok_s": statistics.median(run.tokens / (run.us * plan.steps) * 1e6 for run in runs),
        "tokens_a_step": last.tokens / plan.steps / (batch * feature.jobs),
        "share_of_greedy": share,
        "ratio_vs_reference": ratio,
        "reference_name": " + ".join(f"{n} x {name}" if n > 1 else name for name, n in references.items()) or None,
        "target": target,
        "target_met": None if target is None or ratio is None else ratio >= target,
        "bytes_per_step": read,
        "gbps": read / us / 1e3,
        "pct_of_read_roof": None if roof is None else 100.0 * read / (us * 1e-6) / roof,
        "host_us": us - last.graph_us if last.graph_us else None,
        "graph_us": last.graph_us or None,
        "nodes": last.nodes or None,
        "steps": plan.steps,
        "captured_steps": last.captured,
        "eager_reason": last.reason,
        "rows_left_to_cpu": last.left_to_cpu,
        "rounds": len(runs),
    }


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        f"{'feature':16} {'batch':>5} {'us':>9} {'tok/s':>9} {'of greedy':>9} {'ratio':>7} {'target':>6}  reference"
    ]
    for line in lines:
        ratio = "" if line["ratio_vs_reference"] is None else f"{line['ratio_vs_reference']:.3f}"
        target = "" if line["target"] is None else f"{line['target']:.2f}{'' if line['target_met'] else ' !'}"
        eager = f"  ({line['captured_steps']} of {line['steps']} captured)" if line["eager_reason"] else ""
        left = f"  ({line['rows_left_to_cpu']} rows sampled on the CPU)" if line["rows_left_to_cpu"] else ""
        rows.append(
            f"{line['feature']:16} {line['batch']:5} {line['us']:9,.0f} {line['tok_s']:9,.0f} "
            f"{line['share_of_greedy']:9.3f} {ratio:>7} {target:>6}  {line['reference_name'] or ''}{eager}{left}"
        )
    return "\n".join(rows)


def measured(bench: Bench, features: list[Feature], batch: int, plan: Plan, rounds: int) -> Results:
    """Measure all features of a batch, round by round, greedy steps before each of them."""
    results: Results = {feature.name: Measured() for feature in features}
    for peaked in (False, True):
        group = [feature for feature in features if feature.peaked == peaked]
        if not group:
            continue
        bench.shape_logits(peaked=peaked)
        base = FEATURES["greedy-peaked" if peaked else "greedy"]
        bench.measure(base, batch, plan)  # captures the steps
        for _ in range(rounds):
            for feature in group:
                greedy = bench.measure(base, batch, plan)
                results[feature.name].greedy.append(greedy)
                results[feature.name].runs.append(greedy if feature is base else bench.measure(feature, batch, plan))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--feature", nargs="+", choices=sorted(FEATURES), default=list(FEATURES), metavar="NAME")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--shape", choices=[BUNDLED, *sorted(SHAPES)], default="8b" if cuda else BUNDLED)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "exl-bench-features")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="one round of 8 steps after 2 tokens")
    args = parser.parse_args()
    plan = Plan(args.prompt, 2, 8) if args.quick else Plan(args.prompt, args.warmup, args.steps)
    args.folder.mkdir(parents=True, exist_ok=True)
    # Captured steps keep their graph, whose nodes are counted.
    keep = partial(torch.cuda.CUDAGraph, keep_graph=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        unittest.mock.patch("torch.cuda.CUDAGraph", keep) if cuda else nullcontext(),
    ):
        run(args, plan, Path(scratch), 1 if args.quick else args.rounds)


def run(args: argparse.Namespace, plan: Plan, scratch: Path, rounds: int) -> None:
    """Measure what `args` ask for and print it."""
    worst: list[float] = []
    cuda = torch.cuda.is_available()
    if cuda and not args.quick and not check(worst):
        sys.exit("the check failed: no speed is printed")
    roof = read_roof() if cuda else None
    about: dict[str, Any] = environment() if cuda else {"gpu": None, "torch": torch.__version__}
    folder, draft_folder = folders(args.shape, args.folder)
    bench = Bench(load(folder), draft_folder, scratch, *factors(args.shape))
    about |= {"model_shape": args.shape, "bpw": str(BITS), "max_err": max(worst, default=None)}
    for peaked in (True, False):
        bench.shape_logits(peaked=peaked)
        about["candidates_peaked" if peaked else "candidates"] = bench.candidates(plan)
    lines, right = [], True
    for batch in args.batch:
        bench.forget_caches()
        features = with_references(args.feature, batch)
        results = measured(bench, features, batch, plan, rounds)
        for feature in features:
            if not tokens_are_right(bench, feature, batch, results[feature.name], results["greedy"]):
                right = False
                continue
            line = line_of(bench, feature, batch, results, plan, roof)
            emit({"bench": "features", **about, "roof_gb_s": roof / 1e9 if roof else None, **line})
            lines.append(line)
    print(table(lines), flush=True)
    if not right:
        sys.exit("tokens were wrong: features without a line")


if __name__ == "__main__":
    main()
