"""The import paths and names of exllamav2 are there, and are this project's classes."""

from __future__ import annotations

import importlib
import pkgutil
import random
import re

import pytest
import torch
from preloaded import run

import exl_core
import exl_filters
import exl_generate
import exllamav2
from exl_core import layers as modules
from exl_core.architectures import Architecture
from exl_core.execution.sharded.context import TensorParallel
from exl_core.tokenizer.backend import TokenizerBackend
from exl_core.tokenizer.sentencepiece_backend import SentencePieceBackend
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
    "exllamav2.attn": ["ExLlamaV2Attention", "Params", "PagedParams", "has_flash_attn", "has_xformers"],
    "exllamav2.attn_params": ["Params", "PagedParams"],
    "exllamav2.config": ["ExLlamaV2Config"],
    "exllamav2.cache": ["ExLlamaV2Cache", "ExLlamaV2Cache_TP"],
    "exllamav2.model": ["ExLlamaV2"],
    "exllamav2.model_init": ["add_args", "print_options", "check_args", "init", "post_init_load"],
    "exllamav2.lora": ["ExLlamaV2Lora"],
    "exllamav2.tokenizer": ["ExLlamaV2Tokenizer", "ExLlamaV2TokenizerBase", "ExLlamaV2TokenizerHF"],
    "exllamav2.tokenizer.tokenizer": ["ExLlamaV2Tokenizer"],
    "exllamav2.util": ["SeqTensor", "Timer", "list_live_tensors"],
    "exllamav2.version": ["__version__"],
    "exllamav2.generator.dynamic_embeddings": ["ExLlamaV2MMEmbedding", "EMBEDDING_INDEX"],
    "exllamav2.conversion.tokenize": ["get_tokens"],
    "exllamav2.conversion.quantize": ["list_live_tensors"],
    "exllamav2.module": ["ExLlamaV2Module", "Intervention"],
    "exllamav2.server": ["ExLlamaV2WebSocketServer"],
    "exllamav2.server.websocket": ["ExLlamaV2WebSocketServer"],
    "exllamav2.vlm": ["ExLlamaV2VisionTower", "ExLlamaV2MultimodalProjector"],
    "exllamav2.vlm.vision_tower": ["ExLlamaV2VisionTower"],
    "exllamav2.vlm.mmprojector": ["ExLlamaV2MultimodalProjector"],
}
# Modules of exllamav2's inner workings: scripts import them, few of their names have a counterpart.
INNER = [
    *("exllamav2.architecture", "exllamav2.compat", "exllamav2.conv", "exllamav2.conversion", "exllamav2.device"),
    *("exllamav2.conversion.adaptivegptq", "exllamav2.conversion.bot_status", "exllamav2.conversion.compile"),
    *("exllamav2.conversion.convert_exl2", "exllamav2.conversion.measure", "exllamav2.conversion.optimize"),
    "exllamav2.conversion.qparams",
    *(
        "exllamav2.embedding",
        "exllamav2.ext",
        "exllamav2.headnorm",
        "exllamav2.layernorm",
        "exllamav2.linear",
        "exllamav2.mlp",
    ),
    *("exllamav2.moe_mlp", "exllamav2.mrope", "exllamav2.parallel_decoder", "exllamav2.pos_embedding"),
    *("exllamav2.rmsnorm", "exllamav2.rope", "exllamav2.server.websocket_actions", "exllamav2.stloader"),
    *("exllamav2.tensor_p", "exllamav2.tokenizer.base", "exllamav2.tokenizer.hf", "exllamav2.tokenizer.spm"),
    *("exllamav2.vlm.processor", "exllamav2.vlm.processor.pixtral", "exllamav2.vlm.processor.qwen2"),
    *("exllamav2.vlm.processor.siglip", "exllamav2.vlm.util"),
]


@pytest.mark.covers("filters: import-paths")
@pytest.mark.parametrize("path", sorted(PATHS))
def test_names_are_ours(path: str) -> None:
    module = importlib.import_module(path)
    assert set(PATHS[path]) <= {*module.__all__, "__version__"}
    for name in PATHS[path]:
        found = getattr(module, name)
        for home in (exl_core, exl_filters, exl_generate):
            ours = getattr(home, name, found)
            assert ours is found or name == "__version__" or issubclass(found, ours)


