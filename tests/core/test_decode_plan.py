"""The decode plan's order of launches on the CPU, with doubles for the two operators that only a GPU has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from joined_on_cpu import FusedDouble, GroupDouble, joined_on_cpu
from random_models import loaded_on, write_random_model

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Lora, PagedParams
from exl_core.convert import quantize_model
from exl_core.errors import InputError
from exl_core.execution import select
from exl_core.execution.build_step import Chunk, build_step
from exl_core.execution.eager import logits_of
from exl_core.execution.environment import joined_rows
from exl_core.execution.fused import JoinedLaunches, joined_launches_of
from exl_core.execution.half import why_apart
from exl_core.layers import Attention, FeedForward, Head, MoE, PositionEmbedding
from exl_core.lora.rows import RowAdapters
from exl_kernels.safetensors_file import write_safetensors
from exl_kernels.selection import BLOCK_ROWS, FEW_ROWS, LIMITS, PACKED_ROWS

FOLDER = Path(__file__).parent.parent / "golden" / "data" / "pylib-4m-exl2-4.5"
PAGE = 16
CPU = torch.device("cpu")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    joined_on_cpu(monkeypatch)
    loaded = ExLlamaV2(ExLlamaV2Config(FOLDER))
    loaded.load()
    return loaded


@pytest.mark.sampled(4)
@pytest.mark.parametrize("joined", ["0", "8", "64"])
@pytest.mark.parametrize(("batch", "q_len"), [(1, 1), (2, 1), (1, 3), (2, 4), (3, 5)])
def test_the_plan_is_the_modules_own_pass(
    model: ExLlamaV2, joined: str, batch: int, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXL_DECODE_JOINED_ROWS", joined)
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    generator = torch.Generator().manual_seed(batch)
    table = torch.arange(batch * 4, dtype=torch.int32).flip(0).view(batch, 4)
    ids = torch.randint(0, model.config.vocab_size, (batch, 20 + q_len), generator=generator)
    out = []
    for planned in (False, True):
        cache = ExLlamaV2Cache(model, max_seq_len=PAGE * 4 * batch)
        params = PagedParams(batch, table, torch.zeros(batch, dtype=torch.int32), 0, PAGE, 20)
        model.forward_chunk(ids[:, :20], cache, attn_params=params, preprocess_only=True)
        params = PagedParams(batch, table, torch.full((batch,), 20, dtype=torch.int32), 20, PAGE, q_len)
        if planned:
            step = build_step(model, Chunk(cache, params, batch, q_len), CPU)
            logits = torch.empty(batch * q_len, model.config.padded_vocab_size)
            FusedDouble.calls = 0
            plan.run(ids[:, 20:].reshape(-1), step, logits)
            layers = sum(isinstance(module, Attention) for module in model.modules)
            rows = batch * q_len
            joins = 4 if rows <= int(joined) else 2 if rows > FEW_ROWS else 0
            head = LIMITS.gemv_rows < rows <= min(int(joined), FEW_ROWS)
            assert FusedDouble.calls == joins * layers + head
        else:
            logits = model.forward_chunk(ids[:, 20:], cache, attn_params=params)["logits"].flatten(0, 1)
        out.append((logits, cache.all_tensors()))
    (want, want_cache), (got, got_cache) = out
    assert torch.equal(want, got)
    for a, b in zip(want_cache, got_cache, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "q_len"), [(13, 5), (129, 1), (3, 50)])
def test_more_rows_than_a_kernel_takes_run_in_blocks(model: ExLlamaV2, batch: int, q_len: int) -> None:
    """The doubles take at most 128 rows, too. Logits and cache are those of the modules' own pass."""
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    assert plan.refusal_of_rows(batch * q_len) is None
    table = torch.arange(batch * 4, dtype=torch.int32).flip(0).view(batch, 4)
    ids = torch.randint(0, model.config.vocab_size, (batch, q_len), generator=torch.Generator().manual_seed(batch))
    params = PagedParams(batch, table, torch.zeros(batch, dtype=torch.int32), 0, PAGE, q_len)
    one, other = (ExLlamaV2Cache(model, max_seq_len=PAGE * 4 * batch) for _ in range(2))
    want = model.forward_chunk(ids, one, attn_params=params)["logits"].flatten(0, 1)
    step = build_step(model, Chunk(other, params, batch, q_len), CPU, invariant=True)
    logits = torch.empty_like(want)
    FusedDouble.calls = 0
    plan.run(ids.flatten(), step, logits)
    layers = sum(isinstance(module, Attention) for module in model.modules)
    blocks = -(-batch * q_len // BLOCK_ROWS)
    assert FusedDouble.calls == blocks * 4 * layers  # the head alone cuts blocks itself
    assert torch.equal(logits, want)
    for a, b in zip(one.all_tensors(), other.all_tensors(), strict=True):
        assert torch.equal(a, b)


def test_blocks_need_joined_launches_of_every_half(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL_DECODE_JOINED_ROWS", "8")
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    assert plan.refusal_of_rows(64) is None
    assert plan.refusal_of_rows(65) == "EXL_DECODE_JOINED_ROWS allows joined matmuls of at most 8 rows"
    monkeypatch.delenv("EXL_DECODE_JOINED_ROWS")
    model.modules[1].forward = model.modules[1].forward  # type: ignore[method-assign]
    changed = joined_launches_of(model)
    assert isinstance(changed, JoinedLaunches), changed
    why = changed.refusal_of_rows(65)
    assert why == f"{model.modules[1].key} has code that its description does not know"


def test_a_table_of_positions_does_not_keep_rows_from_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are no half of a layer, and their rows depend on nothing else; a replaced pass may."""
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 96, "n_embd": 128, "n_head": 4}
    config = {**gpt2, "n_layer": 2, "n_positions": 256, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    quantize_model(write_random_model(tmp_path / "float", config), tmp_path / "exl2", bits=4.0)
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    gpt = ExLlamaV2(ExLlamaV2Config(tmp_path / "exl2"))
    gpt.load()
    joined_on_cpu(monkeypatch)
    plan = joined_launches_of(gpt)
    assert isinstance(plan, JoinedLaunches), plan
    assert plan.refusal_of_rows(128) is None
    positions = gpt.modules[1]
    assert isinstance(positions, PositionEmbedding)
    positions.forward = positions.forward  # type: ignore[method-assign]
    changed = joined_launches_of(gpt)
    assert isinstance(changed, JoinedLaunches), changed
    assert changed.refusal_of_rows(128) == f"{positions.key} has code that its description does not know"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("batch", "q_len"), [(1, 1), (5, 1), (2, 4), (1, 20), (2, 40)])
@pytest.mark.parametrize("odd", ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj"])
def test_one_half_that_cannot_be_joined_leaves_the_others_joined(
    model: ExLlamaV2, odd: str, batch: int, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, prompts and stored keys; only the matmuls of that half are launched apart."""
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    joined = assert_same(model, plan, batch, q_len)
    monkeypatch.setattr(FusedDouble, "apart", odd)
    assert plan.refusal_of_rows(100) is None, "its matmuls can run in blocks, too"
    assert joined - assert_same(model, plan, batch, q_len) == 2


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("lengths", [[3], [40], [20, 1, 50], [60, 64, 30]])
def test_a_planned_prompt_is_the_modules_own_pass(model: ExLlamaV2, lengths: list[int], invariant: bool) -> None:
    """Prompts of one sequence or several: what is stored, and the logits of all tokens or of each sequence's last."""
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    batch, total = len(lengths), sum(lengths)
    table = torch.arange(batch * 4, dtype=torch.int32).flip(0).view(batch, 4)
    ids = torch.randint(0, model.config.vocab_size, (1, total), generator=torch.Generator().manual_seed(total))
    caches = [ExLlamaV2Cache(model, max_seq_len=PAGE * 4 * batch) for _ in range(6)]
    none = torch.zeros(batch, dtype=torch.int32)
    params = PagedParams(batch, table, none, 0, PAGE, q_lens=torch.tensor(lengths, dtype=torch.int32))
    model.forward_chunk(ids, caches[0], attn_params=params, preprocess_only=True)
    want = model.forward_chunk(ids, caches[1], attn_params=params)["logits"].flatten(0, 1)
    for cache in caches[2:]:
        step = build_step(model, Chunk(cache, params, 1, total), CPU, invariant=invariant)
        if cache is caches[2]:
            plan.store(ids[0], step)
        elif cache is caches[3]:
            assert torch.equal(
                plan.head(plan.hidden(ids[0], step, "last"), step), want[torch.tensor(lengths).cumsum(0) - 1]
            )
        elif cache is caches[4]:
            assert torch.equal(logits_of(model, plan.states(ids[0], step), invariant=invariant), want)
        else:
            assert torch.equal(plan.head(plan.hidden(ids[0], step), step), want)
    for tensors in zip(*(cache.all_tensors() for cache in caches), strict=True):
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:])


