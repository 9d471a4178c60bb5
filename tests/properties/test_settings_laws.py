"""Laws of the sampler settings of running jobs: a request keeps a copy, and only exl-compat follows later changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from internals import prelaunch

from exl_generate import ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.sampling import FrozenSettings, SparseBias
from exl_generate.testing import check_pages, drain
from exl_generate.testing.small import TOKENIZER, VOCAB, ids, make
from exllamav2.generator import ExLlamaV2Sampler as CompatSampler

Native, Compat = ExLlamaV2Sampler.Settings, CompatSampler.Settings
NEW = 14
WIDTH = -(-VOCAB // 32) * 32

Change = Callable[[Any], None]


def assign(field: str, value: Any) -> Change:
    return lambda settings: setattr(settings, field, value)


def tilt_in_place(settings: Any) -> None:
    settings.token_bias += torch.linspace(0, 9, WIDTH)


def shift(result: Any) -> None:
    result.sampled_token = (result.sampled_token + 1) % (VOCAB - 1)


#: What a host may do to its object. The bias is a tensor from the start, the hooks are a list.
CHANGES: dict[str, Change] = {
    "temperature": assign("temperature", 2.5),
    "greedy": assign("top_k", 1),
    "min_p": assign("min_p", 0.2),
    "penalty": assign("token_repetition_penalty", 1.6),
    "dry": assign("dry_multiplier", 3.0),
    "bias": tilt_in_place,
    "replaced bias": lambda settings: setattr(settings, "token_bias", torch.linspace(5, 0, WIDTH)),
    "allowed": lambda settings: settings.allow_tokens(TOKENIZER, [5, 6]),
    "hook": lambda settings: settings.post_sampling_hooks.append(shift),
    "breakers": lambda settings: settings.dry_sequence_breakers.add(4),
}

#: At most four changes, each before the job is enqueued (0) or after so many tokens.
plans = st.lists(st.tuples(st.integers(0, NEW - 2), st.sampled_from(sorted(CHANGES))), max_size=4)


def settings_of(kind: Any, style: str) -> Any:
    own = {"token_bias": torch.zeros(WIDTH), "dry_sequence_breakers": {3}}
    if style == "greedy":
        return kind.greedy(**own)
    return kind(temperature=1.2, top_k=0, top_p=0.0, **own)


def job_of(settings: Any, seed: int, **kw: Any) -> ExLlamaV2DynamicJob:
    return ExLlamaV2DynamicJob(ids("the abc"), NEW, gen_settings=settings, seed=seed, **kw)


def tokens_of(job: ExLlamaV2DynamicJob) -> list[int]:
    found: list[int] = job.sequence.ids[job.sequence.prompt_length :].tolist()
    return found


def played(settings: Any, seed: int, plan: list[tuple[int, str]], ahead: bool = False) -> list[int]:
    """The tokens of a job whose settings are changed by `plan` while it runs."""
    job = job_of(settings, seed)
    kept = copy.deepcopy(job.request.settings)
    left = sorted(plan, key=lambda entry: entry[0])
    generator = make()
    prelaunch(generator, ahead)

    def change() -> None:
        while left and left[0][0] <= len(tokens_of(job)):
            CHANGES[left.pop(0)[1]](settings)

    change()
    generator.enqueue(job)
    while generator.num_remaining_jobs():
        change()
        generator.iterate()
    check_pages(generator)
    assert not left
    for field in fields(kept):
        before, after = getattr(kept, field.name), getattr(job.request.settings, field.name)
        assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after, field.name
    return tokens_of(job)


@examples(150, 25)
@given(st.sampled_from(["greedy", "wide"]), st.integers(0, 99), plans, st.booleans())
def test_a_native_job_does_not_see_what_becomes_of_its_settings(
    style: str, seed: int, plan: list[tuple[int, str]], ahead: bool
) -> None:
    assert played(settings_of(Native, style), seed, plan, ahead) == played(settings_of(Native, style), seed, [])


@examples(150, 25)
@given(st.sampled_from(["greedy", "wide"]), st.integers(0, 99), plans, st.booleans())
def test_a_job_of_exl_compat_follows_its_settings_from_token_to_token(
    style: str, seed: int, plan: list[tuple[int, str]], ahead: bool
) -> None:
    """Each token is the one that a new native job would sample after those before it, with the settings as they are
    then.
    """
    found = played(settings_of(Compat, style), seed, plan, ahead)
    settings = settings_of(Compat, style)
    want: list[int] = []
    for at in range(NEW):
        for _, name in sorted((entry for entry in plan if entry[0] == at), key=lambda entry: entry[0]):
            CHANGES[name](settings)
        one, generator = job_of(settings.resolve(), seed, resume_from=want), make()
        generator.enqueue(one)
        while len(tokens_of(one)) <= at:
            generator.iterate()
        want = tokens_of(one)[: at + 1]
    assert found == want


@pytest.mark.parametrize("bias", [torch.zeros(WIDTH), {3: 1.0}, SparseBias.of({3: 1.0}), None], ids=str)
@pytest.mark.parametrize("breakers", [{3, 4}, [3, "a"], [], None])
def test_settings_of_a_request_cannot_be_changed_and_can_be_copied(bias: Any, breakers: Any) -> None:
    breakers = copy.copy(breakers)
    given_ones = Native(top_k=3, token_bias=bias, dry_sequence_breakers=breakers, post_sampling_hooks=[shift])
    kept = job_of(given_ones, 1).request.settings
    if isinstance(breakers, list):
        breakers.append(9)
        assert 9 not in (kept.dry_sequence_breakers or ())
        breakers.remove(9)
    assert isinstance(kept, FrozenSettings)
    assert kept is kept.frozen()
    changes: dict[str, Any] = {"top_k": 4, "token_bias": None, "post_sampling_hooks": [], "unknown": 1}
    for name, value in changes.items():
        with pytest.raises(FrozenInstanceError, match=name):
            setattr(kept, name, value)
    with pytest.raises(FrozenInstanceError, match="top_k"):
        del kept.top_k
    if isinstance(kept.token_bias, torch.Tensor):
        assert kept.token_bias.data_ptr() != bias.data_ptr()
    elif isinstance(bias, dict):
        with pytest.raises(TypeError):
            kept.token_bias[5] = 1.0  # type: ignore[index]
    assert kept.effective().keys() == given_ones.effective().keys()
    for made in (copy.copy(kept), copy.deepcopy(kept), replace(kept, top_k=5)):
        assert type(made) is FrozenSettings
    changed = kept.clone()
    assert type(changed) is Native
    changed.top_k = 9
    changed.post_sampling_hooks.append(shift)
    changed.disallow_tokens(TOKENIZER, [3])
    assert (kept.top_k, list(kept.post_sampling_hooks), replace(kept, top_k=5).top_k) == (3, [shift], 5)
    want = drain_tokens(given_ones)
    assert drain_tokens(kept) == want == drain_tokens(replace(kept))


def drain_tokens(settings: Any) -> list[int]:
    generator, job = make(), job_of(settings, 3)
    generator.enqueue(job)
    drain(generator)
    return tokens_of(job)


@pytest.mark.parametrize("kind", [Native, Compat])
def test_arrays_of_a_request_are_read_only(kind: Any) -> None:
    given_ids = ids("the abc")
    job = ExLlamaV2DynamicJob(given_ids, 4, gen_settings=kind())
    given_ids.fill_(3)
    (prompt,) = job.request.prompts
    assert prompt.ids.tolist() == ids("the abc")[0].tolist()
    with pytest.raises(ValueError, match="read-only"):
        prompt.ids[0] = 1
