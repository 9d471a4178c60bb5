"""The commands and their options. Sibling modules implement them and are imported when a command runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from exl_generate.cli.options import sampling_options
from exl_generate.cli.plugins import CommandGroup

__all__ = ["app"]

app = typer.Typer(
    cls=CommandGroup,
    help="Run EXL2, GPTQ and float language models on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _positive(value: int | None) -> int | None:
    if value is not None and value < 1:
        from exl_generate.errors import RequestError

        raise RequestError(f"--cache-tokens is {value}; a cache has at least 1 token: leave it out for what is needed")
    return value


CacheKind = Literal["fp16", "fp8", "q8", "q6", "q4"]
Model = Annotated[
    Path | None, typer.Option("-m", "--model", help="Model folder. Default: the bundled model.", show_default=False)
]
Cache = Annotated[CacheKind, typer.Option(help="Number format of the K/V cache.")]


def _cache_tokens(default: str) -> Any:
    text = f"Length of the K/V cache in tokens. Default: {default}."
    return typer.Option(callback=_positive, help=text, show_default=False)


MaxTokens = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--max-tokens",
        min=1,
        help="Most tokens to generate. Default: 200, 400 in a chat, or what the context leaves.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.", show_default=False)]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Stop at this text; may be given more than once.")]
Loras = Annotated[list[Path] | None, typer.Option("--lora", help="Folder of an adapter; may be given more than once.")]
JsonSchema = Annotated[
    str | None, typer.Option(help="Write JSON of this schema: a file, or the schema itself.", show_default=False)
]
Regex = Annotated[
    str | None,
    typer.Option(help="Write text that matches this pattern, from beginning to end.", show_default=False),
]
Draft = Annotated[
    str | None,
    typer.Option(help='Folder of a draft model, or "bundled": guesses that save passes.', show_default=False),
]
Ngram = Annotated[bool, typer.Option("--ngram", help="Guess by what the text has said before.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="auto, cpu, cuda, cuda:0, or a list with commas in the order of the layers. Default: EXL_DEVICE, or auto: "
        "the GPUs that can be used, else the CPU.",
        show_default=False,
    ),
]

Tp = Annotated[
    bool, typer.Option("--tp", help="Tensor parallel: shard every matrix over all devices, instead of the layers.")
]


@contextmanager
def _on(device: str | None) -> Iterator[None]:
    """Run a command on the devices of --device."""
    from exl_core.device import using_devices

    with using_devices(device, "--device"):
        yield


@app.command()
@sampling_options
def generate(
    settings: Any,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    model: Model = None,
    max_tokens: MaxTokens = None,
    min_tokens: Annotated[int, typer.Option(min=0, help="No end-of-text token before this many.")] = 0,
    seed: Seed = None,
    stop: Stop = None,
    ban: Annotated[list[str] | None, typer.Option("--ban", help="Never write this text, in any case.")] = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    draft: Draft = None,
    negative_prompt: Annotated[
        str | None, typer.Option(help="Write away from this text; with --cfg-scale.", show_default=False)
    ] = None,
    cfg_scale: Annotated[
        float | None,
        typer.Option(help="Weight of the prompt against the negative prompt. Default: 1.5.", show_default=False),
    ] = None,
    lora: Loras = None,
    ngram: Ngram = False,
    special: Annotated[bool, typer.Option("--special", help="Read special tokens in the prompt, show them.")] = False,
    echo: Annotated[bool, typer.Option(help="Show the prompt before its continuation.")] = True,
    cache: Cache = "fp16",
    cache_tokens: Annotated[int | None, _cache_tokens("what is needed")] = None,
    device: Device = None,
    tp: Tp = False,
    json_: Json = False,
) -> None:
    """Continue a text, streamed as it is written. Ctrl-C ends it."""
    from exl_generate.cli import generate as command

    with _on(device):
        command.run(
            prompt,
            command.Options(
                model=model,
                settings=settings,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                seed=seed,
                stop=stop or [],
                ban=ban or [],
                json_schema=json_schema,
                regex=regex,
                draft=draft,
                ngram=ngram,
                negative_prompt=negative_prompt,
                cfg_scale=cfg_scale,
                loras=lora or [],
                special=special,
                cache=cache,
                cache_tokens=cache_tokens,
                tp=tp,
            ),
            echo=echo,
            as_json=json_,
        )


@app.command()
@sampling_options
def chat(
    settings: Any,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            help="Chat template instead of the model's: a file, a Jinja text, or alpaca, chatml, llama3 or plain.",
            show_default=False,
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    stop: Stop = None,
    history: Annotated[
        Path | None,
        typer.Option(help="JSON file of messages to go on from, and to write back to.", show_default=False),
    ] = None,
    input_history: Annotated[
        bool, typer.Option("--input-history/--no-input-history", help="Keep typed messages for later sessions.")
    ] = True,
    stats: Annotated[
        bool | None,
        typer.Option(
            "--stats/--no-stats", help="Statistics after each answer. Default: at a terminal.", show_default=False
        ),
    ] = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    draft: Draft = None,
    ngram: Ngram = False,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", help="Image for the first message; may be given more than once."),
    ] = None,
    lora: Loras = None,
    cache: Cache = "fp16",
    cache_tokens: Annotated[int | None, _cache_tokens("8192, or the model's context if that is shorter")] = None,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Talk with a model, by its chat template or another. /help lists the commands; Ctrl-C interrupts an answer."""
    from exl_generate.cli import chat as command

    with _on(device):
        command.run(
            command.Options(
                model=model,
                system=system,
                chat_template=chat_template,
                settings=settings,
                max_tokens=max_tokens,
                seed=seed,
                stop=stop or [],
                history=history,
                input_history=input_history,
                stats=stats,
                json_schema=json_schema,
                regex=regex,
                draft=draft,
                ngram=ngram,
                images=image or [],
                loras=lora or [],
                cache=cache,
                cache_tokens=cache_tokens,
            ),
            as_json=json_,
        )


