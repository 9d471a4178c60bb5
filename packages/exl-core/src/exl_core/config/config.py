"""ExLlamaV2Config: the settings in a model folder, and the caller's overrides."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..architectures import Architecture, find_architecture
from ..architectures.base import Activation
from ..architectures.llama import LLAMA
from ..architectures.windows import LayerRope
from ..control_ids import MAX_VOCAB, read_control_ids
from ..errors import ConfigError, ConfigTypeError, MissingTensorError, UnsupportedArchitectureError, UnsupportedError
from ..json_reader import REQUIRED, JsonReader, read_json_file
from ..loading.checkpoint import Checkpoint
from ..rope import RopeSettings
from .model_folder import check_model_folder
from .rope_config import LENGTH_KEYS, alternative_rope, main_rope, read_rope
from .vocabulary import padded_vocabulary

__all__ = ["CPU_MATMUL_MODES", "ExLlamaV2Config"]

log = logging.getLogger(__name__)

SCALES = ("scale_emb", "embedding_multiplier", "scale_depth", "residual_multiplier", "logit_scale", "logits_scaling")
# The MLP in some files of the Llama kind: gate above up, and down.
SWIGLU = ((".mlp.swiglu.w12.", ".mlp.gate_up_proj."), (".mlp.swiglu.w3.", ".mlp.down_proj."))
CPU_MATMUL_MODES = ("int8", "exact")
# Far beyond any published model; a file that asks for more is damaged or hostile.
MAX_LAYERS, MAX_WIDTH, MAX_EXPERTS = 4096, 1 << 22, 1 << 14


def _env(name: str) -> bool:
    return name in os.environ


class ExLlamaV2Config:
    """Configuration of a model folder.

    The folder is read at construction if `model_dir` is given, else by `prepare()`. Set overrides before building the
    model. The other attributes are the fields of config.json under the names that exllamav2 uses.

    Args:
        model_dir: folder with config.json, weights and tokenizer.

    Attributes:
        model_dir: folder with config.json, weights and tokenizer.
        max_seq_len: most positions of a sequence; default from config.json.
        max_batch_size: number of sequences to plan memory for; a chunk has at most max_input_len * max_batch_size
            tokens.
        max_decode_batch: most sequences of a generator's decode step, for whose logits and sampling memory is planned;
            None: max_batch_size.
        max_input_len: tokens of a chunk of a prompt at batch 1.
        max_attention_size: limit of (past + q) * q of a chunk; only if no_flash_attn and no_xformers are both set.
        max_output_len: most positions that one chunk may produce logits for; None for no limit.
        scale_pos_emb: divisor of positions (linear RoPE scaling).
        scale_alpha_value: alpha of NTK RoPE scaling.
        no_flash_attn: as exllamav2 without flash-attn: see max_attention_size.
        no_xformers: as exllamav2 without xformers: see max_attention_size.
        no_sdpa: accepted without effect.
        no_graphs: launch every step eagerly, without CUDA graphs.
        load_in_q4: not supported.
        max_dq_size: accepted without effect.
        fasttensors: accepted without effect.
        allow_unknown_architecture: name of a supported architecture to load an unknown one as; set it before
            `prepare()`.
        cpu_matmul: "int8" (fast) or "exact" (float32) arithmetic of quantized matrices on the CPU; default
            EXL_CPU_MATMUL.

    Raises:
        ConfigError: config.json is invalid (also the subclasses of this error).
        UnsupportedArchitectureError: the model family is not supported.
        FormatError: a weight file is broken.
        MissingTensorError: the weights are incomplete.
    """

    # Settable by the user
    model_dir: str | None = None
    max_seq_len: int = 2048  # maximum context, positions
    max_batch_size: int = 1
    max_decode_batch: int | None = None  # sequences of a decode step; None: max_batch_size
    max_input_len: int = 2048  # tokens per forward chunk at batch 1
    max_attention_size: int = (
        2048**2
    )  # limit of (past + q) * q per chunk, only when both fused back ends are switched off
    max_output_len: int | None = None  # most positions that one chunk may produce logits for
    scale_pos_emb: float = 1.0  # linear RoPE divisor
    scale_alpha_value: float = 1.0  # NTK alpha
    no_flash_attn: bool = False
    no_xformers: bool = False
    no_sdpa: bool = False
    no_graphs: bool = False
    load_in_q4: bool = False  # UnsupportedError at load
    max_dq_size: int = 512 * 1024**2
    fasttensors: bool = False  # deprecated, ignored
    allow_unknown_architecture: str | None = None  # load an unknown `architectures[0]` as this supported one
    cpu_matmul: str = "int8"  # "int8" (fast) or "exact" (float32, the oracle); environment EXL_CPU_MATMUL

    # Read from config.json
    architecture: str = ""
    arch: Architecture = LLAMA
    bos_token_id: int | None = None
    eos_token_id: int | None = None  # the first of eos_token_ids
    pad_token_id: int | None = None
    vocab_size: int = 0
    initializer_range: float = 0.02
    num_hidden_layers: int = 0
    norm_eps: float = 1e-5
    hidden_size: int = 0
    num_attention_heads: int = 0
    head_dim: int = 0
    num_key_value_heads: int = 0
    num_key_value_groups: int = 1
    use_qk_norm: bool = False
    query_pre_attn_scalar: float | None = None
    attention_multiplier: float | None = None
    intermediate_size: int = 0
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    logit_scale: float = 1.0
    scale_emb: float = 1.0
    scale_depth: float = 1.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    norm_head: bool | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    head_norms: bool = False  # q and k of each head are normalised
    clip_qkv: float = 0.0  # 0: q, k and v are not clamped
    shared_expert_intermediate_size: int = 0
    router_jitter: float | None = None  # sparse mixing of two experts; None: a softmax
    head_bias: bool = False
    norm_topk_prob: bool = True  # chosen experts' probabilities are scaled to sum 1
    moe_intermediate_size: int = 0
    max_position_embeddings: int = 2048  # as in the file; max_seq_len is the caller's copy
    original_max_seq_len: int = 2048
    sliding_window: int = 0  # 0 where no layer slides
    sliding_window_pattern: int = 1
    partial_rotary_factor: float = 1.0
    rotary_embedding_base: float = 10000.0
    rotary_embedding_base_alt: float | None = None
    scale_pos_emb_from_file: float | None = None
    scale_pos_emb_alt: float | None = None
    pos_id_index: int = 0
    alt_rope_method: str | None = None  # None, "llama3", "yarn", "su" (longrope) or "dynamic"
    l3_rope_factor: float | None = None
    l3_rope_low_freq_factor: float | None = None
    l3_rope_high_freq_factor: float | None = None
    l3_rope_original_max_position_embeddings: int | None = None
    yarn_rope_factor: float | None = None
    yarn_rope_original_max_position_embeddings: int | None = None
    yarn_rope_attention_factor: float | None = None
    yarn_rope_beta_fast: float = 32.0
    yarn_rope_beta_slow: float = 1.0
    yarn_rope_mscale: float | None = None
    yarn_rope_mscale_all_dim: float | None = None
    yarn_rope_truncate: bool = True
    scale_long_factor: list[float] | None = None
    scale_short_factor: list[float] | None = None
    su_rope_factor: float | None = None
    su_rope_attention_factor: float | None = None
    su_rope_mscales: tuple[float, float] | None = None  # factors for short and for long contexts instead
    dynamic_rope_factor: float | None = None
    mrope_section: list[int] | None = None
    vision_model_type: str | None = None  # "pixtral", "qwen2", "qwen2.5", "siglip_vision_model"; None: text only
    vision_spatial_merge_size: int = 1  # patches of a side that make one row of an image on a grid
    quant_method: str | None = None  # quantization_config.quant_method; informative, since the tensors decide
    gptq_bits: int = 4
    gptq_group_size: int | None = None
    checkpoint_offset_qzeros: bool = False
    checkpoint_fused_mlp: bool = False  # the files hold gate and up in one matrix `mlp.swiglu.w12`
    checkpoint: Checkpoint | None = None

    def __init__(self, model_dir: str | os.PathLike[str] | None = None) -> None:
        self.no_flash_attn = _env("EXLLAMA_NO_FLASH_ATTN")
        self.no_xformers = _env("EXLLAMA_NO_XFORMERS")
        self.no_sdpa = _env("EXLLAMA_NO_SDPA")
        self.no_graphs = _env("EXLLAMA_NO_GRAPHS")
        self.cpu_matmul = os.environ.get("EXL_CPU_MATMUL") or "int8"
        self.eos_token_ids: list[int] = []
        self.layer_windows: list[int] = []  # sliding window of each layer, 0 = full attention
        self.layer_rope: list[LayerRope] = []  # the RoPE table of each layer
        self.layer_sparse: list[bool] = []  # whether the layer has experts
        self.generation_config: dict[str, Any] | None = None
        self.tensor_file_map: dict[str, str] = {}  # tensor name -> file
        self.tensor_files: list[str] = []
        if model_dir is not None:
            self.model_dir = os.fspath(model_dir)
            self.prepare()

    def prepare(self, no_tensors: bool = False) -> None:
        """Read config.json, generation_config.json and, unless `no_tensors`, the headers of all weight files.

        Raises the errors of the class.
        """
        if self.model_dir is None:
            raise ConfigError("No model_dir specified in ExLlamaV2Config: set config.model_dir first")
        folder = check_model_folder(self.model_dir)
        file = folder / "config.json"
        read = JsonReader(read_json_file(file), file)
        self._read_architecture(read)
        read = JsonReader(read.data, file, self.arch.defaults, multimodal=self.arch.vision is not None)
        self._check_fixed(read)
        self._read_tokens(read, folder)
        self._read_shape(read)
        self._read_switches(read)
        self._read_experts(read)
        self._read_scales(read)
        self._read_lengths(read)
        read_rope(self, read)
        self._read_quantization(read)
        if not no_tensors:
            self._scan_tensors(folder)

    def set_low_mem(self) -> None:
        """Use smaller chunks and head buffers: slower prompts, less memory."""
        self.max_input_len = 1024
        self.max_attention_size = 1024**2
        if self.max_output_len is not None:
            self.max_output_len = min(self.max_output_len, 1024)

    def arch_compat_overrides(self, quiet: bool = False, warn_only: bool = False) -> None:
        """Do nothing: exllamav2 disables attention back ends here that a model cannot use.

        `quiet` and `warn_only` are accepted as by exllamav2, without effect.
        """

    @property
    def padded_vocab_size(self) -> int:
        """Number of logits: vocab_size with its padding."""
        return padded_vocabulary(self.vocab_size)

    @property
    def attention_scale(self) -> float:
        """Factor of q.k before the softmax."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        return 1.0 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    def rope_settings(self) -> RopeSettings:
        """Return the rotation of the main table, the caller's overrides included."""
        return main_rope(self)

    def rope_settings_alt(self) -> RopeSettings | None:
        """Return the rotation of layers whose `layer_rope` is "alt", in families with a second table; else None."""
        return alternative_rope(self)

    @property
    def decode_rows(self) -> int:
        """Number of sequences for whose decode steps memory is planned. Raises ConfigError."""
        self._check_sizes("max_batch_size", "max_decode_batch")
        return max(self.max_batch_size, self.max_decode_batch or 1)

    def check_for_load(self) -> None:
        """Raise UnsupportedError or ConfigError for unsupported settings, before anything is allocated."""
        if self.load_in_q4:
            raise UnsupportedError("load_in_q4 is not supported: convert the model to EXL2 instead")
        if self.cpu_matmul not in CPU_MATMUL_MODES:
            raise ConfigError(f"cpu_matmul is {self.cpu_matmul!r}, must be one of {', '.join(CPU_MATMUL_MODES)}")
        self._check_sizes("max_seq_len", "max_batch_size", "max_decode_batch")
        self._check_sizes("max_input_len", "max_output_len", "max_attention_size")

    def _check_sizes(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is None and name in ("max_decode_batch", "max_output_len"):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigTypeError(f"{name} is {value!r}, must be an int")
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")

    # ------------------------------------------------------------------------------------------- sections of the file

    def _read_architecture(self, read: JsonReader) -> None:
        names = read.listing("architectures")
        if not names or not all(isinstance(n, str) for n in names):
            raise ConfigTypeError(f"{read.file}: architectures must be a non-empty list of strings, not {names!r}")
        errors: list[Exception] = []
        for name in names:
            try:
                self.arch = find_architecture(name, self.allow_unknown_architecture)
            except UnsupportedError as e:
                errors.append(e)
                continue
            self.architecture = name
            break
        else:
            raise errors[0]
        self.vision_model_type = None if self.arch.vision is None else self.arch.vision.model_type
        text_type = read.string("text_config->model_type", default=None)
        if self.arch.text_model_types and text_type not in self.arch.text_model_types:
            raise UnsupportedArchitectureError(
                f"{read.file}: {self.architecture} with a language model of type {text_type!r} is not supported; "
                f"supported: {', '.join(self.arch.text_model_types)}"
            )
        if self.arch.name != self.architecture:
            log.warning("architecture %s is loaded as %s on request", self.architecture, self.arch.name)

    def _check_fixed(self, read: JsonReader) -> None:
        """Raise UnsupportedError for switches of the family that would change the model in an unsupported way."""
        for key, expected in self.arch.fixed.items():
            found = read.raw(key, text=True)
            allowed = expected if isinstance(expected, tuple) else (expected,)
            if found is not None and found[1] not in allowed:
                raise UnsupportedError(
                    f"{read.file}: {key} is {str(found[1])[:40]}, which is not supported; {self.arch.name} "
                    f"runs with {' or '.join(map(str, allowed))}"
                )

    def _read_tokens(self, read: JsonReader, folder: Path) -> None:
        ids = read_control_ids(read, folder)
        self.bos_token_id, self.pad_token_id = ids.bos_token_id, ids.pad_token_id
        self.eos_token_id, self.eos_token_ids = ids.eos_token_id, list(ids.eos_token_ids)
        said = ids.generation_eos_ids
        self.generation_config = None if said is None else {"eos_token_id": list(said) or None}

    def _read_shape(self, read: JsonReader) -> None:
        def count(*keys: str, default: Any = REQUIRED, maximum: int = MAX_WIDTH) -> Any:
            return read.integer(*keys, default=default, text=True, minimum=1, maximum=maximum)

        arch = self.arch
        self.vocab_size = count("vocab_size", maximum=MAX_VOCAB)
        self.num_hidden_layers = count("num_hidden_layers", "n_layers", "n_layer", maximum=MAX_LAYERS)
        self.hidden_size = count("hidden_size", "d_model", "n_embd")
        inner = REQUIRED if arch.inner_multiple is None else arch.inner_multiple * self.hidden_size
        self.intermediate_size = count("intermediate_size", "ffn_config->ffn_hidden_size", "n_inner", default=inner)
        head_dim = count("head_dim", default=None)
        default_heads = max(1, self.hidden_size // head_dim) if head_dim else REQUIRED
        self.num_attention_heads = count("num_attention_heads", "n_heads", "n_head", default=default_heads)
        self.head_dim = head_dim or self.hidden_size // self.num_attention_heads
        if not self.head_dim:
            raise ConfigError(
                f"{read.file}: {self.num_attention_heads} attention heads do not fit hidden_size {self.hidden_size}"
            )
        said = arch.kv_heads(read) if arch.kv_heads is not None else None
        self.num_key_value_heads = said or count(
            "num_key_value_heads", "attn_config->kv_n_heads", default=self.num_attention_heads
        )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{read.file}: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        self.num_key_value_groups = self.num_attention_heads // self.num_key_value_heads
        self.norm_eps = read.number(*arch.norm_eps_keys, text=True) if arch.norm_eps_keys else 1e-5
        if self.norm_eps < 0:
            raise ConfigError(f"{read.file}: {arch.norm_eps_keys[0]} is {self.norm_eps}, must not be negative")
        self.initializer_range = read.number("initializer_range", default=0.02, text=True)

    def _read_switches(self, read: JsonReader) -> None:
        arch = self.arch
        self.tie_word_embeddings = read.boolean("tie_word_embeddings", default=arch.tied_head, text=True)
        if arch.vision is not None:  # older files have the key only inside, with the opposite default outside
            self.tie_word_embeddings |= read.boolean("text_config->tie_word_embeddings", default=False)
        from_file = arch.attention_bias == "file" and read.boolean(*arch.bias_keys, default=False, text=True)
        self.qkv_bias = arch.attention_bias in ("qkv", "all") or from_file
        self.o_bias = arch.attention_bias == "all" or (from_file and arch.bias_from_file == "all")
        if arch.o_bias_keys:
            self.o_bias = read.boolean(*arch.o_bias_keys, default=False, text=True)
        self.mlp_bias = arch.mlp_bias == "all" or (
            arch.mlp_bias == "file" and read.boolean(*arch.mlp_bias_keys, default=False, text=True)
        )
        self.activation = _activation(read, arch)
        self.use_qk_norm = read.boolean("use_qk_norm", default=False, text=True)
        self.head_norms = arch.head_norm is not None and (
            arch.head_norm_key is None or read.boolean(arch.head_norm_key, default=False, text=True)
        )
        self.head_bias = arch.head_bias_key is not None and read.boolean(arch.head_bias_key, default=False, text=True)
        self.norm_head = read.boolean("norm_head", default=None)
        for switch, built in (("use_qk_norm", self.head_norms), ("norm_head", arch.norm_head)):
            if getattr(self, switch) and not built:
                raise UnsupportedError(f"{read.file}: {switch} is set, which {arch.name} does not support")

    def _read_experts(self, read: JsonReader) -> None:
        experts = self.arch.experts
        self.num_experts = self.num_experts_per_token = None
        self.layer_sparse = [False] * self.num_hidden_layers
        if experts is None:
            return
        self.layer_sparse = experts.sparse(read, self.num_hidden_layers)
        self.num_experts = read.integer(*experts.count_keys, text=True, minimum=1, maximum=MAX_EXPERTS)
        self.num_experts_per_token = read.integer(*experts.chosen_keys, text=True, minimum=1)
        self.norm_topk_prob = experts.normalize(read)
        self.router_jitter = None
        if experts.mixer_keys:
            self.router_jitter = read.number(*experts.mixer_keys, default=0.01, text=True)
        if experts.chosen_fixed is not None and self.num_experts_per_token != experts.chosen_fixed:
            raise UnsupportedError(
                f"{read.file}: {self.num_experts_per_token} experts a token; {self.arch.name} chooses "
                f"{experts.chosen_fixed}"
            )
        self.moe_intermediate_size = self.intermediate_size
        if experts.width_keys:
            self.moe_intermediate_size = read.integer(
                *experts.width_keys, default=self.intermediate_size, text=True, minimum=1, maximum=MAX_WIDTH
            )
        if experts.shared_prefix is not None:
            self.shared_expert_intermediate_size = read.integer(
                *experts.shared_width_keys, text=True, minimum=1, maximum=MAX_WIDTH
            )

    def _read_scales(self, read: JsonReader) -> None:
        arch = self.arch
        self.query_pre_attn_scalar = self.attention_multiplier = None
        if arch.query_scalar:
            self.query_pre_attn_scalar = read.number("query_pre_attn_scalar", default=None, text=True)
        if arch.scale_keys:
            self.attention_multiplier = read.number(*arch.scale_keys, default=None, text=True)
        self.attn_logit_softcapping = self.final_logit_softcapping = None
        if arch.softcaps:
            self.attn_logit_softcapping = _softcap(read, "attn_logit_softcapping")
            self.final_logit_softcapping = _softcap(read, "final_logit_softcapping")
        self.clip_qkv = read.number(arch.clip_key, default=0.0, text=True) if arch.clip_key else 0.0
        if arch.clip_key is None and read.number("clip_qkv", default=None, text=True):
            raise UnsupportedError(f"{read.file}: clip_qkv is set, which {arch.name} does not support")
        for key in SCALES if self.architecture == arch.name else ():
            found = read.raw(key, text=True)
            if key not in arch.scales and found is not None and found[1] != 1:
                raise UnsupportedError(
                    f"{read.file}: {key} is {str(found[1])[:40]}, which {arch.name} does not support"
                )
        self.scale_emb = read.number("scale_emb", "embedding_multiplier", default=1.0, text=True)
        depth = read.number("scale_depth", default=None)
        self.scale_depth = 1.0 if depth is None else depth / math.sqrt(self.num_hidden_layers)
        self.scale_depth = read.number("residual_multiplier", default=self.scale_depth, text=True)
        if self.query_pre_attn_scalar is not None and self.query_pre_attn_scalar <= 0:
            raise ConfigError(f"{read.file}: query_pre_attn_scalar is {self.query_pre_attn_scalar}, must be positive")
        self.logit_scale = read.number("logit_scale", default=1.0, text=True)
        if arch.logit_base_key is not None:
            base = read.number(arch.logit_base_key, default=None)
            self.logit_scale *= 1.0 if base is None else base / self.hidden_size
        divisor = read.number("logits_scaling", default=None, text=True)
        if divisor:
            self.logit_scale = 1.0 / divisor

    def _read_lengths(self, read: JsonReader) -> None:
        self.max_position_embeddings = read.integer(*LENGTH_KEYS, default=2048, text=True, minimum=1)
        self.max_seq_len = self.original_max_seq_len = self.max_position_embeddings
        self.vision_spatial_merge_size = self.arch.grid_merge
        if self.arch.mrope_section is not None:
            self.vision_spatial_merge_size = read.integer(
                "vision_config->spatial_merge_size", default=self.arch.grid_merge, minimum=1, maximum=64
            )
        self.layer_windows = self.arch.windows(read, self.num_hidden_layers)
        if self.arch.positions == "rope":
            self.layer_rope = self.arch.layer_rope(read, self.layer_windows)
        else:
            self.layer_rope = ["none"] * self.num_hidden_layers
        self.sliding_window = max(self.layer_windows)
        pattern = read.raw("sliding_window_pattern", text=True)  # some files have a text such as "LLLG"
        self.sliding_window_pattern = pattern[1] if pattern is not None and type(pattern[1]) is int else 1

    def _read_quantization(self, read: JsonReader) -> None:
        self.quant_method, self.gptq_bits, self.gptq_group_size = None, 4, None
        self.checkpoint_offset_qzeros = False
        block = read.section("quantization_config", text=True) or self._older_gptq_file()
        if block is None:
            return
        self.quant_method = block.string("quant_method", default=None)
        self.checkpoint_offset_qzeros = block.string("checkpoint_format", default=None) == "gptq_v2"
        if self.quant_method == "gptq":
            self.gptq_bits = block.integer("bits", default=4)
            group_size = block.integer("group_size", default=None)
            self.gptq_group_size = group_size if group_size is not None and group_size > 0 else None
        elif self.quant_method not in (None, "exl2"):
            raise UnsupportedError(
                f"{block.file}: quant_method {self.quant_method!r} is not supported; supported: exl2, gptq, float"
            )

    def _older_gptq_file(self) -> JsonReader | None:
        """Return quantize_config.json, where older GPTQ tools wrote these fields."""
        file = Path(self.model_dir or "") / "quantize_config.json"
        if not file.exists():
            return None
        return JsonReader({"quant_method": "gptq", **read_json_file(file)}, file)

    # --------------------------------------------------------------------------------------------------- weight files

    def _scan_tensors(self, folder: Path) -> None:
        self.checkpoint_fused_mlp = False
        self.checkpoint = Checkpoint.scan(folder, self._map_key)
        self.tensor_file_map = {name: str(t.path) for name, t in self.checkpoint.tensors.items()}
        self.tensor_files = [str(f) for f in self.checkpoint.files]
        marker = {"exl2": ".q_weight", "gptq": ".qweight"}.get(self.quant_method or "")
        if marker is not None and not any(name.endswith(marker) for name in self.checkpoint.tensors):
            log.warning("%s says quant_method %s, but no tensor ends with %s", folder, self.quant_method, marker)
        for alternatives in self._expected_keys():
            if not any(self.checkpoint.has_module(key) for key in alternatives):
                lost = self.checkpoint.lost_files()
                raise MissingTensorError(f"{folder}: Could not find {alternatives[0]}.* in model{lost}")

    def _map_key(self, name: str) -> str:
        """Return the name under which a tensor of the files is looked up."""
        for old, new in SWIGLU:
            if old in name:
                self.checkpoint_fused_mlp = True
                name = name.replace(old, new)
        return self.arch.map_key(name)

    def _expected_keys(self) -> Iterator[list[str]]:
        """Yield alternative keys of each required module, one by one, since a hostile file may ask for millions."""
        arch = self.arch
        head = [arch.lm_head, *([arch.embed_tokens] if self.tie_word_embeddings else [])]
        yield from ([arch.embed_tokens], [arch.final_norm], head)
        if arch.positions == "learned":
            yield [arch.position_embeddings]
        for layer, sparse in enumerate(self.layer_sparse):
            prefix = f"{arch.layer_prefix}.{layer}."
            for part in arch.layer_keys(sparse, self.head_norms):
                fused = arch.fused_key(part)
                others = [prefix + fused[0].fused] if fused else []
                experts = range(self.num_experts or 0) if "{}" in part else (0,)
                for e in experts:
                    yield [prefix + part.format(e), *others]


def _activation(read: JsonReader, arch: Architecture) -> Activation:
    name = read.string(*arch.activation_keys, default=None, text=True)
    if name is None:
        return arch.activation
    if name in ("silu", "swish"):
        return "silu"
    if name in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"):
        return "gelu"
    if name == "gelu":
        return "gelu_erf"
    if name == "relu2":
        return "relu2"
    if name == "quick_gelu":
        return "quickgelu"
    raise UnsupportedError(
        f"{read.file}: {arch.activation_keys[0]} {name!r} is not supported; supported: silu, gelu, "
        "gelu_pytorch_tanh, quick_gelu, relu2"
    )


def _softcap(read: JsonReader, key: str) -> float | None:
    """Return s of s * tanh(x / s); an explicit null disables the softcap."""
    if read.explicit_null(key, text=True):
        return None
    value: float | None = read.number(key, default=None, text=True)
    if value is not None and value <= 0:
        raise ConfigError(f"{read.file}: {key} is {value}, must be positive or null")
    return value