def modules_here() -> list[str]:
    """Every public module below exllamav2."""
    found = pkgutil.walk_packages(exllamav2.__path__, "exllamav2.")
    return sorted(m.name for m in found if not m.name.rpartition(".")[2].startswith("_"))


# Names of exllamav2's inner workings, by the module that scripts import them from.
MISSING = [
    ("exllamav2.architecture", "layer_keys_llama_norms"),
    ("exllamav2.compat", "test_gpu_peer_copy"),
    ("exllamav2.conv", "ExLlamaV2Conv"),
    ("exllamav2.conversion.adaptivegptq", "AdaptiveGPTQ"),
    ("exllamav2.conversion.bot_status", "print_stage"),
    ("exllamav2.conversion.compile", "compile_model"),
    ("exllamav2.conversion.convert_exl2", "main"),
    ("exllamav2.conversion.measure", "measure_quant"),
    ("exllamav2.conversion.optimize", "optimize"),
    ("exllamav2.conversion.qparams", "QParams"),
    ("exllamav2.conversion.quantize", "quant"),
    ("exllamav2.conversion.tokenize", "tokenize"),
    ("exllamav2.device", "ExLlamaV2DeviceContext"),
    ("exllamav2.ext", "make_q_matrix"),
    ("exllamav2.mrope", "gen_mrope_embed"),
    ("exllamav2.rope", "get_rope_params_su"),
    ("exllamav2.server.websocket_actions", "dispatch"),
    ("exllamav2.stloader", "STFile"),
    ("exllamav2.tensor_p", "BROADCAST_KV"),
    ("exllamav2.util", "get_basic_progress"),
    ("exllamav2.vlm.mmprojector", "ExLlamaV2MultimodalProjector"),
    ("exllamav2.vlm.processor.pixtral", "preprocess"),
    ("exllamav2.vlm.processor.qwen2", "preprocess"),
    ("exllamav2.vlm.processor.siglip", "preprocess"),
    ("exllamav2.vlm.util", "convert_to_rgb"),
]
# Classes of modules: (module, name, class here).
COUNTERPARTS = [
    ("exllamav2.attn", "ExLlamaV2Attention", modules.Attention),
    ("exllamav2.embedding", "ExLlamaV2Embedding", modules.Embedding),
    ("exllamav2.headnorm", "ExLlamaV2HeadNorm", modules.RMSNorm),
    ("exllamav2.layernorm", "ExLlamaV2LayerNorm", modules.LayerNorm),
    ("exllamav2.linear", "ExLlamaV2Linear", modules.Linear),
    ("exllamav2", "ExLlamaV2Linear", modules.Linear),
    ("exllamav2.mlp", "ExLlamaV2MLP", modules.GatedMLP),
    ("exllamav2.mlp", "ExLlamaV2MLP", modules.PlainMLP),
    ("exllamav2.module", "ExLlamaV2Module", modules.Attention),
    ("exllamav2.module", "ExLlamaV2Module", modules.Linear),
    ("exllamav2.moe_mlp", "ExLlamaV2MoEMLP", modules.MoE),
    ("exllamav2.parallel_decoder", "ExLlamaV2ParallelDecoder", modules.ParallelDecoder),
    ("exllamav2.pos_embedding", "ExLlamaV2PosEmbedding", modules.PositionEmbedding),
    ("exllamav2.rmsnorm", "ExLlamaV2RMSNorm", modules.RMSNorm),
    ("exllamav2.architecture", "ExLlamaV2ArchParams", Architecture),
    ("exllamav2.tensor_p", "TPContext", TensorParallel),
    ("exllamav2.tokenizer.base", "ExLlamaV2TokenizerBase", TokenizerBackend),
    ("exllamav2.tokenizer.base", "ExLlamaV2TokenizerBase", SentencePieceBackend),
    ("exllamav2.tokenizer.hf", "ExLlamaV2TokenizerHF", TokenizerBackend),
    ("exllamav2.tokenizer.spm", "ExLlamaV2TokenizerSPM", SentencePieceBackend),
]


