"""ExLlamaV2Lora: an adapter in memory, on the devices of the matrices that it changes."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.linear import QuantMatrix

from ..device import out_of_memory_as_error
from ..errors import AdapterError, ModelStateError
from ..loading.linears import take_rows
from .config import AdapterConfig
from .files import AdapterTensors, find_tensor_file
from .keys import AdapterKey, ModuleIndex, Slice, parse_key, unknown_names
from .pairs import EmbeddingPair, LoraPair

if TYPE_CHECKING:
    from ..language_model import LanguageModel, LoadedModel
    from ..layers.embedding import Embedding

__all__ = ["ExLlamaV2Lora"]

log = logging.getLogger(__name__)

NO_BIAS = 1e-6  # a bias of at most this counts as zero


class ExLlamaV2Lora:
    """A LoRA adapter for a loaded model; pass a list of adapters to `forward` and to generators.

    Layouts: PEFT (any prefix of wrappers, `lora_A.<name>.weight`) and alpaca. A module is changed by
    y += ((x @ A) @ B) * scaling after the base result and its bias, with scaling = lora_scaling * alpha / r
    (rank-stabilised: alpha / sqrt(r); per module with rank_pattern and alpha_pattern). Several adapters add up in the
    order of the list.

    Whole matrices in `modules_to_save` (head, embedding, any projection) replace the model's while the adapter is
    active; the first adapter in the list that replaces a matrix counts. Arithmetic is that of a float matrix: float32
    on the CPU, half on a GPU. A row's result does not depend on the other rows; on a GPU whole matrices are multiplied
    as the model's own float matrices are, so for them this does not hold in long passes outside strict mode.

    Args:
        model: a loaded model.
        lora_config_path: path of adapter_config.json.
        lora_path: path of the tensors.
        lora_scaling: factor of the adapter's own scaling.

    Attributes:
        lora_r: rank of adapter_config.json.
        lora_alpha: alpha of adapter_config.json.
        lora_scaling: effective factor of modules without patterns.
        target_modules: as in adapter_config.json.
        bias_ignored: a bias of zeros was left out.
        embed_tokens: replacement of the embedding, or None.
        lm_head: replacement of the head, or None.
        tensors: pair of each matrix, by its key.
        mixable: only some rows of a pass may have the adapter: it has neither whole matrices nor tensors for the
            embedding or for experts.
        content_digest: 16 bytes for tensors, settings and scale, equal in every process.

    Raises:
        AdapterError: the adapter is damaged or does not fit the model.
        UnsupportedError: the adapter's method (such as DoRA) is not supported; the message names the method.
        ModelStateError: the model is not loaded.
        DeviceError: a GPU has no room for the tensors, or failed.
    """

    def __init__(
        self,
        model: LanguageModel,
        lora_config_path: str | os.PathLike[str],
        lora_path: str | os.PathLike[str],
        lora_scaling: float = 1.0,
    ) -> None:
        if not model.loaded:
            raise ModelStateError("load the model before its adapters: their tensors go to the devices of its matrices")
        if (
            isinstance(lora_scaling, bool)
            or not isinstance(lora_scaling, (int, float))
            or not math.isfinite(lora_scaling)
        ):
            raise AdapterError(f"lora_scaling is {lora_scaling!r}, must be a finite number")
        self.model = model
        self.model_load = model.load_count  # the adapter is valid for this load of the model only
        self.lora_config_path, self.lora_path = os.fspath(lora_config_path), os.fspath(lora_path)
        self._config = AdapterConfig.read(Path(lora_config_path))
        self._factor = float(lora_scaling)
        self.lora_r, self.lora_alpha = self._config.r, self._config.alpha
        self.lora_scaling = (
            self._factor
            * self._config.alpha
            / (math.sqrt(self._config.r) if self._config.use_rslora else self._config.r)
        )
        self.target_modules = self._config.target_modules
        self.bias_ignored = False
        self.pairs: dict[str, LoraPair] = {}
        self.replacements: dict[str, QuantMatrix] = {}
        self.embedding: Tensor | None = None  # [vocabulary, hidden], in place of the model's
        self.embedding_pair: EmbeddingPair | None = None
        self.touched: frozenset[str] = frozenset()
        self.mixable = False
        self.content_digest = b""
        self.loaded = False
        with out_of_memory_as_error(f"load the adapter {self.lora_path}"):
            self._load(AdapterTensors(Path(lora_path)))

    @classmethod
    def from_directory(
        cls, model: LanguageModel, directory: str | os.PathLike[str], lora_scaling: float = 1.0
    ) -> ExLlamaV2Lora:
        """Load an adapter from a folder with adapter_config.json and adapter_model.safetensors or adapter_model.bin.

        Args:
            model: a loaded model.
            directory: the folder.
            lora_scaling: factor of the adapter's own scaling.

        Raises:
            AdapterError: the folder has no adapter; also the errors of the class.
        """
        folder = Path(directory)
        config = folder / "adapter_config.json"
        if not config.is_file():
            raise AdapterError(f"No LoRA found in {folder}: adapter_config.json is missing")
        return cls(model, config, find_tensor_file(folder), lora_scaling)

    def unload(self) -> None:
        """Drop the tensors. The adapter can no longer be used; the model itself is unchanged."""
        self.pairs, self.replacements, self.embedding, self.embedding_pair = {}, {}, None, None
        self.touched = frozenset()
        self.loaded = False
        self.model.update_loras()

    @property
    def tensors(self) -> Mapping[str, LoraPair]:
        """Key of an adapted matrix -> its pair of matrices."""
        return self.pairs

    @property
    def embed_tokens(self) -> Tensor | None:
        """The table that replaces the embedding, or None."""
        return self.embedding

    @property
    def lm_head(self) -> QuantMatrix | None:
        """The matrix that replaces the head, or None."""
        return self.replacements.get(self.model.config.arch.lm_head)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        total = sum(p.nbytes for p in self.pairs.values()) + sum(m.nbytes for m in self.replacements.values())
        total += 0 if self.embedding is None else self.embedding.nbytes
        return total + (0 if self.embedding_pair is None else self.embedding_pair.nbytes)

    def check_usable(self, model: LoadedModel) -> None:
        """Raise ModelStateError unless this adapter can be used with `model` as it is loaded now."""
        if self.model is not model:
            raise ModelStateError(f"the adapter {self.lora_path} was loaded for another model")
        if not self.loaded:
            raise ModelStateError(f"the adapter {self.lora_path} was unloaded: load it again with from_directory")
        if self.model_load != self.model.load_count:
            raise ModelStateError(f"the model was loaded again after the adapter {self.lora_path}: load that again too")

    # ------------------------------------------------------------------------------------------------------- reading

    @torch.inference_mode(False)  # as the weights of a model
    def _load(self, tensors: AdapterTensors) -> None:
        keys = [(name, parse_key(name)) for name in tensors]
        index = ModuleIndex(self.model)
        modules: dict[str, dict[str, str]] = {}
        unknown = []
        for name, key in keys:
            if key is not None and key.role == "skip":
                continue
            if key is None or not self._known(index, key):
                unknown.append(name)
            elif key.role == "bias":
                self._ignore_bias(tensors, name)
            else:
                modules.setdefault(key.module, {}).setdefault(key.role, name)
        if unknown:
            raise AdapterError(
                f"{tensors.file}: unsupported layer: {unknown_names(unknown)}; {self.model.config.architecture} has no "
                "such linear layer here"
            )
        if not modules:
            raise AdapterError(f"{tensors.file}: the adapter changes nothing: no tensor of it is a weight")
        for module, parts in modules.items():
            self._load_module(tensors, index, module, parts)
        self.touched = frozenset({*self.pairs, *self.replacements})
        whole = bool(self.replacements) or self.embedding is not None or self.embedding_pair is not None
        self.mixable = not whole and self.touched.isdisjoint(_expert_keys(self.model))
        self.content_digest = tensors.digest(f"{self._config.settings()} {self._factor!r}")
        self.loaded = True

    @staticmethod
    def _known(index: ModuleIndex, key: AdapterKey) -> bool:
        linears, embedding = index.find_linears(key.module), index.find_embedding(key.module)
        if key.role in ("embedding_A", "embedding_B"):
            return embedding is not None
        if key.role == "replacement":
            return bool(linears) or embedding is not None
        return bool(linears)

    def _ignore_bias(self, tensors: AdapterTensors, name: str) -> None:
        if float(tensors.read(name).abs().max()) > NO_BIAS:
            raise AdapterError(f"{tensors.file}: {name}: a trained bias, which cannot be added here; only zeros can")
        self.bias_ignored = True

    def _load_module(self, tensors: AdapterTensors, index: ModuleIndex, module: str, parts: Mapping[str, str]) -> None:
        embedding = index.find_embedding(module)
        if "replacement" in parts and embedding is not None:
            self.embedding = self._table(tensors, parts["replacement"], embedding)
        elif "replacement" in parts:
            for part in index.find_linears(module):
                self._replace(tensors, parts["replacement"], part)
        for kind, a_role, b_role in (("lora", "A", "B"), ("lora_embedding", "embedding_A", "embedding_B")):
            if (a_role in parts) != (b_role in parts):
                there = parts.get(a_role, parts.get(b_role, ""))
                raise AdapterError(f"{tensors.file}: {there} is there alone: {kind}_A and {kind}_B belong together")
        if "B_bias" in parts and "B" not in parts:
            raise AdapterError(f"{tensors.file}: {parts['B_bias']} is there without its lora_B.weight")
        if "embedding_A" in parts and embedding is not None:
            self.embedding_pair = self._pair_for_embedding(tensors, module, parts, embedding)
        if "A" in parts:
            self._pairs_for_linears(tensors, module, parts, index.find_linears(module))

    def _pairs_for_linears(
        self, tensors: AdapterTensors, module: str, parts: Mapping[str, str], slices: list[Slice]
    ) -> None:
        a, b = tensors.read(parts["A"]), tensors.read(parts["B"])
        bias = tensors.read(parts["B_bias"]) if "B_bias" in parts else None
        outputs = _outputs(slices)
        if self._config.fan_in_fan_out and not all(part.linear.spec.transposed for part in slices):
            raise AdapterError(
                f"{self._config.file}: fan_in_fan_out is set, but {slices[0].linear.key} is no matrix that its model "
                "stores transposed: the adapter was made for another architecture"
            )
        self._check_rank(tensors.file, module, parts["A"], a, b)
        _check_shape(tensors.file, parts["A"], a, (a.shape[0], slices[0].linear.in_features))
        _check_shape(tensors.file, parts["B"], b, (outputs, a.shape[0]))
        if bias is not None:
            _check_shape(tensors.file, parts["B_bias"], bias, (outputs,))
        scaling = self._factor * self._config.scaling(module)
        for part in slices:
            linear, rows = part.linear, part.rows or ((0, outputs),)
            if linear.key in self.pairs:
                raise AdapterError(f"{tensors.file}: {parts['A']}: {linear.key} is adapted twice, split and fused")
            self.pairs[linear.key] = LoraPair(
                a,
                take_rows(b, rows).contiguous(),
                None if bias is None else take_rows(bias, rows),
                scaling * linear.spec.prescale,
                linear.device,
                linear.key,
            )

    def _pair_for_embedding(
        self, tensors: AdapterTensors, module: str, parts: Mapping[str, str], embedding: Embedding
    ) -> EmbeddingPair:
        a, b = tensors.read(parts["embedding_A"]), tensors.read(parts["embedding_B"])
        self._check_rank(tensors.file, module, parts["embedding_A"], a, b)
        _check_shape(tensors.file, parts["embedding_A"], a, (a.shape[0], self._vocabulary(a.shape[1], embedding)))
        _check_shape(tensors.file, parts["embedding_B"], b, (embedding.hidden_size, a.shape[0]))
        scaling = self._factor * self._config.scaling(module)
        return EmbeddingPair(a, b, scaling, _device_of(embedding), embedding.key)

    def _check_rank(self, file: Path, module: str, name: str, a: Tensor, b: Tensor) -> None:
        rank = self._config.rank(module)
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise AdapterError(
                f"{file}: {name}: A {list(a.shape)} and B {list(b.shape)}, but adapter_config.json says r = {rank} for "
                "this module"
            )

    def _table(self, tensors: AdapterTensors, name: str, embedding: Embedding) -> Tensor:
        table = tensors.read(name)
        rows = self._vocabulary(table.shape[0], embedding) if table.dim() == 2 else embedding.vocab_size
        _check_shape(tensors.file, name, table, (rows, embedding.hidden_size))
        return table.to(_device_of(embedding))

    def _replace(self, tensors: AdapterTensors, name: str, part: Slice) -> None:
        linear, weight = part.linear, tensors.read(name)
        if weight.dim() == 2 and part.rows is not None:
            weight = take_rows(weight, part.rows).contiguous()
        rows = linear.out_features
        if weight.dim() == 2 and linear.spec.wider and rows <= weight.shape[0] <= linear.stored_features:
            rows = weight.shape[0]
        _check_shape(tensors.file, name, weight, (rows, linear.in_features))
        if linear.spec.bias:
            raise AdapterError(f"{tensors.file}: {name}: a matrix with a bias cannot be replaced by an adapter here")
        self.replacements[linear.key] = QuantMatrix.from_float(
            weight,
            prescale=linear.spec.prescale,
            device=linear.device,
            name=f"{tensors.file}: {name}",
            precise=linear.spec.is_precise,
        )

    @staticmethod
    def _vocabulary(rows: int, embedding: Embedding) -> int:
        """Return the number of rows of a table: that of the vocabulary, or of the (padded) table in the file."""
        most = embedding.vocab_size if embedding.weight is None else embedding.weight.shape[0]
        return rows if embedding.vocab_size <= rows <= most else embedding.vocab_size


def _expert_keys(model: LanguageModel) -> set[str]:
    """Return matrices that see only some rows of a pass, and routers.

    An adapter on these makes every row choose its experts by another kernel.
    """
    specs = (linear.spec for linear in model.linears())
    return {spec.key for spec in specs if spec.expert is not None or spec.role == "router"}


def _outputs(slices: list[Slice]) -> int:
    """Return the output rows of the adapter's module: of the matrix, or of all parts of a fused one."""
    return max(s.linear.out_features if s.rows is None else max(end for _, end in s.rows) for s in slices)


def _check_shape(file: Path, name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != wanted:
        raise AdapterError(f"{file}: {name}: shape {list(tensor.shape)}, this model needs {list(wanted)}")


def _device_of(embedding: Embedding) -> torch.device:
    return torch.device("cpu") if embedding.weight is None else embedding.weight.device
