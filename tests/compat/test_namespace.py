"""The import paths and names of exllamav2 are there, and are this project's classes."""

from __future__ import annotations

import importlib
import random

import pytest

import exl_core
import exl_filters
import exl_generate
from exl_kernels.errors import UnsupportedError

PATHS = {
    "exllamav2": [
        *("ExLlamaV2", "ExLlamaV2Config", "ExLlamaV2CacheBase", "ExLlamaV2Cache", "ExLlamaV2Cache_8bit"),
        *("ExLlamaV2Cache_Q4", "ExLlamaV2Cache_Q6", "ExLlamaV2Cache_Q8", "ExLlamaV2Cache_TP", "ExLlamaV2Tokenizer"),
        *("ExLlamaV2Lora", "SeqTensor", "Timer", "Intervention", "ExLlamaV2MultimodalProjector"),
        *("ExLlamaV2VisionTower", "__version__"),
    ],
    "exllamav2.generator": [
        *("ExLlamaV2Sampler", "ExLlamaV2BaseGenerator", "ExLlamaV2StreamingGenerator", "ExLlamaV2DynamicGenerator"),
        *("ExLlamaV2DynamicJob", "ExLlamaV2DynamicGeneratorAsync", "ExLlamaV2DynamicJobAsync"),
        *("ExLlamaV2PostSamplingHook", "ExLlamaV2PostSamplingResult", "ExLlamaV2MMEmbedding"),
    ],
    "exllamav2.generator.filters": ["ExLlamaV2Filter", "ExLlamaV2SelectFilter", "ExLlamaV2PrefixFilter"],
    "exllamav2.generator.filters.base": ["ExLlamaV2Filter"],
    "exllamav2.generator.filters.prefix": ["ExLlamaV2PrefixFilter"],
    "exllamav2.generator.filters.select": ["ExLlamaV2SelectFilter"],
    "exllamav2.generator.base": ["ExLlamaV2BaseGenerator", "ExLlamaV2Filter"],
    "exllamav2.generator.streaming": ["ExLlamaV2StreamingGenerator", "ExLlamaV2Filter"],
    "exllamav2.generator.dynamic": [
        *("ExLlamaV2DynamicGenerator", "ExLlamaV2DynamicJob", "ExLlamaV2Filter"),
        *("PAGED_PAGE_SIZE", "CachePage", "NGramTrie"),
    ],
    "exllamav2.generator.dynamic_async": ["ExLlamaV2DynamicGeneratorAsync", "ExLlamaV2DynamicJobAsync"],
    "exllamav2.generator.sampler": ["ExLlamaV2Sampler", "ExLlamaV2Filter"],
    "exllamav2.generator.hooks": ["ExLlamaV2PostSamplingHook", "ExLlamaV2PostSamplingResult"],
    "exllamav2.generator.ngram": ["NgramCache", "NgramCacheNode"],
    "exllamav2.attn": ["ExLlamaV2Attention"],
    "exllamav2.config": ["ExLlamaV2Config"],
    "exllamav2.cache": ["ExLlamaV2Cache", "ExLlamaV2Cache_TP"],
    "exllamav2.model": ["ExLlamaV2"],
    "exllamav2.model_init": ["add_args", "print_options", "check_args", "init", "post_init_load"],
    "exllamav2.lora": ["ExLlamaV2Lora"],
    "exllamav2.tokenizer": ["ExLlamaV2Tokenizer"],
    "exllamav2.util": ["SeqTensor", "Timer"],
    "exllamav2.version": ["__version__"],
}


@pytest.mark.covers("filters.md: CAP-2")
@pytest.mark.parametrize("path", sorted(PATHS))
def test_names_are_ours(path: str) -> None:
    module = importlib.import_module(path)
    assert set(PATHS[path]) <= {*module.__all__, "__version__"}
    for name in PATHS[path]:
        found = getattr(module, name)
        for home in (exl_core, exl_filters, exl_generate):
            ours = getattr(home, name, found)
            if name == "ExLlamaV2Sampler":  # has settings of its own: see test_settings.py
                assert issubclass(found, ours)
                continue
            assert ours is found or name == "__version__"


def test_a_name_without_its_feature_says_so_when_it_is_used() -> None:
    from exllamav2._names import core_name

    missing = core_name("ExLlamaV2NoSuchClass")
    assert not isinstance(3, missing)
    for use in (lambda: missing("model"), lambda: missing.from_directory("model", "folder")):
        with pytest.raises(UnsupportedError, match="ExLlamaV2NoSuchClass"):
            use()


def test_parameter_objects_of_attention() -> None:
    from exllamav2.attn import ExLlamaV2Attention

    assert ExLlamaV2Attention.Params is exl_core.AttentionParams
    assert ExLlamaV2Attention.PagedParams is exl_core.PagedParams


def test_ngram_cache_counts_every_transition() -> None:
    """Against a search through the text: the longest ending that occurred before decides, by its most frequent
    successor."""
    from exllamav2.generator.ngram import NgramCache

    rng = random.Random(0)
    for _ in range(200):
        low, high = rng.randint(1, 2), rng.randint(3, 5)
        text = [rng.randint(0, 2) for _ in range(rng.randint(2, 30))]
        cache = NgramCache(low, high)
        cache.update(text)
        grown = NgramCache(low, high)
        for end in range(1, len(text) + 1):
            grown.update_single(text[:end])
        context = [rng.randint(0, 2) for _ in range(rng.randint(0, 6))]
        counts: list[dict[int, int]] = []
        for n in range(min(high - 1, len(context)), low - 1, -1):
            ending, found = context[len(context) - n :], dict[int, int]()
            for i in range(n, len(text)):
                if text[i - n : i] == ending:
                    found[text[i]] = found.get(text[i], 0) + 1
            counts.append(found)
        for threshold in (1, 2):
            able = [c for c in counts if c and max(c.values()) >= threshold]
            for made in (cache, grown):
                got = made.predict_next(context, threshold)
                assert (got is None) == (not able)
                assert got is None or able[0][got] == max(able[0].values())


def test_a_preloaded_ngram_cache_lends_its_counts() -> None:
    from exllamav2.generator.ngram import NgramCache

    example = NgramCache(1, 3)
    example.update([1, 2, 1, 2])
    cache = NgramCache(1, 3, preload=example)
    assert cache.predict_next([1]) == 2
    cache.update([1, 5])
    assert cache.nodes[(1,)].counts == {2: 2, 5: 1}
    assert example.nodes[(1,)].counts == {2: 2}