def test_a_planned_prompt_that_fails_has_stored_nothing(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next try begins where this one did, and so do callers that ask the cache how far it is."""
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    monkeypatch.setattr(select, "may_fuse", lambda model: True)
    monkeypatch.setattr(model.decode, "refusal", lambda model, step: None)
    monkeypatch.setattr(model.decode, "joined_launches", lambda model: plan)
    ids = torch.randint(0, model.config.vocab_size, (1, 30), generator=torch.Generator().manual_seed(1))
    want = model.forward(ids, ExLlamaV2Cache(model, max_seq_len=64))
    cache = ExLlamaV2Cache(model, max_seq_len=64)
    model.forward(ids[:, :10], cache, preprocess_only=True)

    def full(*args: Any) -> None:
        raise MemoryError("no room")

    ways: dict[str, dict[str, Any]] = {"store": {"preprocess_only": True}, "hidden": {}}
    for name, how in ways.items():
        with monkeypatch.context() as patch:
            patch.setattr(JoinedLaunches, name, full)
            with pytest.raises(MemoryError):
                model.forward(ids[:, 10:], cache, **how)
        assert cache.current_seq_len == 10
    assert torch.equal(model.forward(ids[:, 10:], cache), want[:, 10:])
    assert cache.current_seq_len == 30
    for wrong in ("", "last", 2):
        with pytest.raises(InputError, match="return_last_state"):
            model.forward(ids, None, return_last_state=wrong)  # type: ignore[arg-type]


SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LAYERS = ["full_attention", "sliding_attention", "full_attention"]
# Family: what it needs beyond SIZES, and modules of a layer that run as their own forward pass (attention, MLP).
FAMILIES: dict[str, tuple[dict[str, Any], tuple[bool, ...]]] = {
    "Qwen2ForCausalLM": ({}, (False, False)),
    "Qwen3ForCausalLM": ({}, (False, False)),
    "Olmo2ForCausalLM": ({}, (False, False)),
    "Glm4ForCausalLM": ({}, (False, False)),
    "Starcoder2ForCausalLM": ({}, (False, False)),
    "GPT2LMHeadModel": ({"n_inner": 96, "num_key_value_heads": 4}, (False, False)),
    "MixtralForCausalLM": (MOE, (False, True)),
    "Qwen3MoeForCausalLM": (MOE, (False, True)),
    "DbrxForCausalLM": (
        {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}, "attn_config": {"clip_qkv": 0.5}},
        (False, True),
    ),
    "ArceeForCausalLM": ({}, (False, False)),
    "Exaone4ForCausalLM": ({"sliding_window": 8, "layer_types": LAYERS}, (False, False)),
    "GraniteForCausalLM": (
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0},
        (False, False),
    ),
    "GPTBigCodeForCausalLM": ({"n_inner": 96, "multi_query": True, "num_key_value_heads": 1}, (False, False)),
    "MiniCPMForCausalLM": ({"dim_model_base": 64, "scale_emb": 2.0, "scale_depth": 1.4}, (False, False)),
    "Olmo3ForCausalLM": ({"sliding_window": 8, "layer_types": LAYERS}, (False, False)),
    "OrionForCausalLM": ({}, (False, False)),
    "Phi3ForCausalLM": ({}, (False, False)),
    "PhiMoEForCausalLM": (MOE, (False, True)),
    "Qwen2MoeForCausalLM": ({**MOE, "shared_expert_intermediate_size": 32}, (False, True)),
    "SmolLM3ForCausalLM": ({"no_rope_layers": [1, 0, 1]}, (False, False)),
    "Gemma2ForCausalLM": ({"sliding_window": 16, "query_pre_attn_scalar": 16}, (False, False)),
    "Gemma3ForCausalLM": ({"sliding_window": 16, "query_pre_attn_scalar": 16}, (False, False)),
    "CohereForCausalLM": ({"logit_scale": 1.0, "use_qk_norm": True}, (False,)),
    "Cohere2ForCausalLM": ({"logit_scale": 1.0, "sliding_window": 16}, (False,)),
    "PhiForCausalLM": ({"num_key_value_heads": 4}, (False,)),
    "StableLmForCausalLM": ({}, (False, False)),
}


NORMS_THAT_PACK = {
    *("Glm4ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    *("Starcoder2ForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "DbrxForCausalLM"),
    *("OrionForCausalLM", "PhiMoEForCausalLM", "StableLmForCausalLM"),
}
"""Layouts in which the launch of a norm of results, or of a LayerNorm, packs the input of the next matmul."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("joined", ["0", "64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_description_is_run_as_the_modules_run_it(
    family: str, joined: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, prompts and stored keys are bitwise identical, each half as it should be."""
    apart = FAMILIES[family][1]
    model, plan = planned_on_cpu(family, joined, tmp_path, monkeypatch)
    halves = [m for m in model.modules[1:-2] if isinstance(m, Attention | FeedForward)]
    assert tuple(why_apart(half) is not None for half in halves) == apart * 3
    FusedDouble.packed = 0
    for batch, q_len in ((1, 1), (3, 1), (5, 1), (2, 4), (1, 20), (2, 40)):
        assert_same(model, plan, batch, q_len)
    assert (FusedDouble.packed > 0) == (joined == "64" and family in NORMS_THAT_PACK)


def assert_same(model: ExLlamaV2, plan: JoinedLaunches, batch: int, q_len: int) -> int:
    """Compare the plan's results of a pass after 20 tokens with the modules'. Returns the joined matmuls of `run`."""
    table = torch.arange(batch * 4, dtype=torch.int32).flip(0).view(batch, 4)
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(0, model.config.vocab_size, (batch, 20 + q_len), generator=generator)
    caches = [ExLlamaV2Cache(model, max_seq_len=PAGE * 4 * batch) for _ in range(4)]
    begin = PagedParams(batch, table, torch.zeros(batch, dtype=torch.int32), 0, PAGE, 20)
    params = PagedParams(batch, table, torch.full((batch,), 20, dtype=torch.int32), 20, PAGE, q_len)
    flat = ids[:, 20:].reshape(-1)
    for cache in caches:
        model.forward_chunk(ids[:, :20], cache, attn_params=begin, preprocess_only=True)
    want = model.forward_chunk(ids[:, 20:], caches[0], attn_params=params)["logits"]
    steps = [
        build_step(model, Chunk(cache, params, batch, q_len), CPU, invariant=cache is caches[1]) for cache in caches[1:]
    ]
    logits = torch.empty(batch * q_len, model.config.padded_vocab_size)
    before = FusedDouble.calls
    plan.run(flat, steps[0], logits)
    calls = FusedDouble.calls - before
    assert torch.equal(logits, want.flatten(0, 1))
    last = plan.head(plan.hidden(flat, steps[1], "last"), steps[1])
    assert torch.equal(last, want[:, -1])
    plan.store(flat, steps[2])
    for tensors in zip(*(cache.all_tensors() for cache in caches), strict=True):
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:])
    return calls


def adapters_of_all_matrices(model: ExLlamaV2, folder: Path, count: int) -> list[ExLlamaV2Lora]:
    """Adapters of every matrix of every layer but experts and heads; each leaves out one kind of matrix in turn."""
    found = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        linears = [one for m in model.modules if not isinstance(m, Head | MoE) for one in m.submodules()]
        for place, linear in enumerate(linears):
            if number and place % 4 == number:
                continue
            for part, shape in (("A", (3, linear.in_features)), ("B", (linear.out_features, 3))):
                name = f"base_model.model.{linear.key}.lora_{part}.weight"
                tensors[name] = (torch.randn(shape, generator=generator) * 0.2).half()
        path = folder / str(number)
        path.mkdir(parents=True)
        write_safetensors(path / "adapter_model.safetensors", tensors)
        (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3, "lora_alpha": 6}')
        found.append(ExLlamaV2Lora.from_directory(model, path))
    return found


def planned_on_cpu(
    family: str, joined: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ExLlamaV2, JoinedLaunches]:
    """A random model on the CPU and its joined launches; `joined`: the most rows of joined matmuls."""
    joined_on_cpu(monkeypatch)
    monkeypatch.setenv("EXL_DECODE_JOINED_ROWS", joined)
    config = {**SIZES, "architectures": [family], **FAMILIES[family][0]}
    model = loaded_on("cpu", write_random_model(tmp_path / family, config), monkeypatch)
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches), plan
    return model, plan


# The default run has one of the two ways for each layout.
@pytest.mark.parametrize(
    ("family", "joined"),
    [
        # The other layouts of the default run's families differ where no adapter applies.
        pytest.param(family, joined, marks=[pytest.mark.full] if (place + way) % 4 else [])
        for place, family in enumerate(FAMILIES)
        for way, joined in enumerate(("0", "64"))
    ],
)
def test_a_step_with_adapters_is_the_modules_own_pass(
    family: str, joined: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with one adapter, with two in both orders, and with none, of every layout."""
    model, plan = planned_on_cpu(family, joined, tmp_path, monkeypatch)
    a, b = adapters_of_all_matrices(model, tmp_path / "adapters", 2)
    one, two = [(a,), (b,)], [(a,), (b, a), (a, b)]
    for sets, numbers, q_len in (
        *((one, [0], 1), (one, [1, -1], 1), (two, [0], 1), (two, [-1], 1)),
        *((two, [1, -1, 2, 0, 0], 1), (two, [2, -1], 4)),
    ):
        batch = len(numbers)
        table = torch.arange(batch * 2, dtype=torch.int32).view(batch, 2)
        ids = torch.randint(0, 96, (batch, 20 + q_len), generator=torch.Generator().manual_seed(batch))
        begin = PagedParams(batch, table, torch.zeros(batch, dtype=torch.int32), 0, PAGE, 20)
        params = PagedParams(batch, table, torch.full((batch,), 20, dtype=torch.int32), 20, PAGE, q_len)
        caches = [ExLlamaV2Cache(model, max_seq_len=PAGE * 2 * batch) for _ in range(2)]
        slots = torch.tensor(numbers, dtype=torch.int32).repeat_interleave(q_len)
        rows = RowAdapters(sets, slots, q_len)
        steps = []
        for cache in caches:
            model.forward_chunk(ids[:, :20], cache, attn_params=begin, preprocess_only=True)
            steps.append(build_step(model, Chunk(cache, params, batch, q_len, adapters=(rows,)), CPU))
        x = flat = ids[:, 20:].reshape(-1)
        with torch.inference_mode():
            for module in model.modules:
                x = module.forward(x, steps[0])
            logits = torch.empty_like(x)
            GroupDouble.calls = GroupDouble.multiplied = 0
            GroupDouble.levels = 1 if sets is one else 2
            plan.run(flat, steps[1], logits)
        assert torch.equal(logits, x)
        assert (GroupDouble.calls > 0) == (joined != "0")
        assert (GroupDouble.multiplied > 0) == (joined != "0" and sets is one), "of at most two rows"
        for tensor, other in zip(*(cache.all_tensors() for cache in caches), strict=True):
            assert torch.equal(tensor, other)


def test_why_there_is_no_plan(model: ExLlamaV2) -> None:
    del model.modules[1:-2]
    assert joined_launches_of(model) == "the model has no attention"
    assert "is not the attention or the MLP" in str(why_apart(model.modules[0]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", [0, 1, 2, -2, -1])
@pytest.mark.parametrize("way", ["method", "class"])
def test_modules_with_code_of_their_own_run_it(model: ExLlamaV2, place: int, way: str) -> None:
    """A replaced method, or a subclass that says nothing of itself, is run and not what it was made from."""
    module = model.modules[place]
    called: list[None] = []
    inner = type(module).forward

    def forward(self: Any, *args: Any, **more: Any) -> torch.Tensor:
        called.append(None)
        return inner(self, *args, **more)

    if way == "method":
        module.forward = partial(forward, module)  # type: ignore[method-assign]
    else:
        module.__class__ = type("Own", (type(module),), {"forward": forward})
    plan = joined_launches_of(model)
    if place in (0, -1):
        assert module.key in str(plan)
        return
    assert isinstance(plan, JoinedLaunches)
    for batch, q_len in ((3, 1), (1, 40)):
        called.clear()
        assert_same(model, plan, batch, q_len)
        # The prompt but for the last norm, the modules' pass, then `run` and `hidden`; and `store` before the end.
        assert len(called) >= (3 if place == -2 else 4 + 2 + (place == 1))


@pytest.mark.parametrize("describes", [True, False])
def test_an_mlp_with_code_of_its_own_keeps_its_whole_layer_from_joining(
    describes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and MLP side by side are one module, whose description holds only if the MLP's does."""
    model, _ = planned_on_cpu("CohereForCausalLM", "64", tmp_path, monkeypatch)
    layer: Any = model.modules[2]
    called: list[None] = []

    def inner(self: Any, *args: Any, **named: Any) -> torch.Tensor:
        called.append(None)
        return kind.inner(self, *args, **named)

    kind = type(layer.mlp)
    own: dict[str, Any] = {"inner": inner} if describes else {"inner": inner, "describe": FeedForward.describe}
    layer.mlp.__class__ = type("Own", (kind,), own)
    plan = joined_launches_of(model)
    assert isinstance(plan, JoinedLaunches)
    assert "has code that its description does not know" in str(why_apart(layer))
    assert_same(model, plan, 3, 1)
    assert len(called) == 4 + 4, "the prompts and the passes of the four caches"


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXL_DECODE_JOINED_ROWS", raising=False)
    assert joined_rows() == PACKED_ROWS
    for text, rows in (("0", 0), ("5", 5), ("99", 64)):
        monkeypatch.setenv("EXL_DECODE_JOINED_ROWS", text)
        assert joined_rows() == rows
    monkeypatch.setenv("EXL_DECODE_JOINED_ROWS", "few")
    with pytest.raises(InputError, match="EXL_DECODE_JOINED_ROWS"):
        joined_rows()


def test_a_step_is_prepared_on_a_gpu_only() -> None:
    """On the CPU, where nothing is queued, there is nothing to prepare; nor for a model that is unloaded again."""
    model = ExLlamaV2(ExLlamaV2Config(FOLDER))
    params = PagedParams(1, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0, PAGE, 1)
    model.load()
    cache = ExLlamaV2Cache(model, max_seq_len=PAGE)
    assert model.prelaunchable_step(1, cache, params) is None
    model.unload()
    assert model.prelaunchable_step(1, cache, params) is None
