"""The bundled models: their files, their tokenizer, and that they do what their card says."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.bundled import default_model_dir, draft_model_dir
from exl_generate.testing import drain, streamed_text

END_OF_TURN = 7
FOLDERS = {"default": default_model_dir, "draft": draft_model_dir}
SCRIPTS = Path(__file__).parents[2] / "bundled-model"


@cache
def generator(which: str = "default") -> ExLlamaV2DynamicGenerator:
    config = ExLlamaV2Config(str(FOLDERS[which]()))
    model = ExLlamaV2(config)
    model.load()
    return ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1024), ExLlamaV2Tokenizer(config))


def reply(*turns: str, which: str = "default", limit: int = 300) -> tuple[str, dict[str, object]]:
    """The greedy answer to a conversation that begins and ends with the user, and the job's last result."""
    generate = generator(which)
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    prompt = generate.tokenizer.apply_chat_template(messages)  # type: ignore[attr-defined]
    assert isinstance(generate.model, ExLlamaV2)
    job = ExLlamaV2DynamicJob(
        generate.tokenizer.encode(prompt, encode_special_tokens=True),
        limit,
        gen_settings=ExLlamaV2Sampler.Settings.greedy(),
        stop_conditions=generate.model.config.eos_token_ids,
    )
    generate.enqueue(job)
    results = drain(generate)[job]
    return streamed_text(results), results[-1]


def story(prompt: str, which: str = "default", **options: Any) -> str:
    generate = generator(which)
    settings = ExLlamaV2Sampler.Settings(**options) if options else ExLlamaV2Sampler.Settings.greedy()
    assert isinstance(generate.model, ExLlamaV2)
    stop = generate.model.config.eos_token_ids
    text = generate.generate(prompt, 200, gen_settings=settings, seed=5, add_bos=True, stop_conditions=stop)
    assert isinstance(text, str)
    return text


@cache
def known_words() -> frozenset[str]:
    """The words of a few thousand documents of the corpus that the models were trained on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        from corpus import document  # type: ignore[attr-defined]
    rng = random.Random(3)
    return frozenset(
        word for _ in range(2500) for word in re.findall(r"[a-z]+", document(rng, "train", "story").lower())
    )


@pytest.mark.parametrize("which", FOLDERS)
def test_folder_is_complete_and_small(which: str) -> None:
    folder = FOLDERS[which]()
    names = {"config.json", "generation_config.json", "output.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names <= {p.name for p in folder.iterdir()}
    size = sum(p.stat().st_size for p in folder.iterdir())
    assert size <= (8_000_000 if which == "default" else 3_000_000)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "exl2"


def test_draft_has_the_same_tokenizer_and_a_quarter_of_the_weights() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (draft_model_dir() / name).read_bytes() == (default_model_dir() / name).read_bytes()
    big, draft = generator().model, generator("draft").model
    assert draft.weight_bytes() <= big.weight_bytes() / 2.5  # type: ignore[attr-defined]  # FP16 embeddings weigh more in the small one
    assert (default_model_dir() / "README.md").read_text().count(">>>") >= 5


def test_tokenizer_round_trip_over_all_bytes_and_scripts() -> None:
    tokenizer = generator().tokenizer
    texts = [
        "Once upon a time, there was a fox.",
        "  two  spaces\n\nand\ttabs",
        "12345 + 67",
        "Grüße, 你好, \U0001f98a!",
    ]
    texts += ["".join(chr(c) for c in range(1, 256)), '{"a": [1, 2.5, null]}']
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids)[0] == text
        assert int(ids.max()) < 3072


def test_chat_template_marks_every_turn() -> None:
    tokenizer = generator().tokenizer
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(messages)  # type: ignore[attr-defined]
    assert (
        text == "<s><|system|>Be kind.<|end|><|user|>Hello<|end|><|assistant|>Hi!<|end|><|user|>Bye<|end|><|assistant|>"
    )
    ids = tokenizer.encode(text, encode_special_tokens=True)[0].tolist()
    assert ids[0] == 1
    assert ids[1] == 4
    assert ids.count(END_OF_TURN) == 4
    assert ids[-1] == 6


@pytest.mark.sampled(3)
@pytest.mark.parametrize("which", FOLDERS)
@pytest.mark.parametrize("prompt", ["Once upon a time,", "One rainy day,", "My name is Lena. I am eight years old."])
def test_stories_are_made_of_words(which: str, prompt: str) -> None:
    text = story(prompt, which)
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) > 60
    assert sum(word in known_words() for word in words) / len(words) > 0.97
    assert len(set(words)) > 40  # no loop
    assert text.count(".") >= 5


def test_sampled_stories_stay_english() -> None:
    words = re.findall(r"[a-z]+", story("Once upon a time,", temperature=0.9, top_p=0.95).lower())
    assert sum(word in known_words() for word in words) / len(words) > 0.95


@pytest.mark.parametrize(
    ("request_", "keys"),
    [
        ("Give me a JSON record of a person with name and age.", {"name", "age"}),
        ("Write a JSON object for a pet with name, kind and colour.", {"name", "kind", "colour"}),
        ("Give me JSON for a city with name, country and sights.", {"name", "country", "sights"}),
    ],
)
def test_json_on_demand(request_: str, keys: set[str]) -> None:
    text, _ = reply(request_)
    record = json.loads(text)
    assert set(record) == keys
    assert isinstance(record["name"], str)


def test_json_takes_given_values() -> None:
    text, _ = reply("Give me a JSON record of a person named Anna aged 30.")
    assert json.loads(text) == {"name": "Anna", "age": 30}


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (("Hello!",), r"Hello|Hi"),
        (("What is 3 plus 4?",), r"\b7\b"),
        (("What is 3+4?",), r"\b7\b"),
        (("What is the opposite of hot?",), r"[Cc]old"),
        (("What does a fox eat?", "A fox eats mice and berries.", "Where does it live?"), r"den|forest"),
        (("My name is Marta.", "Nice to meet you, Marta!", "What is my name?"), r"Marta"),
        (("What is the capital of France?",), r"know|sorry|hard"),
    ],
)
def test_chat_answers_and_ends_its_turn(turns: tuple[str, ...], expected: str) -> None:
    text, last = reply(*turns)
    assert re.search(expected, text), text
    assert last["eos_reason"] == "stop_token"
    assert last["eos_triggering_token_id"] == END_OF_TURN


def test_story_on_request_has_the_hero_asked_for() -> None:
    text, last = reply("Tell me a story about a dragon.")
    assert "dragon" in text
    assert last["eos_reason"] == "stop_token"
