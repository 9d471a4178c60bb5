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
    "Qos",
    "RayConfig",
    "ServeConfig",
    "ServerConfig",
]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one request, of one client, and of all of them together."""

    max_body_bytes: int = 32 << 20
    #: of routes without media
    max_plain_body_bytes: int = 1 << 20
    max_depth: int = 64
    max_messages: int = 4096
    max_parts: int = 1024
    max_tools: int = 128
    max_n: int = 8
    max_choices: int = 64
    max_stop: int = 16
    max_stop_chars: int = 256
    max_logit_bias: int = 1024
    max_schema_bytes: int = 256 << 10
    max_regex_bytes: int = 8 << 10
    max_connections: int = 4096
    max_streams: int = 1024
    max_connections_per_address: int = 256
    body_seconds: float = 60.0
    header_seconds: float = 10.0
    keep_alive_seconds: float = 75.0
    #: of each model; None: 8 times its max_batch_size
    max_queued_requests: int | None = None
    #: of each model; None: what `target_ttft` seconds of its prefill rate are
    max_queued_prompt_tokens: int | None = None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server: addresses, pages, headers and general behaviour of requests."""

    host: str = "127.0.0.1"
    port: int = 8000
    #: path of a Unix socket instead of host and port
    uds: str | None = None
    workers: int = 1
    tls_cert: str | None = None
    tls_key: str | None = None
    ui: bool = True
    cors_origins: tuple[str, ...] = ()
    #: host names besides loopback ones that requests may name in Host when bound to loopback
    allowed_hosts: tuple[str, ...] = ()
    #: reject unknown fields instead of naming them in a header
    strict_fields: bool = False
    #: answer for any model name while one model is loaded
    accept_any_model: bool = False
    #: refuse to start without keys on an address that is not loopback, unless this is set
    no_auth: bool = False
    default_max_tokens: int | None = None
    reasoning_field: Literal["reasoning_content", "reasoning", "both", "none"] = "reasoning_content"
    allow_prompt_logprobs: bool = False
    allow_request_templates: bool = False
    parse_special_in_content: bool = False
    constrain_tools: bool = True
    #: seconds of silence after which a stream gets a comment
    ping_seconds: float = 5.0
    #: seconds after which headers leave though the engine has said nothing
    first_byte_seconds: float = 10.0
    limits: Limits = Limits()


class Auth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of clients, and fairness."""

    #: file with keys, mode 0600
    key_file: str | None = None
    #: a separate cache salt for every key
    per_key_salt: bool = False
    #: fairness by client address where there is no key
    per_address: bool = False
    max_failures_per_minute: int = 20


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model: its folder, its memory, and its limits."""

    id: str
    path: str
    aliases: tuple[str, ...] = ()
    device: str | None = None
    cache: Literal["fp16", "fp8", "q8", "q6", "q4"] = "fp16"
    #: tokens in the K/V cache; None: what fits and is useful
    cache_tokens: int | None = None
    max_seq_len: int | None = None
    max_batch_size: int = 16
    #: most prompt tokens of a step; None: by `Qos.target_itl`
    max_chunk_size: int | None = None
    draft: str | None = None
    ngram: bool = False
    #: folders under which adapters may be loaded
    adapter_roots: tuple[str, ...] = ()
    adapters: dict[str, str] = {}
    #: path of a chat template instead of the folder's
    template: str | None = None
    #: output format: of reasoning and tool calls
    family: str = "auto"
    sampling: dict[str, Any] = {}
    preload: bool = True
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

    target_itl: float = 0.05
    target_ttft: float = 20.0
    #: seconds of waiting that lift a request by one priority class
    ageing: float = 30.0
    max_skips: int = 4


class Drain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The end of a server: seconds until it stops, and seconds for running requests."""

    delay: float = 5.0
    #: seconds; -1: no limit
    timeout: float = 30.0


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log lines."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"


class Media(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images of requests, which are `data:` URLs: nothing is fetched."""

    max_images: int = 20
    #: of an image file
    max_bytes: int = 20 << 20
    max_pixels: int = 1 << 26
    #: of all images of a request
    max_request_pixels: int = 1 << 27


class RayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `exl serve ray`: every model has its own engine replicas."""

    #: replicas that answer HTTP
    ingress_replicas: int = 2
    ingress_cpus: float = 1.0
    min_replicas: int = 1
    max_replicas: int = 1
    #: CPUs and GPUs of one engine replica
    engine_cpus: float = 1.0
    engine_gpus: float = 0.0
    #: seconds without a heartbeat after which a replica counts as dead
    health_seconds: float = 15.0


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration."""

    server: ServerConfig = ServerConfig()
    auth: Auth = Auth()
    model: tuple[ModelConfig, ...] = ()
    memory: Memory = Memory()
    qos: Qos = Qos()
    drain: Drain = Drain()
    log: Log = Log()
    media: Media = Media()
    ray: RayConfig = RayConfig()
    metrics_alias: Literal["vllm", "none"] = "vllm"
