"""The numeric vectors that another program made, against the native code and its twin."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from exl_kernels import formats
from exl_kernels.reference import formats as twin

Arrays = dict[str, NDArray[np.generic]]


def sha(array: NDArray[np.generic]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def to_torch(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in arrays.items()}


def native_pack(
    codes: NDArray[np.uint8], scale_codes: NDArray[np.uint8], maxima: NDArray[np.float16], **rest: object
) -> Arrays:
    perm = rest.get("perm")
    packed = formats.exl2_pack(
        torch.from_numpy(codes.astype(np.uint8)),
        torch.from_numpy(scale_codes.astype(np.uint8)),
        torch.from_numpy(maxima),
        rest["groups"],  # type: ignore[arg-type]
        perm=None if perm is None else torch.from_numpy(perm),
    )
    return {key: tensor.numpy() for key, tensor in packed.items()}


PACKERS: dict[str, Callable[..., Arrays]] = {"native": native_pack, "twin": twin.exl2_pack}
READERS: dict[str, Callable[[Arrays], NDArray[np.float16]]] = {
    "native": lambda arrays: formats.exl2_dequantize(to_torch(arrays)).numpy(),
    "twin": twin.exl2_dequantize,
}

PACKED = {
    2: "1b1b1b1b 1b1b1b1b",
    3: "53977053 70539770 97705397",
    4: "4d6f81a3 c5e7092b 4d6f81a3 c5e7092b",
    5: "4dfc4543 78245ba3 0753617d 4b276cf4 e55c7066",
    6: "9f611283 90bbd2d9 b2579740 8f201eb3 9cab91d5 71538703",
    8: "18110a03 342d261f 5049423b 6c655e57 88817a73 a49d968f c0b9b2ab dcd5cec7",
}
# First two weights of each width at s = 0.1953125 (8.1); the 8-bit ones are given as half bits.
WEIGHTS = {
    2: (0.1953125, 0.0),
    3: (-0.1953125, -0.390625),
    4: (-0.9765625, 0.390625),
    5: (-2.5390625, -1.171875),
    6: (-5.6640625, -4.296875),
    8: (-24.40625, -23.046875),
}


@pytest.mark.parametrize("which", PACKERS)
@pytest.mark.parametrize("bits", PACKED)
def test_packing_of_one_column(which: str, bits: int) -> None:
    codes = np.repeat(((7 * np.arange(32) + 3) % 2**bits)[:, None], 8, axis=1)
    packed = PACKERS[which](
        codes, np.full((1, 8), 9), np.array([0.5], np.float16), groups=[(bits, 32)], perm=np.arange(32)
    )
    for column in range(8):
        assert packed["q_weight"].view(np.uint32)[:, column].tolist() == words(PACKED[bits])
    weights = READERS[which](packed)
    assert weights[:2, 0].tolist() == list(WEIGHTS[bits])


@pytest.mark.parametrize("which", PACKERS)
@pytest.mark.parametrize(
    ("maximum", "nibble", "scale"),
    [
        (0x3800, 9, 0x3240),
        (0x224C, 15, 0x224C),
        (0x224C, 0, 0x0326),
        (0x128E, 15, 0x1280),
        (0x128E, 7, 0x0A80),
        (0x3F00, 4, 0x3178),
    ],
)
def test_scale_chain(which: str, maximum: int, nibble: int, scale: int) -> None:
    codes = np.full((32, 8), 9)  # one step above zero at 4 bits, so the weight is the scale
    maxima = np.array([maximum], np.uint16).view(np.float16)
    packed = PACKERS[which](codes, np.full((1, 8), nibble), maxima, groups=[(4, 32)], perm=np.arange(32))
    assert set(READERS[which](packed).view(np.uint16).ravel().tolist()) == {scale}


def complete_tensor(pack: Callable[..., Arrays]) -> Arrays:
    k, n = np.arange(192)[:, None], np.arange(128)[None, :]
    widths = np.repeat([8, 6, 5, 4, 3, 2], 32)[:, None]
    maxima = np.array(words("0cea 184d 2074 2474 2bcf 3400"), np.uint16).view(np.float16)
    return pack(
        (11 * k + 7 * n + 5) % 2**widths,
        (3 * np.arange(6)[:, None] + n) % 16,
        maxima,
        groups=[(bits, 32) for bits in (8, 6, 5, 4, 3, 2)],
        perm=np.argsort((77 * np.arange(192) + 13) % 192),
    )


@pytest.mark.parametrize("which", PACKERS)
def test_complete_exl2_tensor(which: str) -> None:
    packed = complete_tensor(PACKERS[which])
    assert {key: sha(packed[key]) for key in ("q_weight", "q_scale", "q_groups", "q_invperm")} == {
        "q_weight": "76ace9fb8271fc343dc090c8052fa66b31a94003809022f3ef10d54cbfef62ed",
        "q_scale": "1a32dfa2958a9ffc8a1ef302068097121530e7bf50bd5dfff88145d0aaf6a954",
        "q_groups": "ad97e32ddacffa8d68a9f1614668fa2000048a566ef754d923136b5e1a470862",
        "q_invperm": "c1c6e5bc8ee8beb6bd8a8565c0619502716605537502f5c9afb60d572a0b2fe3",
    }
    weights = READERS[which](packed)
    assert weights[0, :6].view(np.uint16).tolist() == words("0190 0838 0dfa 1268 15dc 18d6")
    assert weights[191, :6].view(np.uint16).tolist() == words("2928 0000 aadd afcf 91db 9bcf")
    assert sha(weights) == "9d2b9c47dbe30721a27c93dc318ab502f263664ca7858ed1fc3e2f006a158188"


GPTQ_SHA = {
    ("classic", False): "0aa9d12ff66b5685cd1f69b9c9648cabf874b0b9bad1dec58d45e6381467226d",
    ("v2", False): "662ec7edf397c6fa8adb54b725d1b97629d94deefab76859f67e2dff5f558f7a",
    ("classic", True): "f5d23661303da278aed29c97145ea561645cedcf14c3bb797f6109e802772e5b",
    ("v2", True): "242f955edd1425b9371e314017bfcc9fa8c00f602964388ce1b37bb718a9a9d9",
}


@pytest.mark.parametrize("which", ["native", "twin"])
@pytest.mark.parametrize(("zeros", "act_order"), GPTQ_SHA)
def test_gptq_tensor(which: str, zeros: str, act_order: bool) -> None:
    k, n, g = np.arange(64)[:, None], np.arange(8)[None, :], np.arange(2)[:, None]
    arrays: Arrays = {
        "qweight": twin.pack_columns((3 * k + 5 * n + 1) % 16, 4),
        "qzeros": twin.pack_rows((3 * g + n + 4) % 16, 4),
        "scales": (0.01 * (1 + g) + 0.001 * n).astype(np.float16),
    }
    if act_order:
        arrays["g_idx"] = (np.arange(64) % 2).astype(np.int32)
    assert arrays["qweight"][0].view(np.uint32).tolist() == words(
        "630da741 b852fc96 0da741eb 52fc9630 a741eb85 fc9630da 41eb852f 9630da74"
    )
    if which == "native":
        weights = formats.gptq_dequantize(to_torch(arrays), zeros=zeros).numpy()  # type: ignore[arg-type]
    else:
        weights = twin.gptq_dequantize(arrays, 4, zeros == "v2")
    assert sha(weights) == GPTQ_SHA[zeros, act_order]


def test_gptq_v2_zeros_do_not_borrow() -> None:
    # A word of zeros whose lowest nibble is 0: the reference's subtraction borrows across nibbles (3.5, DBR 1).
    tensors = {
        "qweight": torch.zeros(4, 8, dtype=torch.int32),
        "qzeros": torch.tensor([[0x12345670]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weights = formats.gptq_dequantize(tensors, zeros="v2")
    assert weights[0].tolist() == [0, -7, -6, -5, -4, -3, -2, -1]
