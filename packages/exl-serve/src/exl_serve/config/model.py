"""The configuration as data: the values that the TOML file, the command line and EXL_SERVE_ variables set."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "Auth",
    "Drain",
    "Limits",
    "Log",
    "Media",
    "Memory",
    "ModelConfig",
    "Otel",
    "Qos",
    "RayConfig",
    "ServeConfig",
    "ServerConfig",
]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one request, of one client, and of all of them together."""

    #: bytes of a request with media: chat, responses
    max_body_bytes: int = 32 << 20
    #: bytes of a request to the other routes
    max_plain_body_bytes: int = 1 << 20
    #: levels of nested JSON
    max_depth: int = 64
    #: messages of a chat, items of a response
    max_messages: int = 4096
    #: parts of a message
    max_parts: int = 1024
    #: tools of a request
    max_tools: int = 128
    #: choices of a request (`n`)
    max_n: int = 8
    #: choices of all prompts of a text completion together
    max_choices: int = 64
    #: bytes of a JSON schema or a grammar
    max_schema_bytes: int = 256 << 10
    #: bytes of a pattern
    max_regex_bytes: int = 8 << 10
    #: open connections of an API process
    max_connections: int = 4096
    #: requests at a time of an ingress replica on Ray; without Ray the connections limit them
    max_streams: int = 1024
    #: open connections of one client address to an API process; through a trusted proxy: requests that are being
    #: answered
    max_connections_per_address: int = 256
    #: seconds in which a body has to arrive
    body_seconds: float = 60.0
    #: seconds in which the headers have to arrive
    header_seconds: float = 10.0
    #: seconds that an idle connection stays open
    keep_alive_seconds: float = 75.0
    #: requests in the queue of each model; none: 8 times its max_batch_size
    max_queued_requests: int | None = None
    #: prompt tokens in the queue of each model; none: what `target_ttft` seconds of its prefill rate are
    max_queued_prompt_tokens: int | None = None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server: addresses, pages, headers and general behaviour of requests."""

    #: address to listen on; beyond loopback needs keys
    host: str = "127.0.0.1"
    #: 0 takes a free one
    port: int = 8000
    #: path of a Unix socket instead of host and port
    uds: str | None = None
    #: API processes
    workers: int = 1
    #: path of a certificate (PEM); needs `tls_key`
    tls_cert: str | None = None
    #: path of its private key (PEM)
    tls_key: str | None = None
    #: answer / with the chat page
    ui: bool = True
    #: origins whose pages may use this server, such as "https://chat.example.org"
    cors_origins: tuple[str, ...] = ()
    #: host names besides loopback ones that requests may name in Host when bound to loopback
    allowed_hosts: tuple[str, ...] = ()
    #: addresses and networks of proxies whose `X-Forwarded-For` is trusted, "unix" for those of a Unix socket; limits
    #: per address then hold for the clients behind them
    trusted_proxies: tuple[str, ...] = ()
    #: reject unknown fields instead of naming them in a header
    strict_fields: bool = False
    #: answer for any model name while one model is loaded
    accept_any_model: bool = False
    #: start without keys also on an address that others can reach; otherwise that is an error
    no_auth: bool = False
    #: accept `prompt_logprobs`, which computes a prompt without the prefix cache
    allow_prompt_logprobs: bool = False
    #: accept `chat_template` in requests: only for trusted clients. Such a template runs in the sandbox of the model's
    #: own, where it may occupy a process for 10 seconds; a key has at most 2 of the 4 processes of an API worker, two
    #: keys, or clients without a key, all of them
    allow_request_templates: bool = False
    #: `max_tokens` of a chat or response that names none; none: what the context leaves
    default_max_tokens: int | None = None
    #: name of the field with the reasoning in chat answers
    reasoning_field: Literal["reasoning_content", "reasoning", "both", "none"] = "reasoning_content"
    #: the spelling of a special token in a message becomes that token: only for trusted clients
    parse_special_in_content: bool = False
    #: seconds of silence after which a stream gets a comment
    ping_seconds: float = 5.0
    #: seconds after which headers leave though there is no part of an answer
    first_byte_seconds: float = 10.0
    limits: Limits = Limits()


class Auth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of clients, and fairness."""

    #: file with keys, mode 0600: `exl serve key new` prints entries
    key_file: str | None = None
    #: a separate cache salt for every key
    per_key_salt: bool = False
    #: fairness by client address where there is no key
    per_address: bool = False
    #: requests with wrong keys from one address to an API process, after which further ones get status 429; requests
    #: with a right key are always answered
    max_failures_per_minute: int = 20


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model: its folder, its memory, and its limits."""

    #: name of the model in requests; no colon
    id: str
    #: its folder
    path: str
    #: further names
    aliases: tuple[str, ...] = ()
    #: as `EXL_DEVICE`, for example "cuda:0" or "cuda:0=20,cuda:1"; none: every usable GPU, else the CPU
    device: str | None = None
    #: number format of the K/V cache
    cache: Literal["fp16", "fp8", "q8", "q6", "q4"] = "fp16"
    #: tokens in the K/V cache, shared by all requests; none: a full context for each sequence, at most 262,144 or one
    #: context, and what fits
    cache_tokens: int | None = None
    #: longest prompt and answer together, tokens; none: the model's
    max_seq_len: int | None = None
    #: most sequences in a decode step
    max_batch_size: int = 16
    #: most prompt tokens of a step; none: the model's max_input_len
    max_chunk_size: int | None = None
    #: seconds that streams may wait for a token while prompts are computed: a step computes fewer prompt tokens where
    #: earlier steps took longer, in parts of 256, 128 or 64; 0: always `max_chunk_size`
    target_itl: float = 0.0
    #: seconds that a new prompt may wait for others while streams run, so that one pass computes several prompts: more
    #: tokens a second under load, and first tokens later by at most this time; 0: no prompt waits
    prompt_wait: float = 0.0
    #: folder of a draft model, which needs the same tokenizer
    draft: str | None = None
    #: draft from the text so far, without a model; not together with `draft`
    ngram: bool = False
    #: folders under which adapters may be loaded
    adapter_roots: tuple[str, ...] = ()
    #: adapters to load at the start: folders by name, for requests to MODEL:NAME
    adapters: dict[str, str] = {}
    #: path of a chat template instead of the folder's
    template: str | None = None
    #: output format of reasoning and tool calls; auto: by the chat template
    family: str = "auto"
    #: defaults of requests, by the names of `Settings`, such as { temperature = 0.7, min_p = 0.05 }; over
    #: generation_config.json
    sampling: dict[str, Any] = {}
    #: load it when the server starts; otherwise with its first request
    preload: bool = True
    #: never unload it for another model
    pinned: bool = False
    #: load the image encoder of a model that has one
    vision: bool = True
    #: seconds of idleness after which it may be unloaded for another model
    keep_alive: float = 300.0
    #: free, paced: scripted test engines instead of the model
    engine: Literal["model", "free", "paced"] = "model"


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory that models may use."""

    #: bytes a device by its name; a device that is not listed: 90 % of what is free at the start
    budget: dict[str, int] = {}


