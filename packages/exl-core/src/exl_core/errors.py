"""The errors of exl_core: every class derives from `exl_kernels.errors.ExlError` and has a stable `code`.

Where users of exllamav2 may catch a built-in exception, the class also derives from it.
"""

from __future__ import annotations

from exl_kernels.errors import DeviceError, DTypeError, ExlError, FormatError, ShapeError, UnsupportedError

__all__ = [
    "AdapterError",
    "CacheError",
    "ChatTemplateError",
    "ConfigError",
    "ConfigFileError",
    "ConfigKeyError",
    "ConfigTypeError",
    "DTypeError",
    "DeviceError",
    "ExlError",
    "FormatError",
    "InputError",
    "MissingTensorError",
    "ModelStateError",
    "PeerError",
    "SequenceTooLongError",
    "ShapeError",
    "TokenIdError",
    "TokenizerError",
    "TokenizerFileError",
    "UnsupportedArchitectureError",
    "UnsupportedError",
]


class ConfigError(ExlError, ValueError):
    """config.json, or a value set on the config, does not describe a model.

    The message names file, key and expected value.
    """

    code = "config"


class ConfigFileError(ConfigError, FileNotFoundError):
    """The model folder, or a file that it must hold, is missing or cannot be read."""

    code = "config_file"

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ConfigKeyError(ConfigError, KeyError):
    """A key that the model needs is missing from config.json."""

    code = "config_key"

    def __str__(self) -> str:  # KeyError would quote the message
        return str(self.args[0]) if self.args else ""


class ConfigTypeError(ConfigError, TypeError):
    """A key of config.json has a value of the wrong JSON type."""

    code = "config_type"


class UnsupportedArchitectureError(ConfigError, UnsupportedError):
    """`architectures[0]` names an unsupported model family. The message lists the supported ones."""

    code = "architecture"


class MissingTensorError(FormatError):
    """The weight files lack a tensor that the architecture needs."""

    code = "missing_tensor"


class AdapterError(FormatError):
    """A LoRA adapter is damaged, made for another model, or of an unknown layout. The message names file and tensor."""

    code = "adapter"


class ModelStateError(ExlError, RuntimeError):
    """The call does not fit the model's state: not loaded, already loaded, or unloaded."""

    code = "model_state"


class PeerError(DeviceError):
    """Another process of a tensor parallel model died, does not answer, or computes something else."""

    code = "peer"


class CacheError(ExlError, ValueError):
    """A cache cannot be built or used this way."""

    code = "cache"


class InputError(ExlError, ValueError):
    """An argument of a forward pass is malformed."""

    code = "input"


class SequenceTooLongError(InputError):
    """More positions than the cache, the model or one chunk can hold."""

    code = "sequence_too_long"


class TokenIdError(InputError, IndexError):
    """A token id outside the vocabulary."""

    code = "token_id"


class TokenizerError(ExlError, ValueError):
    """The tokenizer cannot be built, or a request is impossible."""

    code = "tokenizer"


class TokenizerFileError(TokenizerError, FileNotFoundError):
    """The folder has no tokenizer file that this version reads."""

    code = "tokenizer_file"

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ChatTemplateError(TokenizerError):
    """The model has no chat template, or the template rejected the conversation."""

    code = "chat_template"
