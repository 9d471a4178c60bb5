"""A prompt of 100,000 tokens among 63 streams, through HTTP: how long the streams wait for their tokens meanwhile.

    python benchmarks/bench_long_prompt.py --paced [--chunk 2048 1024] [--itl 50 0] [--workers 1]
    python benchmarks/bench_long_prompt.py [--shape 8b] [--cache fp16]

Random weights of true shapes on a GPU (gpu_model.py), or with --paced a scripted model, on any machine: its steps last
as long as those of an 8B model on an H200, and each token of a prompt adds 27 us. The scripted model generates only
tokens that are whole characters: a stream gets nothing from a step that ends within a character. Processes as in
`exl serve`: the engine here, API workers and the clients in processes of their own. The streams run for `--quiet`
seconds, then one more client sends the long prompt, until it has its first token. One JSON line for each `--chunk`, the
most prompt tokens of a step, with each `--itl`, milliseconds that limit the prompt tokens of a step (0: no limit):

    quiet, during    milliseconds between the events of a stream as its client sees them, before the long prompt and
                     while it is computed; `engine`: of steps in the engine process while it is computed
    first_token_s    seconds from sending the long prompt to its first token; `prefill_tok_s`: its tokens over them

After the line, on standard error, the bar: the 99th percentile between events while the prompt is computed is at most
`--target` milliseconds and one step. Ends with 1 if it is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from http_engine import Floor, HostSteps, host_in, received, run_alongside
from http_load import HEAD, percentile
from http_worker import worker

if TYPE_CHECKING:
    from exl_generate import ExLlamaV2DynamicGenerator

PAGE = 256
NEW = 2048
"""Tokens of a stream: more than it gets in a run."""
PROMPT_SECONDS = 1 / 37_000
"""Seconds that a paced engine takes for a token of a prompt."""
NEVER = -65504.0
"""The logit of a token that is not generated."""
SETTLE_SECONDS = 1.0
LONGEST_SECONDS = 300.0


# ---- clients -------------------------------------------------------------------------------------------------------


class _Client(asyncio.Protocol):
    """One streamed completion: the times of its events."""

    def __init__(self, body: dict[str, Any], failed: Callable[[str], None]) -> None:
        self._data, self._failed = json.dumps(body).encode(), failed
        self.stamps: list[float] = []
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.sent = time.perf_counter()
        transport.write(HEAD + str(len(self._data)).encode() + b"\r\n\r\n" + self._data)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1") and not data.startswith(b"HTTP/1.1 200"):
            self._failed(f"the server answered {data!r}")
        if b"data: {" in data:
            self.stamps.append(time.perf_counter())
            if not self.began.done():
                self.began.set_result(None)
        if b"data: [DONE]" in data:
            self._failed("a stream has ended before the long prompt was computed: allow more tokens")


def clients(port: int, streams: int, tokens: int, vocab: int, quiet: float, out: Any) -> None:
    """Run the streams and the long prompt; put the times of what happened into `out`."""
    import uvloop

    out.put(uvloop.run(_clients(port, streams, tokens, vocab, quiet)))


async def _clients(port: int, streams: int, tokens: int, vocab: int, quiet: float) -> dict[str, Any]:
    draw, loop = random.Random(1), asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def failed(reason: str) -> None:
        if not over.done():
            over.set_exception(RuntimeError(reason))

    async def started(prompt: int, new: int) -> _Client:
        body = {
            "prompt": [draw.randrange(300, vocab) for _ in range(prompt)],
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        client: _Client = (await loop.create_connection(lambda: _Client(body, failed), "127.0.0.1", port))[1]
        await asyncio.wait((client.began, over), timeout=LONGEST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if over.done():
            over.result()
        if not client.began.done():
            raise RuntimeError(f"no token within {LONGEST_SECONDS:g} seconds")
        return client

    # Their lengths differ, so that not all of them take a new page in the same step.
    running = await asyncio.gather(*(started(draw.randrange(64, 320), NEW) for _ in range(streams)))
    await asyncio.sleep(SETTLE_SECONDS)
    begin = time.perf_counter()
    await asyncio.sleep(quiet)
    long = await started(tokens, 16)
    found = {
        "stamps": [one.stamps for one in running],
        "begin": begin,
        "sent": long.sent,
        "first": long.stamps[0],
    }
    over.cancel()
    for one in (*running, long):
        one.transport.abort()
    return found


def between(stamps: list[list[float]], begin: float, end: float) -> dict[str, float]:
    """Milliseconds between events of which the later one came in a span of time."""
    pairs = (pair for own in stamps for pair in itertools.pairwise(own))
    gaps = [(b - a) * 1e3 for a, b in pairs if begin < b <= end]
    return {
        "p50": round(percentile(gaps, 0.5), 3),
        "p99": round(percentile(gaps, 0.99), 3),
        "most": round(max(gaps, default=0.0), 3),
        "count": len(gaps),
    }


# ---- engines -------------------------------------------------------------------------------------------------------


def scripted(streams: int, tokens: int, chunk: int, itl: float) -> tuple[ExLlamaV2DynamicGenerator, Floor]:
    """A paced generator and the least seconds of its steps by their number of jobs."""
    from exl_core import ExLlamaV2Config, ExLlamaV2Tokenizer
    from exl_generate import ExLlamaV2DynamicGenerator, bundled
    from exl_generate.testing import ScriptedCache, ScriptedConfig, ScriptedModel
    from exl_serve.engine.load import STEP_SECONDS

    class TextModel(ScriptedModel):
        """A scripted model that never generates the tokens `excluded`."""

        def logits_of(self, hashes: Any, wanted: Any) -> Any:
            rows = super().logits_of(hashes, wanted)
            rows[:, excluded] = NEVER
            return rows

    described = ExLlamaV2Config(str(bundled.default_model_dir()))
    config = ScriptedConfig(
        vocab_size=described.vocab_size,
        max_seq_len=longest(tokens),
        max_input_len=2048,
        max_batch_size=streams + 1,
    )
    tokenizer = ExLlamaV2Tokenizer(described)
    excluded = without_text(tokenizer)
    model = TextModel(config, records=False)
    cache = ScriptedCache(model, max_seq_len=cached(streams, tokens))
    generator = ExLlamaV2DynamicGenerator(
        model,
        cache,
        tokenizer,
        max_batch_size=streams + 1,
        max_chunk_size=chunk,
        target_step_seconds=itl / 1e3 or None,
    )
    prompts = 0
    compute = model.forward_chunk

    def computing(input_ids: Any, *given: Any, **named: Any) -> Any:
        nonlocal prompts
        if input_ids.shape[-1] > 1:
            prompts += input_ids.numel()
        return compute(input_ids, *given, **named)

    def floor(jobs: int) -> float:
        nonlocal prompts
        one, many = STEP_SECONDS
        new, prompts = prompts, 0
        return one + (many - one) * min(max(jobs - 1, 0), 63) / 63 + new * PROMPT_SECONDS

    model.forward_chunk = computing  # type: ignore[method-assign]
    return generator, floor


def without_text(tokenizer: Any) -> list[int]:
    """Return the ids of tokens that are special or whose bytes are not whole characters."""
    found = []
    for token, piece in enumerate(tokenizer.get_id_to_bytes_list()):
        try:
            if not piece.decode():
                found.append(token)
        except UnicodeDecodeError:
            found.append(token)
    return found


def random_weights(
    shape: str, kind: str, streams: int, tokens: int
) -> Callable[[int, float], ExLlamaV2DynamicGenerator]:
    """Return a function that makes a generator with a chunk size and a target of milliseconds.

    All of them have the same model and cache on the GPU.
    """
    from gpu_model import build

    from exl_core import ExLlamaV2Tokenizer
    from exl_generate import ExLlamaV2DynamicGenerator
    from exl_generate.cli.models import CACHES

    model = build(shape, "4.0", longest(tokens))
    cache = CACHES[kind](model, max_seq_len=cached(streams, tokens))
    tokenizer = ExLlamaV2Tokenizer(model.config)

    def made(chunk: int, itl: float) -> ExLlamaV2DynamicGenerator:
        generator = ExLlamaV2DynamicGenerator(
            model,
            cache,
            tokenizer,
            max_batch_size=streams + 1,
            max_chunk_size=chunk,
            target_step_seconds=itl / 1e3 or None,
        )
        generator.warmup()
        return generator

    return made


def longest(tokens: int) -> int:
    """Return the context that a prompt of so many tokens needs, in whole pages."""
    return -(-(tokens + PAGE) // PAGE) * PAGE


def cached(streams: int, tokens: int) -> int:
    """Return the tokens of a cache that holds all requests at once."""
    return longest(tokens) + streams * (NEW + 2 * PAGE)


# ---- a run ---------------------------------------------------------------------------------------------------------


def served(generator: ExLlamaV2DynamicGenerator, floor: Floor | None, args: argparse.Namespace) -> dict[str, Any]:
    """The streams and the long prompt through HTTP. The engine runs in this process's main thread."""
    from exl_generate import bundled
    from exl_serve.config.model import Limits

    folder = str(bundled.default_model_dir())
    found: dict[str, Any] = {}
    steps = HostSteps(generator, floor)
    with tempfile.TemporaryDirectory() as place, socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        host, address = host_in(place, generator, folder, Limits(max_queued_prompt_tokens=1 << 20))
        out: Any = multiprocessing.Queue()
        running = [
            multiprocessing.Process(target=worker, args=(listener, address, folder), daemon=True)
            for _ in range(args.workers)
        ]
        vocab = min(generator.model.config.vocab_size, 3000)
        asked = (listener.getsockname()[1], args.streams, args.tokens, vocab, args.quiet, out)
        client = multiprocessing.Process(target=clients, args=asked, daemon=True)

        def measure() -> None:
            client.start()
            found.update(received(out, client))

        with steps:
            run_alongside(host, running, measure)
    if not found:
        raise RuntimeError("the clients have failed")
    return found | {"steps": [at for at, _ in steps.ended]}


