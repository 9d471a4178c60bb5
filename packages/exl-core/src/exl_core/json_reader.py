"""Typed reading of config.json: the first present key wins, `a->b` descends, and errors name file, key and type."""

from __future__ import annotations

import errno
import json
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError, ConfigFileError, ConfigKeyError, ConfigTypeError

__all__ = ["REQUIRED", "JsonReader", "read_json_file", "regular_size"]

MAX_JSON_BYTES = 16 << 20  # a config has kilobytes; larger files are rejected before parsing
MAX_INTEGER = (1 << 63) - 1
INSIDE = "text_config->"  # where multimodal models keep the language model's fields
OF_THE_WHOLE = {  # keys that a multimodal model has at the top level first, for all of its parts
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "quantization_config"),
}


class _Required:
    pass


REQUIRED = _Required()


def regular_size(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        OSError: the file cannot be accessed or is not regular: reading a named pipe would block.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return found.st_size


def read_json_file(path: Path) -> dict[str, Any]:
    """Parse `path` as one JSON object. Raises ConfigFileError or ConfigError, never another error, for a bad file."""
    try:
        size = regular_size(path)
        if size > MAX_JSON_BYTES:
            raise ConfigError(f"{path}: {size} bytes, more than the {MAX_JSON_BYTES} a JSON file of a model may have")
        text = path.read_bytes().decode("utf-8")
    except OSError as e:
        raise ConfigFileError(f"Can't find {path} ({e.strerror or e})") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 text ({e})") from e
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:  # ValueError also for integers of thousands of digits
        raise ConfigError(f"{path}: not valid JSON ({e})") from e
    if not isinstance(value, dict):
        raise ConfigTypeError(f"{path}: the file must hold a JSON object, not {type(value).__name__}")
    return value


class JsonReader:
    """Reads typed values out of one parsed JSON object.

    Keys are tried in order. null counts as absent; `defaults` come last. `text=True` also looks under `text_config->`,
    where multimodal models keep the language model's fields, after the top level. An int is accepted for a float and an
    integral float for an int.

    Args:
        data: the object.
        file: name of the file for messages.
        defaults: values of keys that are absent or null in the file.
        multimodal: with `text=True` a text_config is the only place for keys of the language model, if the file has
            one.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        file: str | Path,
        defaults: Mapping[str, Any] | None = None,
        multimodal: bool = False,
    ) -> None:
        self.data = data
        self.file = str(file)
        self.defaults = defaults or {}
        self.inside_only = multimodal and isinstance(data.get("text_config"), Mapping)

    def raw(self, *keys: str, text: bool = False) -> tuple[str, Any] | None:
        """Return (key, value) of the first present non-null key, or None."""
        for key in self._places(keys, text):
            node: Any = self.data
            for part in key.split("->"):
                node = node.get(part) if isinstance(node, Mapping) else None
            if node is not None:
                return key, node
        return next(((key, self.defaults[key]) for key in keys if self.defaults.get(key) is not None), None)

    def explicit_null(self, key: str, text: bool = False) -> bool:
        """Return whether the file has `key` with the value null."""
        for path in self._places((key,), text):
            node: Any = self.data
            *way, last = path.split("->")
            for part in way:
                node = node.get(part) if isinstance(node, Mapping) else None
            if isinstance(node, Mapping) and last in node:
                return node[last] is None
        return False

    def _places(self, keys: tuple[str, ...], text: bool) -> tuple[str, ...]:
        """Return the full keys to try, in order."""
        if not text:
            return keys
        inside = tuple(INSIDE + key for key in keys)
        if self.inside_only:
            return (*(key for key in keys if key in OF_THE_WHOLE), *inside)
        return (*keys, *inside)

    def integer(
        self,
        *keys: str,
        default: Any = REQUIRED,
        text: bool = False,
        minimum: int = -MAX_INTEGER,
        maximum: int = MAX_INTEGER,
    ) -> Any:
        """Return an int within [minimum, maximum], or `default` if all keys are absent.

        Raises:
            ConfigKeyError: no key is present and there is no default.
            ConfigTypeError: the value has another type.
            ConfigError: the value is out of range.
        """
        found = self._find(keys, default, text)
        if found is None:
            return default
        key, value = found
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(key, value, "int")
        if value < minimum:
            raise ConfigError(f"{self.file}: {key} is {_shown(value)}, must be at least {minimum}")
        if value > maximum:
            raise ConfigError(f"{self.file}: {key} is {_shown(value)}, must be at most {maximum}")
        return value

    def number(self, *keys: str, default: Any = REQUIRED, text: bool = False) -> Any:
        """Return a finite float, or `default` if all keys are absent. Errors as for `integer`."""
        found = self._find(keys, default, text)
        if found is None:
            return default
        key, value = found
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong_type(key, value, "float")
        if not is_number(value):
            raise ConfigError(f"{self.file}: {key} is {_shown(value)}, must be a finite number")
        return float(value)

    def boolean(self, *keys: str, default: Any = REQUIRED, text: bool = False) -> Any:
        """Return a bool, or `default` if all keys are absent. Errors as for `integer`."""
        return self._typed(keys, default, text, bool, "bool")

    def string(self, *keys: str, default: Any = REQUIRED, text: bool = False) -> Any:
        """Return a str, or `default` if all keys are absent. Errors as for `integer`."""
        return self._typed(keys, default, text, str, "str")

    def listing(self, *keys: str, default: Any = REQUIRED, text: bool = False) -> Any:
        """Return a list, or `default` if all keys are absent. Errors as for `integer`."""
        return self._typed(keys, default, text, list, "list")

    def section(self, *keys: str, text: bool = False) -> JsonReader | None:
        """Return a reader of the JSON object under the first present key, or None."""
        value = self._typed(keys, None, text, dict, "object")
        return None if value is None else JsonReader(value, f"{self.file}: {keys[0]}")

    def _typed(self, keys: tuple[str, ...], default: Any, text: bool, kind: type, name: str) -> Any:
        found = self._find(keys, default, text)
        if found is None:
            return default
        key, value = found
        if not isinstance(value, kind):
            raise self._wrong_type(key, value, name)
        return value

    def _find(self, keys: tuple[str, ...], default: Any, text: bool) -> tuple[str, Any] | None:
        found = self.raw(*keys, text=text)
        if found is None and default is REQUIRED:
            raise ConfigKeyError(f"{self.file}: Missing any of the following keys: {list(keys)}")
        return found

    def _wrong_type(self, key: str, value: Any, expected: str) -> ConfigTypeError:
        return ConfigTypeError(f"{self.file}: Value for {key} is not of expected type {expected}: {_shown(value)}")


def is_number(value: object) -> bool:
    """Return whether a JSON value is a finite number that a float can hold."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return known and abs(value) <= sys.float_info.max  # type: ignore[arg-type]  # false of NaN


def _shown(value: Any) -> str:
    """Return `value` as a short text for a message."""
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return "a number of more than 63 bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