@pytest.mark.full
def test_every_module_can_be_imported_first() -> None:
    """In one process, without the others of exllamav2: no module needs another one to be imported before."""
    command = (
        "import importlib, sys\n"
        f"for path in {[*PATHS, *INNER]}:\n"
        "    for name in [n for n in sys.modules if n.split('.')[0] == 'exllamav2']: del sys.modules[name]\n"
        "    print(importlib.import_module(path).__name__)\n"
    )
    done = run(["-c", command])
    assert done.stdout.split() == [*PATHS, *INNER], done.stderr


def test_no_module_is_left_out_of_these_lists() -> None:
    assert set(modules_here()) | {"exllamav2"} == {*PATHS, *INNER}


def test_a_submodule_is_an_attribute_of_the_package() -> None:
    command = "import exllamav2; print(exllamav2.attn.has_flash_attn, hasattr(exllamav2, 'attention'))"
    done = run(["-c", command])
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.parametrize(("path", "name"), MISSING)
def test_a_name_without_counterpart_says_so_when_it_is_used(path: str, name: str) -> None:
    missing = getattr(importlib.import_module(path), name)
    assert not isinstance(3, missing)
    assert not hasattr(missing, "from_pretrained")
    for use in (lambda: missing(1, key=2), lambda: missing.from_directory("model", "folder")):
        with pytest.raises(UnsupportedError, match=rf"{path}\.{name}.*docs/guides/compat\.md"):
            use()


def test_the_compiled_extension_is_there_until_it_is_used() -> None:
    from exllamav2.ext import exllamav2_ext, ext_c, none_tensor

    assert none_tensor.device.type == "meta"
    assert ext_c is exllamav2_ext
    assert getattr(ext_c, "rms_norm", None) is None
    with pytest.raises(UnsupportedError, match=r"ext_c\.gemm_half_q_half.*docs/guides/compat\.md"):
        ext_c.gemm_half_q_half(none_tensor)


@pytest.mark.parametrize("path", ["exllamav2.util", "exllamav2.ext"])
def test_private_names_are_not_made_up(path: str) -> None:
    assert not hasattr(importlib.import_module(path), "_nothing")


@pytest.mark.parametrize("path", ["exllamav2", "exllamav2.generator", "exllamav2.cache", "exllamav2.tokenizer"])
def test_public_modules_have_no_other_names(path: str) -> None:
    assert not hasattr(importlib.import_module(path), "ExLlamaV2NoSuchClass")


@pytest.mark.parametrize(("path", "name", "here"), COUNTERPARTS)
def test_classes_of_modules_are_recognised_and_not_constructed(path: str, name: str, here: type) -> None:
    found = getattr(importlib.import_module(path), name)
    assert isinstance(object.__new__(here), found)
    assert issubclass(here, found)
    assert not isinstance(3, found)
    with pytest.raises(UnsupportedError, match=rf"{name}.*docs/guides/compat\.md"):
        found("model", "key")


def test_a_subclass_of_a_missing_class_can_be_defined() -> None:
    from exllamav2.mlp import ExLlamaV2MLP

    class Own(ExLlamaV2MLP):
        pass

    assert issubclass(Own, ExLlamaV2MLP)
    with pytest.raises(UnsupportedError, match="ExLlamaV2MLP"):
        Own()


def test_helpers_of_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    from exllamav2.compat import pairwise, safe_move_tensor
    from exllamav2.stloader import cleanup_stfiles
    from exllamav2.util import list_live_tensors

    kept = torch.zeros(3, 1237)
    list_live_tensors()
    assert re.search(r"^\d+ x \[3, 1237\] torch.float32 cpu$", capsys.readouterr().out, re.MULTILINE)
    assert safe_move_tensor((kept, [kept]), "cpu")[1][0] is kept
    assert safe_move_tensor(kept, "meta").device.type == "meta"
    assert list(pairwise([1, 2, 3])) == [(1, 2), (2, 3)]
    cleanup_stfiles()


def test_flags_of_attention() -> None:
    from exllamav2 import attn

    assert (attn.has_flash_attn, attn.has_flash_attn_with_paged, attn.has_xformers) == (True, True, False)
    attn.assert_paged_attn()
    assert (attn.Params, attn.PagedParams) == (exl_core.AttentionParams, exl_core.PagedParams)


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
