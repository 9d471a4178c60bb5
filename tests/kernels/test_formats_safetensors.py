"""Safetensors containers: whatever a header says, it is read right or refused with the file's and the tensor's name."""

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from exl_kernels import formats
from exl_kernels.errors import DTypeError, FormatError, ShapeError

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def sample_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {str(dtype): (torch.randn(3, 5) * 3).to(dtype) for dtype in DTYPES}
    return tensors | {"empty": torch.empty(0, 7), "scalar": torch.tensor(2.5), 'ünïcode "name"': torch.arange(9)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.numel() == 0 or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def raw_file(folder: Path, header: object, data: bytes = b"", name: str = "model.safetensors") -> Path:
    """A file with this header (bytes, or a value for JSON) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / name
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    tensors = sample_tensors()
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    header = formats.read_safetensors_header(tmp_path / "a.safetensors")
    assert header.metadata == {"format": "pt"}
    assert header.entries.keys() == tensors.keys()
    for name, found in header.entries.items():
        assert found.path == tmp_path / "a.safetensors"
        assert same(formats.read_tensor(found), tensors[name]), name


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = sample_tensors()
    formats.write_safetensors(tmp_path / "a.safetensors", tensors, {"who": "wir"})
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in tensors)
    header = formats.read_safetensors_header(tmp_path / "a.safetensors")
    assert header.metadata == {"who": "wir"}
    assert all(item.offset % tensors[name].element_size() == 0 for name, item in header.entries.items())
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_large_tensors_are_read_in_pieces(tmp_path: Path) -> None:
    tensor = torch.randint(0, 256, ((40 << 20) + 3,), dtype=torch.uint8)
    formats.write_safetensors(tmp_path / "a.safetensors", {"x": tensor})
    found = formats.read_safetensors_header(tmp_path / "a.safetensors").entries["x"]
    assert torch.equal(formats.read_tensor(found), tensor)
    with open(tmp_path / "a.safetensors", "r+b") as file:
        file.truncate(found.offset + (33 << 20))
    with pytest.raises(FormatError, match=r'a\.safetensors: tensor "x": ended after'):
        formats.read_tensor(found)


def test_writer_refuses_and_leaves_the_old_file(tmp_path: Path) -> None:
    formats.write_safetensors(tmp_path / "a.safetensors", {"x": torch.ones(3)})
    before = (tmp_path / "a.safetensors").read_bytes()
    with pytest.raises(DTypeError, match="complex64"):
        formats.write_safetensors(tmp_path / "a.safetensors", {"x": torch.ones(3, dtype=torch.complex64)})
    assert (tmp_path / "a.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_read_into_checks_its_tensor(tmp_path: Path) -> None:
    path = raw_file(tmp_path, {}, b"12345678")
    target = torch.zeros(4, dtype=torch.int16)
    formats.read_into(path, 10, target, name="x")
    assert target.view(torch.uint8).numpy().tobytes() == b"12345678"
    with pytest.raises(FormatError, match='tensor "x": ended after 7 of 8 bytes at offset 11'):
        formats.read_into(path, 11, target, name="x")
    with pytest.raises(FormatError, match="ended after 0"):
        formats.read_into(path, 2**40, target, name="x")
    for offset in (-1, 2**63):
        with pytest.raises(ShapeError, match=f"offset {offset}"):
            formats.read_into(path, offset, target)
    with pytest.raises(DTypeError, match="contiguous"):
        formats.read_into(path, 8, torch.zeros(4, 4, dtype=torch.int16).T[1:])
    with pytest.raises(FormatError, match="nowhere"):
        formats.read_into(tmp_path / "nowhere", 8, target)


BROKEN = {
    "no JSON": (b"{nonsense", b"", "not a JSON object"),
    "not UTF-8": (b'{"\xff\xfe": 1}', b"", "not a JSON object"),
    "a list": ([], b"", "not a JSON object"),
    "deep nesting": (b'{"a":' + b"[" * 100_000, b"", "not a JSON object"),
    "rest after the object": (b"{} {}", b"", "not a JSON object"),
    "empty header": (b"", b"", "not a JSON object"),
    "entry is a number": ({"a": 3}, b"", "not a JSON object"),
    "shape missing": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", "shape"),
    "negative size": ({"a": entry("F32", [-1], 0, 4)}, b"1234", "not a JSON object"),
    "fractional size": ({"a": entry("F32", [1.5], 0, 4)}, b"1234", "not a JSON object"),
    "three offsets": (
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
        b"12345678",
        "not a JSON object",
    ),
    "field given twice": (
        b'{"a":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}',
        b"1234",
        "duplicate field",
    ),
    "metadata of numbers": ({"__metadata__": {"a": 3}}, b"", "not a JSON object"),
    "name given twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"12",
        'tensor "a": occurs twice',
    ),
    "metadata given twice": (b'{"__metadata__":{},"__metadata__":{}}', b"", "occurs twice"),
    "unknown dtype": ({"a": entry("F12", [1], 0, 4)}, b"1234", 'tensor "a": dtype "F12" is not known'),
    "size disagrees": ({"a": entry("F32", [2], 0, 4)}, b"1234", 'tensor "a": shape and dtype ask for 8 bytes'),
    "too many bytes": ({"a": entry("F32", [], 0, 8)}, b"12345678", "ask for 4 bytes, its offsets hold 8"),
    "beyond the end": ({"a": entry("F32", [2], 0, 8)}, b"1234", 'tensor "a": ends at byte 8 .* holds 4'),
    "backwards": ({"a": entry("F32", [1], 4, 0)}, b"1234", 'tensor "a": offsets \\[4, 0\\] run backwards'),
    "offset of 2^64": ({"a": entry("F32", [1], 2**64, 2**64 + 4)}, b"1234", "not a JSON object"),
    "offset near 2^64": ({"a": entry("F32", [1], 2**64 - 5, 2**64 - 1)}, b"1234", "ends at byte"),
    "elements overflow": ({"a": entry("F32", [2**32, 2**32], 0, 0)}, b"", 'tensor "a": shape .* 63 bits'),
    "bytes overflow": ({"a": entry("F64", [2**61], 0, 0)}, b"", "63 bits"),
    "overflow after a zero": ({"a": entry("F32", [0, 2**40, 2**40], 0, 0)}, b"", "63 bits"),
    "too many dimensions": ({"a": entry("F32", [1] * 65, 0, 4)}, b"1234", "65 dimensions"),
    "overlap": (
        {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 3, 7)},
        b"1234567",
        'tensor "b": overlaps tensor "a", which ends at byte',
    ),
    "one inside the other": (
        {"a": entry("U8", [6], 0, 6), "b": entry("U8", [1], 2, 3), "c": entry("U8", [1], 4, 5)},
        b"1234567",
        "overlaps",
    ),
    "the same bytes": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, b"1234", "overlaps"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_headers_are_refused(tmp_path: Path, case: str) -> None:
    header, data, text = BROKEN[case]
    path = raw_file(tmp_path, header, data)
    with pytest.raises(FormatError, match=text) as caught:
        formats.read_safetensors_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 1000 + len(str(path))


def test_broken_files_are_refused(tmp_path: Path) -> None:
    def refused(path: Path, text: str) -> None:
        with pytest.raises(FormatError, match=text):
            formats.read_safetensors_header(path)

    path = tmp_path / "a.safetensors"
    refused(path, "cannot be read")
    path.write_bytes(b"")
    refused(path, "holds 0 bytes")
    path.write_bytes(b"1234567")
    refused(path, "holds 7 bytes")
    path.write_bytes((2**64 - 1).to_bytes(8, "little") + b"{}")
    refused(path, "beyond the limit of 100000000")
    path.write_bytes((50_000_000).to_bytes(8, "little") + b"{}")
    refused(path, "50000000 bytes long, but only 2 bytes follow.*truncated")
    refused(tmp_path, "not a regular file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        refused(tmp_path / "s", "not a regular file")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    formats.write_safetensors(tmp_path / "whole", sample_tensors(), {"format": "pt"})
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "cut"
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match="cut: "):
            formats.read_safetensors_header(path)


def test_long_names_do_not_flood_the_message(tmp_path: Path) -> None:
    path = raw_file(tmp_path, {"x" * 1_000_000: entry("F32", [2], 0, 4)}, b"1234")
    with pytest.raises(FormatError, match=r"xxx\.\.\. \(1000000 bytes\)") as caught:
        formats.read_safetensors_header(path)
    assert len(str(caught.value)) < 1000 + len(str(path))


def test_harmless_oddities_are_read(tmp_path: Path) -> None:
    # Gaps, bytes after the last tensor, spaces around the header, unknown fields, empty tensors anywhere.
    header = {
        "b": entry("U8", [2], 6, 8) | {"note": [1, {"x": None}]},
        "a": entry("I16", [2], 0, 4),
        "e": entry("F32", [0, 3], 1, 1),
    }
    path = raw_file(tmp_path, b"  " + json.dumps(header).encode() + b"   ", b"\1\0\2\0..\3\4....")
    found = formats.read_safetensors_header(path).entries
    assert formats.read_tensor(found["a"]).tolist() == [1, 2]
    assert formats.read_tensor(found["b"]).tolist() == [3, 4]
    assert formats.read_tensor(found["e"]).shape == (0, 3)


def test_folder_refuses_a_tensor_that_two_files_hold(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no .* files here"):
        formats.read_safetensors_folder(tmp_path)
    formats.write_safetensors(tmp_path / "1.safetensors", {"a": torch.ones(1), "b": torch.ones(2)})
    formats.write_safetensors(tmp_path / "2.safetensors", {"c": torch.ones(3)})
    assert sorted(formats.read_safetensors_folder(tmp_path)) == ["a", "b", "c"]
    formats.write_safetensors(tmp_path / "3.safetensors", {"b": torch.ones(2)})
    with pytest.raises(FormatError, match=r"3.safetensors: tensor 'b' is also in 1.safetensors"):
        formats.read_safetensors_folder(tmp_path)


# Mutated headers: parsed or refused, never anything else, and what is parsed keeps its promises.

numbers = st.one_of(
    st.integers(-3, 40), st.sampled_from([2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30]), st.floats()
)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5) | st.sampled_from(["F32", "I16", "U8", "F12", "BOOL"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "U8", "F64", "I64", "BOOL", "F8_E4M3", "f32", ""]) | values,
        "shape": st.lists(numbers, max_size=4) | values,
        "data_offsets": st.lists(numbers, min_size=2, max_size=2) | values,
    },
)
plausible = st.builds(
    lambda dtype, shape, begin, end: entry(dtype, shape, begin, end),
    st.sampled_from(["F32", "F16", "U8", "I64"]),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 40),
    st.integers(0, 40),
)


def read_bytes(content: bytes) -> None:
    """Reads a file of these bytes; the header's promises hold or FormatError is raised."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(content)
        try:
            header = formats.read_safetensors_header(path)
        except FormatError as error:
            message = str(error)
            assert message.startswith(f"{path}: ")
            return
        end = 0
        for item in sorted(header.entries.values(), key=lambda item: (item.offset, item.nbytes)):
            if item.nbytes:
                assert item.offset >= end
                end = item.offset + item.nbytes
                assert end <= len(content)
            tensor = formats.read_tensor(item) if item.dtype != "F8_E8M0" else None
            assert tensor is None or (tensor.nbytes == item.nbytes and tuple(tensor.shape) == item.shape)


many = examples(300, 36)


@many
@given(
    st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), plausible | entries | values, max_size=4),
    st.integers(0, 60),
)
def test_any_header_is_read_or_refused(header: dict[str, object], length: int) -> None:
    text = json.dumps(header).encode()
    read_bytes(len(text).to_bytes(8, "little") + text + bytes(length))


@many
@given(st.binary(max_size=80))
@example(b"\x02\0\0\0\0\0\0\0{}")
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    read_bytes(content)


@many
@given(st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject) -> None:
    header = {"a": entry("F32", [2, 3], 0, 24), "bb": entry("I16", [4], 24, 32), "__metadata__": {"format": "pt"}}
    text = json.dumps(header).encode()
    content = bytearray(len(text).to_bytes(8, "little") + text + bytes(32))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 8 + len(text) - 1))
        content[at] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'0123456789[]{},:"-.eE')))
    read_bytes(bytes(content))
