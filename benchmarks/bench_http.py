"""HTTP against the engine alone: the same requests, straight to the generator and through a server, on one machine.

    python benchmarks/bench_http.py [--shape 8b [--no-strict] | --paced [--prompt-cost]] [--streams 64 32]
        [--requests 512] [--new 128] [--workers 1 2] [--load 0.5 0.95] [--prompt-wait-ms 50] [--profile]
    python benchmarks/bench_http.py --host [--streams 64] [--new 128] [--rounds 3]

Random weights of true shapes on a GPU (gpu_model.py), or with --paced a scripted model whose decode steps last as long
as those of an 8B model on an H200, on any machine. Its prompts take no time, or with --prompt-cost as long as there
without strict mode. The GPU is in strict mode, so that tokens are the same however prompts share passes; with
--no-strict they may differ, which is then no failure. With --prompt-wait-ms new prompts wait so long for others
(`prompt_wait_seconds` of the generator). Processes as in `exl serve`: the engine here, API workers and the load
generator in processes of their own. The tokens of both ways are compared. One JSON line for each number of workers:

    ratio_*          tokens a second through HTTP over those of the engine alone: a closed loop, `--streams` at a time
    between_ms_*     time between the events of a stream in that loop, as its client sees it
    step_*           steps of that loop in the engine process, and of the engine alone: their number and median time;
                     `long`: those with prompts, that is of more than 1.6 times the median
    load             for each `--load`, requests that arrive by a Poisson process at that share of the engine's own
                     requests a second: time to the first token both ways. A request waits for the end of the running
                     step both ways
    prompt_wait_ms   as given, left out if 0; `strict`: false with --no-strict, else left out
    added            milliseconds that HTTP adds: to the first token at the first `--load`; between events of the closed
                     loop, compared with the engine process's own stamps

After the line, on standard error, the bars and whether each is met; ends with 1 if one is missed.

With --host there is no HTTP: the engine process's thread alone, on a scripted model, all streams in nearly every round.
Microseconds of CPU time per token: `host_us` outside the generator, `generator_us` in it with its results, `encode_us`
the share of encoding, `decode_us` what a worker decodes. Medians of rounds. `events` is a digest of all that the
clients receive.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import json
import multiprocessing
import os
import pstats
import socket
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from host_cost import host_cost, timed
from http_engine import Floor, HostSteps, PassTimes, host_in, received, run_alongside
from http_load import arrivals, delays, digest, load, percentile, work
from http_worker import worker

if TYPE_CHECKING:
    from exl_generate import ExLlamaV2DynamicGenerator

LONG = 1.6
"""Steps that take so many times the median are taken for those that compute a prompt."""


# ---- the engine alone ----------------------------------------------------------------------------------------------


def alone(
    generator: ExLlamaV2DynamicGenerator,
    requests: list[dict[str, Any]],
    streams: int,
    floor: Floor | None,
    at: list[float] | None = None,
) -> dict[str, Any]:
    """Run the requests in the generator alone: `streams` at a time, or each once its second of `at` has come."""
    import torch

    from exl_generate import ExLlamaV2DynamicJob, ExLlamaV2Sampler

    settings = ExLlamaV2Sampler.Settings(temperature=0.0, top_k=0, top_p=0.0, token_repetition_penalty=1.0)
    waiting = list(enumerate(requests))[::-1]
    answers: list[list[int]] = [[] for _ in requests]
    stamps: list[list[float]] = [[] for _ in requests]
    sent = [0.0] * len(requests)
    numbers: dict[Any, int] = {}
    began = time.perf_counter()
    while waiting or numbers:
        passed = time.perf_counter() - began
        while waiting and (len(numbers) < streams if at is None else at[waiting[-1][0]] <= passed):
            number, asked = waiting.pop()
            job = ExLlamaV2DynamicJob(
                torch.tensor([asked["prompt"]]), asked["max_tokens"], gen_settings=settings, seed=asked["seed"],
                max_rq_tokens=512,
            )  # fmt: skip
            generator.enqueue(job)
            numbers[job] = number
            sent[number] = time.perf_counter() if at is None else began + at[number]
        if at is not None and not numbers:
            time.sleep(at[waiting[-1][0]] - passed)
            continue
        round_began = time.monotonic()
        told = []
        jobs = len(numbers)
        for result in generator.iterate():
            ids = result.get("token_ids")
            if ids is not None:
                told.append(numbers[result["job"]])
                answers[told[-1]] += ids[0].tolist()
            if result["eos"]:
                del numbers[result["job"]]
        if floor is not None:
            time.sleep(max(0.0, round_began + floor(jobs) - time.monotonic()))
        now = time.perf_counter()
        for number in told:
            stamps[number].append(now)
    seconds = time.perf_counter() - began
    found = {"seconds": seconds, "tok_s": sum(map(len, answers)) / seconds, "digest": digest(answers)}
    return found | delays(sent, stamps)


DELAYS = {"first_token_ms_p50": 3.0, "first_token_ms_p99": 10.0, "between_ms_p50": 0.3, "between_ms_p99": 2.0}
"""Most milliseconds that HTTP may add."""
FULL_LOAD, MOST_AT_FULL_LOAD = 0.95, 1.1
MOST_STEP_US, FEW_STREAMS = 30.0, 32


def bars(line: dict[str, Any], paced: bool) -> list[tuple[str, float, str, bool]]:
    """Return (name, figure, bar, met) of each bar."""
    least = 0.98 if paced else 0.95
    ratio = round(line["ratio_median"], 3)
    found = [("throughput through HTTP / alone", ratio, f"at least {least}", ratio >= least)]
    for name, most in DELAYS.items():
        if name in line["added"]:
            added = round(line["added"][name], 2)
            found.append((f"{name}, added", added, f"at most {most}", added <= most))
    if (full := line["load"].get(FULL_LOAD)) is not None:
        times = round(full["http"]["first_token_ms_p50"] / full["alone"]["first_token_ms_p50"], 3)
        name, most = f"first token at {FULL_LOAD} of the load / alone", MOST_AT_FULL_LOAD
        found.append((name, times, f"at most {most}", times <= most))
    if line["streams"] <= FEW_STREAMS:
        more = round((line["step_ms"]["median"] - line["alone_step_ms"]["median"]) * 1e3, 1)
        found.append(
            ("step in the engine process, more than alone, us", more, f"at most {MOST_STEP_US}", more <= MOST_STEP_US)
        )
    return found


class Steps:
    """When a generator's steps have ended, by its clock: how many there were, and how long they took."""

    def __init__(self, generator: ExLlamaV2DynamicGenerator) -> None:
        self.took: list[float] = []
        self.ends: list[float] = []
        for name in ("iterate", "iterate_columns"):
            setattr(generator, name, self._stamped(timed(getattr(generator, name), self.took)))

    def _stamped(self, call: Any) -> Any:
        def stamping(*given: Any) -> Any:
            found = call(*given)
            self.ends.append(time.perf_counter())
            return found

        return stamping

    def clear(self) -> None:
        """Forget the steps so far."""
        self.took.clear()
        self.ends.clear()

    def taken(self) -> dict[str, float]:
        """Return their figures, from the end of one to the end of the next, and forget them."""
        periods = [b - a for a, b in itertools.pairwise(self.ends)]
        middle = percentile(periods, 0.5)
        longer = [one for one in periods if one > LONG * middle]
        found = {"count": len(periods), "median": middle * 1e3, "in_generator": percentile(self.took, 0.5) * 1e3}
        found |= {"long": len(longer), "long_mean": 1e3 * sum(longer) / max(1, len(longer))}
        self.clear()
        return found


