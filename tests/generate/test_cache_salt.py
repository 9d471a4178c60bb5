"""Jobs with different cache salts share no pages, so that nobody learns by timing what another has asked."""

from __future__ import annotations

from typing import Any

import pytest

from exl_generate import ExLlamaV2DynamicJob, ExLlamaV2Sampler, RequestError
from exl_generate.testing import drain
from exl_generate.testing.small import TOKENIZER, job, make


def test_salts_share_pages_with_their_like_alone() -> None:
    made = make()
    cached = []
    for salt in (b"", b"one", b"two", b"one", b"", b"on", b"\0", b"two"):
        one = job("abcdefgh" * 6, 4, cache_salt=salt)
        made.enqueue(one)
        cached.append(drain(made)[one][-1]["cached_tokens"])
    assert cached == [0, 0, 0, 47, 47, 0, 0, 47]


@pytest.mark.parametrize("salt", [None, "text", bytearray(b"x"), b"x" * 257])
def test_a_value_that_is_no_salt_is_refused(salt: Any) -> None:
    with pytest.raises(RequestError, match="cache_salt"):
        ExLlamaV2DynamicJob(
            TOKENIZER.encode("abc"), 1, gen_settings=ExLlamaV2Sampler.Settings.greedy(), cache_salt=salt
        )
