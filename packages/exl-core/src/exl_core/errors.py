"""The error catalogue of exl_core: every class derives from `exl_kernels.errors.ExlError` and carries a stable `code`.

Where users of exllamav2 may already catch a built-in exception, the class derives from that as well.
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
    "SequenceTooLongError",
    "ShapeError",
    "TokenIdError",
    "TokenizerError",
    "TokenizerFileError",
    "UnsupportedArchitectureError",
    "UnsupportedError",
]


class ConfigError(ExlError, ValueError):
    """config.json, or a value set on the config, does not describe a model: names file, key and what was expected."""

    code = "config"


class ConfigFileError(ConfigError, FileNotFoundError):
    """The model folder, or a file it must hold, is not there or cannot be read."""

    code = "config_file"

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ConfigKeyError(ConfigError, KeyError):
    """A key that the model needs is missing from config.json."""

    code = "config_key"

    def __str__(self) -> str:  # KeyError would quote the message
        return str(self.args[0]) if self.args else ""


class ConfigTypeError(ConfigError, TypeError):
    """A key of config.json holds a value of the wrong JSON type."""

    code = "config_type"


class UnsupportedArchitectureError(ConfigError, UnsupportedError):
    """`architectures[0]` names a model family that this version does not run; lists those it does."""

    code = "architecture"


class MissingTensorError(FormatError):
    """The weight files lack a tensor that the architecture needs."""

    code = "missing_tensor"


class AdapterError(FormatError):
    """A LoRA adapter is damaged, made for another model, or of a layout that is not known: names file and tensor."""

    code = "adapter"


class ModelStateError(ExlError, RuntimeError):
    """The call does not fit the model's state: not loaded, already loaded, or unloaded."""

    code = "model_state"


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
    """The tokenizer cannot be built, or was asked for something that it cannot do."""

    code = "tokenizer"


class TokenizerFileError(TokenizerError, FileNotFoundError):
    """No tokenizer file that this version reads."""

    code = "tokenizer_file"

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ChatTemplateError(TokenizerError):
    """The model has no chat template, or the template refused the conversation."""

    code = "chat_template"