def report(found: dict[str, Any], chunk: int, itl: float, args: argparse.Namespace) -> bool:
    """Print the line of figures and the bar. Returns whether it is met."""
    begin, sent, first = found["begin"], found["sent"], found["first"]
    quiet, during = between(found["stamps"], begin, sent), between(found["stamps"], sent, first)
    line = {
        "bench": "long prompt",
        "engine": "paced" if args.paced else args.shape,
        "streams": args.streams,
        "tokens": args.tokens,
        "chunk": chunk,
        "itl_ms": itl,
        "workers": args.workers,
        "cpus": os.cpu_count(),
        "quiet": quiet,
        "during": during,
        "engine_during": between([found["steps"]], sent, first),
        "first_token_s": round(first - sent, 3),
        "prefill_tok_s": round(args.tokens / (first - sent), 1),
    }
    if not args.paced:
        from gpu_timing import environment

        line = {**environment(), **line, "cache": args.cache}
    print(json.dumps(line), flush=True)
    most = args.target + quiet["p50"]
    met = bool(during["p99"] <= most)
    verdict = "met" if met else "MISSED"
    print(
        f"chunks of {chunk}, {itl:g} ms: 99th percentile between events during the prompt: {during['p99']:.1f} ms "
        f"(at most {most:.1f}): {verdict}",
        file=sys.stderr,
    )
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--cache", default="fp16", help="number format of the K/V cache on a GPU")
    parser.add_argument("--paced", action="store_true", help="a scripted model in place of weights")
    parser.add_argument("--tokens", type=int, default=100_000, help="of the long prompt")
    parser.add_argument("--streams", type=int, default=63)
    parser.add_argument("--chunk", type=int, nargs="+", default=[2048], help="most prompt tokens of a step")
    parser.add_argument(
        "--itl", type=float, nargs="+", default=[50.0], help="milliseconds of a step that limit a chunk"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quiet", type=float, default=2.0, help="seconds before the long prompt")
    parser.add_argument("--target", type=float, default=50.0, help="milliseconds that a stream may wait more")
    args = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    met = True
    weights = None if args.paced else random_weights(args.shape, args.cache, args.streams, args.tokens)
    for chunk, itl in itertools.product(args.chunk, args.itl):
        if weights is None:
            generator, floor = scripted(args.streams, args.tokens, chunk, itl)
        else:
            generator, floor = weights(chunk, itl), None
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        met &= report(served(generator, floor, args), chunk, itl, args)
        gc.unfreeze()
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