class Qos(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Targets of latency and fairness, in seconds."""

    #: seconds of queued prompt tokens, at the measured speed, after which requests get status 429
    target_ttft: float = 20.0
    #: seconds of waiting that lift a request by one priority class
    ageing: float = 30.0


class Drain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The end of a server: seconds until it stops, and seconds for running requests."""

    #: seconds between SIGTERM and refusing new requests, for load balancers to notice
    delay: float = 5.0
    #: seconds that running requests may still take; -1: no limit
    timeout: float = 30.0


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log lines."""

    #: least severity that is logged
    level: Literal["debug", "info", "warning", "error"] = "info"
    #: auto: text at a terminal, else JSON lines
    format: Literal["auto", "json", "text"] = "auto"
    #: file to which prompts and answers are appended, one JSON object for each request; mode 0600, of the server's own
    #: user, no symbolic link. none: they are written nowhere
    content: str | None = None


class Otel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces for a collector of OpenTelemetry. Needs the extra "otel" of exl-serve."""

    #: URL to which spans are sent, OTLP over HTTP, such as "http://127.0.0.1:4318/v1/traces"; none: no traces
    endpoint: str | None = None
    #: share of the requests that are traced, 0 to 1; a request with `traceparent` follows the decision in it
    ratio: float = 1.0
    #: name of this server in traces
    service_name: str = "exl-serve"


class Media(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images of requests, which are `data:` URLs: nothing is fetched."""

    #: images of a request
    max_images: int = 20
    #: bytes of an image file
    max_bytes: int = 20 << 20
    #: pixels of an image
    max_pixels: int = 1 << 26
    #: pixels of all images of a request
    max_request_pixels: int = 1 << 27


class RayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `exl serve ray`: every model has its own engine replicas."""

    #: replicas that answer HTTP
    ingress_replicas: int = 2
    #: CPUs of one ingress replica
    ingress_cpus: float = 1.0
    #: fewest engine replicas of a model
    min_replicas: int = 1
    #: most engine replicas of a model
    max_replicas: int = 1
    #: CPUs of one engine replica
    engine_cpus: float = 1.0
    #: GPUs of one engine replica
    engine_gpus: float = 0.0
    #: seconds without a heartbeat after which a replica counts as dead
    health_seconds: float = 15.0
    #: seconds of low load after which one engine replica is removed
    calm_seconds: float = 600.0
    #: continue a stream on another replica when its replica ends
    resume: bool = True


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration."""

    server: ServerConfig = ServerConfig()
    auth: Auth = Auth()
    model: tuple[ModelConfig, ...] = ()
    memory: Memory = Memory()
    qos: Qos = Qos()
    drain: Drain = Drain()
    log: Log = Log()
    otel: Otel = Otel()
    media: Media = Media()
    ray: RayConfig = RayConfig()
    #: vllm: metrics also have the names that dashboards for vLLM read
    metrics_alias: Literal["vllm", "none"] = "vllm"