# ---- engines -------------------------------------------------------------------------------------------------------


def scripted(
    folder: str, streams: int, prompt_wait: float, prompt_cost: bool
) -> tuple[ExLlamaV2DynamicGenerator, Floor | None]:
    from exl_serve.config.model import ModelConfig
    from exl_serve.engine.load import load as load_engine

    config = ModelConfig(
        id="bench", path=folder, max_batch_size=streams, engine="paced", device="cpu", prompt_wait=prompt_wait
    )
    loaded = load_engine(config)
    if prompt_cost and loaded.floor is not None:
        return loaded.generator, PassTimes(loaded.generator.model, loaded.floor)
    return loaded.generator, loaded.floor


def random_weights(
    shape: str, streams: int, new: int, longest: int, prompt_wait: float
) -> tuple[ExLlamaV2DynamicGenerator, None]:
    from gpu_model import build

    from exl_core import ExLlamaV2Cache, ExLlamaV2Tokenizer
    from exl_generate import ExLlamaV2DynamicGenerator

    model = build(shape, "4.0", 32768)
    pages = -(-(longest + new * 3 // 2) // 256)
    cache = ExLlamaV2Cache(model, max_seq_len=streams * pages * 256)
    tokenizer = ExLlamaV2Tokenizer(model.config)
    generator = ExLlamaV2DynamicGenerator(
        model, cache, tokenizer, max_batch_size=streams, prompt_wait_seconds=prompt_wait
    )
    generator.warmup()
    return generator, None


def engine(args: argparse.Namespace, folder: str, streams: int) -> tuple[ExLlamaV2DynamicGenerator, Floor | None]:
    wait = args.prompt_wait_ms / 1e3
    if args.paced:
        return scripted(folder, streams, wait, args.prompt_cost)
    return random_weights(args.shape, streams, args.new, args.prompt, wait)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--paced", action="store_true", help="a scripted model in place of weights")
    parser.add_argument("--prompt-cost", action="store_true", help="with --paced, passes over prompts take time, too")
    parser.add_argument("--strict", action=argparse.BooleanOptionalAction, default=True, help="strict mode on a GPU")
    parser.add_argument("--prompt-wait-ms", type=float, default=0.0, help="most that a new prompt waits for others")
    parser.add_argument("--host", action="store_true", help="the engine process's thread alone, on a scripted model")
    parser.add_argument("--streams", type=int, nargs="+", default=[64], help="the later ones run once, without --load")
    parser.add_argument("--requests", type=int, default=512, help="of the closed loop; half as many with --load")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=513, help="prompts are shorter than this")
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--load", type=float, nargs="*", default=[0.5], help="shares of the engine's requests a second")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no further run after so many")
    parser.add_argument("--profile", action="store_true", help="one more run if a bar is missed, with profiles")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    began = time.monotonic()
    multiprocessing.set_start_method("spawn")
    from exl_generate import bundled

    folder = str(bundled.default_model_dir())
    if args.host:
        for _ in range(args.rounds):
            streams = args.streams[0]
            line = {"bench": "engine host", "streams": streams, **host_cost(folder, streams, args.new)}
            print(json.dumps(line), flush=True)
        return
    if not args.paced and args.strict:
        from exl_kernels.device import set_row_invariant

        set_row_invariant(True)  # prompts that are cut otherwise give the same tokens
    most = max(args.streams)
    generator, floor = engine(args, folder, most)
    vocab = min(generator.model.config.vocab_size, 3000)
    requests = work(args.requests, vocab, args.new, args.prompt)
    alone(generator, requests[:most], most, floor)  # warm
    # As an engine process does.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    met, every = True, []
    steps = Steps(generator)
    with tempfile.TemporaryDirectory() as place:
        for streams in args.streams:
            first = streams == args.streams[0]
            some = requests[: len(requests) * streams // most]
            both = Both(generator, floor, folder, place, some, streams, steps, began + args.seconds)
            every.append(both)
            both.measure(args.workers)
            for share in args.load if first else ():
                both.measure_load(args.workers, share)
            for _ in range(args.rounds - 1 if first else 0):
                both.measure(args.workers)
            for workers in args.workers:
                met &= report(both, workers, args)
        if args.profile and not met and time.monotonic() < began + args.seconds:
            every[0].http(requests, args.workers[0], None, profile=True)
    sys.exit(0 if met else 1)


class Both:
    """The same requests both ways, again and again."""

    def __init__(
        self,
        generator: ExLlamaV2DynamicGenerator,
        floor: Floor | None,
        folder: str,
        place: str,
        requests: list[dict[str, Any]],
        streams: int,
        steps: Steps,
        until: float,
    ) -> None:
        self.generator, self.floor, self.folder, self.place = generator, floor, folder, place
        self.requests, self.streams, self.steps, self.until = requests, streams, steps, until
        #: results of the closed loop by number of workers, 0 for the engine alone: of each round
        self.closed: dict[int, list[dict[str, Any]]] = {}
        #: by share of the load and number of workers
        self.arriving: dict[float, dict[int, dict[str, Any]]] = {}

    def measure(self, workers: list[int]) -> None:
        """Run the closed loop once each way, unless the time is over."""
        if time.monotonic() > self.until:
            return
        made = {0: self.alone(self.requests, None)} | {n: self.http(self.requests, n, None) for n in workers}
        for count, found in made.items():
            self.closed.setdefault(count, []).append(found)

    def measure_load(self, workers: list[int], share: float) -> None:
        """Run half of the requests as they arrive at a share of the engine's own requests a second, unless the time
        is over.
        """
        if time.monotonic() > self.until:
            return
        asked = self.requests[: len(self.requests) // 2]
        rate = share * len(self.requests) / statistics.median(one["seconds"] for one in self.closed[0])
        at = arrivals(len(asked), rate)
        found = {0: self.alone(asked, at)} | {count: self.http(asked, count, at) for count in workers}
        self.arriving[share] = found

    def alone(self, requests: list[dict[str, Any]], at: list[float] | None) -> dict[str, Any]:
        """Run requests on the engine alone."""
        self.generator.reset_page_table()
        self.steps.clear()
        found = alone(self.generator, requests, self.streams, self.floor, at) | {"step_ms": self.steps.taken()}
        return printed("alone", self.streams, at, found)

    def http(
        self, requests: list[dict[str, Any]], workers: int, at: list[float] | None, *, profile: bool = False
    ) -> dict[str, Any]:
        """Run requests through HTTP."""
        self.generator.reset_page_table()
        return printed(f"{workers} workers", self.streams, at, served(self, requests, workers, at, profile=profile))


def printed(way: str, streams: int, at: list[float] | None, found: dict[str, Any]) -> dict[str, Any]:
    """Print the figures of a run at once, because the time on a GPU may end before all runs have. Returns them."""
    figures = {name: round(found[name], 2) for name in ("seconds", "tok_s", *DELAYS)}
    steps = {name: round(value, 3) for name, value in found["step_ms"].items()}
    kind = f"{streams} streams" if at is None else "arriving"
    print(f"{kind}, {way}: {figures} steps {steps}", file=sys.stderr, flush=True)
    return found


def report(both: Both, workers: int, args: Any) -> bool:
    """Print the line of figures, then the bars. Returns whether all are met."""
    if not both.closed:
        return False
    alone, through = both.closed[0], both.closed[workers]
    ratios = [http["tok_s"] / by_itself["tok_s"] for by_itself, http in zip(alone, through, strict=True)]
    last = through[-1]
    added = {name: last["between_added"][name] for name in DELAYS if name.startswith("between")}
    shares: dict[float, Any] = {}
    for share, found in both.arriving.items():
        shares[share] = {"alone": first_tokens(found[0]), "http": first_tokens(found[workers])}
    if shares:
        first = next(iter(shares.values()))
        added |= {name: first["http"][name] - first["alone"][name] for name in first["alone"]}
    line = {
        "bench": "http",
        "engine": "paced" if args.paced else args.shape,
        "streams": both.streams,
        "requests": len(both.requests),
        "new_tokens": args.new,
        "workers": workers,
        "cpus": os.cpu_count(),
        **mode(args),
        "tok_s": statistics.median(one["tok_s"] for one in through),
        "alone_tok_s": statistics.median(one["tok_s"] for one in alone),
        "ratio_median": statistics.median(ratios),
        "ratio_best": max(ratios),
        "ratios": ratios,
        "same_tokens": len({one["digest"] for one in (*alone, *through)}) == 1,
        **{name: last[name] for name in DELAYS},
        "alone_step_ms": alone[-1]["step_ms"],
        "step_ms": last["step_ms"],
        "host_ms_p50": last["host_ms_p50"],
        "worker_cores": last["worker_cores"],
        "tokens_per_event": last["tokens_per_event"],
        "load": shares,
        "added": added,
    }
    for found in both.arriving.values():
        line["same_tokens"] &= found[0]["digest"] == found[workers]["digest"]
    if not args.paced:
        from gpu_timing import environment

        line = {**environment(), **line}
    print(json.dumps(line), flush=True)
    verdicts = bars(line, args.paced)
    for name, figure, bar, met in verdicts:
        print(f"{workers} workers, {name}: {figure} ({bar}): {'met' if met else 'MISSED'}", file=sys.stderr)
    same = bool(line["same_tokens"]) or not (args.paced or args.strict)
    return same and all(met for *_, met in verdicts)


def mode(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of a line that tell its run from one without options."""
    found: dict[str, Any] = {}
    if args.prompt_wait_ms:
        found["prompt_wait_ms"] = args.prompt_wait_ms
    if args.paced and args.prompt_cost:
        found["prompt_cost"] = True
    if not (args.paced or args.strict):
        found["strict"] = False
    return found


def first_tokens(found: dict[str, Any]) -> dict[str, float]:
    """Milliseconds to the first token."""
    return {name: found[name] for name in DELAYS if name.startswith("first")}


def served(
    both: Both, requests: list[dict[str, Any]], workers: int, at: list[float] | None, *, profile: bool = False
) -> dict[str, Any]:
    """The requests through HTTP. The engine runs in this process's main thread, as in an engine process.

    `host_ms_p50`: of a step, outside the generator. `worker_cores`: CPU seconds of the API workers a second.
    """
    from exl_serve.config.model import Limits

    folder, place, streams, steps = both.folder, both.place, both.streams, both.steps
    host, address = host_in(place, both.generator, folder, Limits(max_queued_requests=4096))
    own = HostSteps(both.generator, both.floor)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    out: Any = multiprocessing.Queue()
    files = [f"{place}/profile-{i}" if profile else "" for i in range(workers)]
    running = [
        multiprocessing.Process(target=worker, args=(listener, address, folder, file), daemon=True) for file in files
    ]
    warm = work(streams, 3000, 4, 66, seed=2)
    client = multiprocessing.Process(target=load, args=(port, warm, requests, streams, at, out), daemon=True)
    found: dict[str, Any] = {}

    def measure() -> None:
        client.start()
        received(out, client)  # all have been asked once
        steps.clear()
        own.clear()
        before = sum(cpu_seconds(one.pid) for one in running)
        found.update(received(out, client))
        cores = (sum(cpu_seconds(one.pid) for one in running) - before) / found["seconds"]
        found.update(worker_cores=cores, host_ms_p50=percentile(own.outside, 0.5) * 1e3)
        found.update(between_added=between_added(own, found), step_ms=steps.taken())

    taken = cProfile.Profile() if profile else None
    with own:
        run_alongside(host, running, measure, taken)
    listener.close()
    if not found:
        raise RuntimeError("the load generator has failed")
    if taken is not None:
        pstats.Stats(taken, stream=sys.stderr).sort_stats("tottime").print_stats(30)
        pstats.Stats(files[0], stream=sys.stderr).sort_stats("tottime").print_stats(30)
    return found


def between_added(own: HostSteps, seen: dict[str, float]) -> dict[str, float]:
    """Return the milliseconds that clients saw more between events than the engine process, by percentile.

    The engine process has the clock of the clients.
    """
    last: dict[int, float] = {}
    between = []
    for at, serials in own.ended:
        for serial in serials:
            if serial in last:
                between.append((at - last[serial]) * 1e3)
            last[serial] = at
    shares = {"between_ms_p50": 0.5, "between_ms_p99": 0.99}
    return {name: seen[name] - percentile(between, share) for name, share in shares.items()}


def cpu_seconds(pid: int | None) -> float:
    """Return the CPU time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