@app.command()
def info(
    folder: Annotated[
        Path | None, typer.Argument(help="Model folder. Default: the bundled model.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None, typer.Option("-m", "--model", help="The same, as other commands take it.", show_default=False)
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Also show where the model would go, and the largest context that fits.")
    ] = False,
    cache: Annotated[
        CacheKind | None,
        typer.Option(help="Number format of the K/V cache to plan with. Default: fp16.", show_default=False),
    ] = None,
    cache_tokens: Annotated[int | None, _cache_tokens("the model's context")] = None,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Show which GPU kernels its steps run, and why not faster ones."),
    ] = False,
    card: Annotated[
        str | None,
        typer.Option(help='With --kernels: a card that need not be here, such as "4090".', show_default=False),
    ] = None,
    adapter_rank: Annotated[
        int | None,
        typer.Option(min=1, help="With --kernels: all rows have adapters of this rank.", show_default=False),
    ] = None,
    device: Device = None,
    tp: Tp = False,
    json_: Json = False,
) -> None:
    """Describe a model folder: shape, bits per weight of each kind of matrix, memory at several context lengths. Exit
    code 1 when the plan does not fit."""
    from exl_generate.cli import info as command

    if folder is not None and model is not None:
        from exl_generate.errors import RequestError

        raise RequestError(f"two model folders, {folder} and --model {model}: name one")
    if card is not None and not kernels:
        from exl_generate.errors import RequestError

        raise RequestError(f"--card {card} says which card's kernels to show: add --kernels")
    if adapter_rank is not None and not kernels:
        from exl_generate.errors import RequestError

        raise RequestError(f"--adapter-rank {adapter_rank} is for the kernels of passes with adapters: add --kernels")
    if kernels:
        if plan or cache_tokens or tp:
            from exl_generate.errors import RequestError

            raise RequestError("--kernels and --plan are two reports: ask for one at a time")
        from exl_generate.cli import kernels as report

        report.run(folder or model, card, cache or "fp16", json_, adapter_rank)
        return
    if not plan and (cache or cache_tokens or device or tp):
        from exl_generate.errors import RequestError

        raise RequestError("--cache, --cache-tokens, --device and --tp say what to plan with: add --plan")
    with _on(device):
        code = command.run(folder or model, json_, cache or "fp16" if plan else None, cache_tokens, tp)
    raise typer.Exit(code)


@app.command()
def doctor(json_: Json = False) -> None:
    """Say what this machine offers and what is missing. Exit code 0 when models can run."""
    from exl_generate.cli import doctor as command

    raise typer.Exit(command.run(json_))


@app.command()
def bench(
    model: Model = None,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt that is timed.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per sequence.")] = 128,
    batch: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Sequences at once; repeatable.")] = None,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="One JSON object about this machine, for an issue. Default: random weights, batches 1, 8 and 32.",
        ),
    ] = False,
    cache: Cache = "fp16",
    device: Device = None,
    tp: Tp = False,
    json_: Json = False,
) -> None:
    """Measure prefill and decode speed, tokens per second."""
    with _on(device):
        if report:
            if tp:
                from exl_generate.errors import RequestError

                raise RequestError("--report measures one device: leave out --tp")
            from exl_generate.cli import report as reporting

            reporting.run(model, prompt_tokens, new_tokens, batch or [1, 8, 32], cache)
            return
        from exl_generate.cli import bench as command

        command.run(model, prompt_tokens, new_tokens, batch or [1], cache, json_, tp)


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Folder with config.json and float .safetensors files.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="New or empty folder to write to.")],
    format_: Annotated[Literal["exl2", "gptq"], typer.Option("--format", help="Format of the quantized matrices.")] = (
        "exl2"
    ),
    bits: Annotated[
        float, typer.Option(help="Average bits per weight in the layers; GPTQ: 2, 3, 4 or 8 bits for all.")
    ] = 4.0,
    head_bits: Annotated[
        int | None,
        typer.Option(
            help="Bits of the output head: 2, 3, 4, 5, 6, 8, or 16 for a float head. Default: 6, GPTQ: 16.",
            show_default=False,
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="GPTQ: rows of a group, -1 for one group. Default: 128.", show_default=False),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Skip the search for each group's best scale.")] = False,
    reorder: Annotated[bool, typer.Option("--reorder/--no-reorder", help="Sort input features by importance.")] = True,
    json_: Json = False,
) -> None:
    """Quantize a float model folder to EXL2 or GPTQ by rounding, without calibration data.

    Ctrl-C and errors remove what was written."""
    from exl_generate.cli import convert as command

    command.run(
        command.Options(
            source=source,
            target=target,
            format=format_,
            bits=bits,
            head_bits=head_bits,
            group_size=group_size,
            fast=fast,
            reorder=reorder,
        ),
        json_,
    )


def _version(value: bool) -> None:
    if value:
        from exl_generate import __version__

        typer.echo(f"exl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run EXL2, GPTQ and float language models on this machine."""
