"""Every program in examples/ runs, and says what it is there to show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import preloaded
import pytest

from exl_generate.bundled import default_model_dir

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str, stdin: str = "") -> str:
    done = preloaded.run([str(EXAMPLES / name), *arguments], stdin=stdin, folder=EXAMPLES)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_has_a_test() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(re.findall(r'run\("(\w+\.py)"', here))


@pytest.mark.covers("generators: example-programs")
def test_workflow() -> None:
    out = run("workflow.py")
    assert "Once upon a time, a small fox" in out
    assert "One day, an old bear" in out


@pytest.mark.full  # tests/generate/test_cli_terminal.py runs it on a terminal
def test_streaming_chat() -> None:
    out = run("streaming_chat.py", stdin="Tell me a story about a fox.\nThank you!\n")
    assert "fox" in out
    assert len(out.strip().splitlines()) >= 2


@pytest.mark.full
@pytest.mark.covers("generators: async")
def test_async_server() -> None:
    lines = run("async_server.py").splitlines()
    assert len(lines) == 24
    assert any(line.startswith("client hung up") for line in lines)
    assert any(line.startswith(("max_new_tokens", "stop_token")) for line in lines)


@pytest.mark.full
def test_json_by_schema() -> None:
    found = json.loads(run("json_by_schema.py"))
    assert set(found) == {"name", "age", "likes"}


@pytest.mark.full
@pytest.mark.covers("generators: adapters-per-job")
def test_lora_per_job() -> None:
    lines = run("lora_per_job.py").splitlines()
    assert [line.split(":")[0] for line in lines] == ["no adapter", "a quarter of it", "all of it"]
    assert len({line.split(":")[1] for line in lines}) == 3


@pytest.mark.full
@pytest.mark.covers("core: multimodal-other")
def test_image_question(tmp_path: Path) -> None:
    """On a random Qwen2-VL: its answers mean nothing, but the second question finds the image in the cache."""
    pytest.importorskip("transformers")
    from vision_models import QWEN_TEXT, picture, write_model, write_tokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    text = {**QWEN_TEXT, "vocab_size": 288, "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": 260}
    write_model("Qwen2VL", folder, text_config=text)
    write_tokenizer(folder)
    picture(120, 70).save(tmp_path / "photo.png")
    out = run("image_question.py", str(folder), str(tmp_path / "photo.png"), "What is it?", "What colour has it?")
    lines = out.splitlines()
    tokens, positions = (int(n) for n in re.findall(r"pixels are (\d+) tokens at (\d+) positions", lines[0])[0])
    assert lines[0].startswith("120 x 70 ")
    assert tokens > positions > 2
    cached = [int(n) for n in re.findall(r"\((\d+) of \d+ prompt tokens were in the cache\)", out)]
    assert len(cached) == 2
    assert cached[0] == 0
    assert cached[1] >= tokens


def test_kernels_alone() -> None:
    out = run("kernels_alone.py", str(default_model_dir() / "output.safetensors"), "model.layers.0.mlp.down_proj")
    difference = float(out.rsplit(" ", 1)[-1])
    assert difference < 1e-3
    assert "exl_core" not in (EXAMPLES / "kernels_alone.py").read_text(encoding="utf-8").split('"""', 2)[2]


@pytest.mark.full
def test_perplexity(tmp_path: Path) -> None:
    """A text of the model's own surprises it little, one of random words a lot."""
    told = run("workflow.py").split("\n\n")[0]
    values = []
    for name, text in (("own", told), ("random", "wander kettle of who the ever, blue ran to sun")):
        (tmp_path / name).write_text(text)
        out = run("perplexity.py", str(default_model_dir()), str(tmp_path / name), "32")
        values.append(float(out.rsplit(" ", 1)[-1]))
    assert 1 <= values[0] < 10 < values[1]


@pytest.mark.full
@pytest.mark.covers("filters: other-engines")
def test_filters_in_transformers() -> None:
    assert run("filters_in_transformers.py").strip() in ("yes", "no", "perhaps")
