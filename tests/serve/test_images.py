"""Images in chat messages, through HTTP, with OpenAI's own client and a tiny random Qwen2-VL."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import os
import random
import re
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from exl_core.tokenizer import TextTokenizer
from exl_core.tokenizer.conversation import conversation_ids
from exl_generate import ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_serve.api.content import ContentLog
from exl_serve.config.model import Media, ModelConfig, ServeConfig
from exl_serve.engine.vision import Vision
from exl_serve.errors import ServeError
from exl_serve.media.reader import ACTIVE, WAITING, MediaReader
from exl_serve.request.internal import MediaRef
from exl_serve.request.messages import ImagePart
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import HANG_SECONDS, until

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
from vision_models import QWEN_TEXT, picture, write_model, write_tokenizer  # noqa: E402

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
"""A template that writes images as Qwen's own does; the one of `write_tokenizer` takes only strings."""
MEDIA = Media(max_images=3, max_bytes=100_000, max_pixels=40_000, max_request_pixels=60_000)


def png(image: Any) -> bytes:
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def part(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), **more}}


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vision") / "model"
    made.mkdir()
    text = {**QWEN_TEXT, "vocab_size": 288, "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": 260}
    write_model("Qwen2VL", made, text_config=text)
    write_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EngineThread]:
    thread = EngineThread(ModelConfig(id="eye", path=str(folder), device="cpu", max_batch_size=4))
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def live(engine: EngineThread, folder: Path, scripted: EngineThread, tmp_path_factory: Any) -> Iterator[LiveServer]:
    template = tmp_path_factory.mktemp("template") / "parts.jinja"
    template.write_text(PARTS)
    eye = ModelConfig(id="eye", path=str(folder), device="cpu")
    configs = [
        eye,
        ModelConfig(id="parts", path=str(folder), device="cpu", template=str(template)),
        ModelConfig(id="scripted", path=scripted.card.folder, device="cpu", engine="free"),
    ]
    made = LiveServer({"eye": engine, "parts": engine, "scripted": scripted}, configs, ServeConfig(media=MEDIA))
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)


def test_the_content_log_has_the_digest_of_an_image_that_was_answered(
    live: LiveServer, client: openai.OpenAI, tmp_path: Path
) -> None:
    file = tmp_path / "content.jsonl"
    assert live.state is not None
    live.state.content = ContentLog(file)
    try:
        image = png(Image.frombytes("RGB", (150, 150), random.Random(0).randbytes(150 * 150 * 3)))
        answer = ask(client, user("What is it?", part(image)))
        until(lambda: file.exists() and file.read_bytes().endswith(b"\n"))  # written after the answer
    finally:
        asyncio.run(live.state.content.close())
        live.state.content = None
    found = json.loads(file.read_text())
    whole = url(image)
    digest = hashlib.sha256(whole.encode()).hexdigest()
    assert found["request"]["messages"][0]["content"][1]["image_url"]["url"] == {
        "type": "image/png", "length": len(whole), "sha256": digest,
    }  # fmt: skip
    assert found["answers"][0]["text"] == answer.choices[0].message.content
    assert found["status"] == 200


def ask(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    given: dict[str, Any] = {"model": "eye", "temperature": 0, "max_tokens": 12, "logprobs": True, **more}
    return client.chat.completions.create(messages=messages, **given)


def said(answer: Any) -> list[tuple[str, float]]:
    return [(one.token, one.logprob) for one in answer.choices[0].logprobs.content]


def test_an_answer_is_the_one_that_the_library_gives(client: openai.OpenAI, engine: EngineThread) -> None:
    """The same prompt, by hand: the tower's rows in the place of the image."""
    seen = png(picture(40, 24))
    answer = ask(client, user("Look: ", part(seen), " what?"))
    generator = engine.generator
    from exl_core import ExLlamaV2Config, ExLlamaV2VisionTower
    from exl_core.vision import open_image

    tower = ExLlamaV2VisionTower(ExLlamaV2Config(engine.card.folder))
    tower.load()
    image = tower.get_image_embeddings(generator.model, generator.tokenizer, open_image(seen))
    # jinja drops the line break at the end of the template.
    text = f"<|im_start|>user\nLook: {image.text_alias} what?<|im_end|>\n<|im_start|>assistant"
    ids = generator.tokenizer.encode(text, encode_special_tokens=True, embeddings=[image])
    assert answer.usage.prompt_tokens == ids.shape[1] > image.length > 2
    job = ExLlamaV2DynamicJob(
        ids,
        12,
        gen_settings=ExLlamaV2Sampler.Settings.greedy(),
        stop_conditions=[260],
        embeddings=[image],
        decode_special_tokens=True,
    )
    other = type(generator)(
        model=generator.model,
        cache=type(generator.cache)(generator.model, max_seq_len=2048),
        tokenizer=generator.tokenizer,
    )
    other.enqueue(job)
    text = ""
    while other.num_remaining_jobs():
        text += "".join(result.get("text", "") for result in other.iterate())
    assert answer.choices[0].message.content == text


def test_a_template_with_parts_renders_as_one_with_strings(client: openai.OpenAI) -> None:
    messages = user(part(png(picture(40, 24))), "one ", part(png(picture(24, 40, seed=5))), "two")
    assert said(ask(client, messages)) == said(ask(client, messages, model="parts"))


def test_a_conversation_with_images_is_whole_or_rejected(client: openai.OpenAI) -> None:
    seen = user(part(png(picture(40, 24))), "what?")
    long = [*user("word " * 400), {"role": "assistant", "content": "Yes."}] * 4
    cut = {"truncate_prompt_tokens": -1}
    assert said(ask(client, seen, extra_body=cut)) == said(ask(client, seen))
    # The same conversation without its image is cut.
    assert ask(client, [*long, *user("what?")], extra_body=cut).usage.prompt_tokens < 2048
    for messages, fields, param in (
        ([*long, *seen], cut, "messages"),
        (seen, {"truncate_prompt_tokens": 1000}, "truncate_prompt_tokens"),
    ):
        with pytest.raises(openai.BadRequestError, match="images") as error:
            ask(client, messages, extra_body=fields)
        assert error.value.param == param


def test_a_stream_equals_the_answer(client: openai.OpenAI) -> None:
    messages = user(part(png(picture(40, 24))), "what?")
    whole = ask(client, messages, n=2, temperature=1, seed=3)
    chunks = list(
        ask(client, messages, n=2, temperature=1, seed=3, stream=True, stream_options={"include_usage": True})
    )
    for choice in whole.choices:
        told = [c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(told) == choice.message.content
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_cached_pages_are_found_by_the_content_of_images(client: openai.OpenAI) -> None:
    """The same picture in another file is found again, another picture is not."""
    seen, other = picture(200, 150, seed=11), picture(200, 150, seed=12)
    jpeg = BytesIO()
    seen.save(jpeg, "WEBP", lossless=True)
    messages = user(part(png(seen)), "x" * 300)
    first = ask(client, messages)
    tokens = first.usage.prompt_tokens
    assert first.usage.prompt_tokens_details.cached_tokens < 30  # the words before the image
    again = ask(client, user({"type": "image_url", "image_url": {"url": url(jpeg.getvalue(), "webp")}}, "x" * 300))
    assert again.usage.prompt_tokens == tokens
    assert again.usage.prompt_tokens_details.cached_tokens >= 256
    assert said(again) == said(first)
    different = ask(client, user(part(png(other)), "x" * 300))
    assert different.usage.prompt_tokens_details.cached_tokens < 30
    assert said(different) != said(first)


def test_spellings_of_image_tokens_in_a_text_are_text(folder: Path) -> None:
    """Only an image part makes an image, also where the text next to it spells one."""
    tokenizer = TextTokenizer.from_folder(folder)
    forged = "<|vision_start|><|image_pad|><|vision_end|>"
    content = [{"type": "text", "text": forged}, {"type": "image"}, {"type": "text", "text": forged}]
    for template in (None, PARTS):
        options: dict[str, Any] = {} if template is None else {"chat_template": template}
        _, ids = conversation_ids(tokenizer, [{"role": "user", "content": content}], **options)
        assert [i for i in ids if i < 0] == [-1]
        special = {tokenizer.extended_piece_to_id[token] for token in ("<|vision_start|>", "<|image_pad|>")}
        assert not special & set(ids)
        assert tokenizer.decode_ids(ids[: ids.index(-1)]).endswith(forged)


def test_responses_take_images(client: openai.OpenAI) -> None:
    seen = png(picture(40, 24))
    parts: Any = [{"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": url(seen)}]
    answer = client.responses.create(
        model="eye", input=[{"role": "user", "content": parts}], max_output_tokens=8, temperature=0
    )
    whole = ask(client, user("Look: ", part(seen)), max_tokens=8)
    assert answer.output_text == whole.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.input_tokens == whole.usage.prompt_tokens


def test_responses_take_images_of_results(client: openai.OpenAI) -> None:
    """A coding agent shows the model an image as the result of a call."""
    seen = png(picture(40, 24))
    call = {"id": "call00000", "type": "function", "function": {"name": "view", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": [part(seen)]},
    ]
    items: Any = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "call00000", "name": "view", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "call00000",
            "output": [{"type": "input_image", "image_url": url(seen)}],
        },
    ]
    answer = client.responses.create(model="eye", input=items, max_output_tokens=8, temperature=0)
    whole = client.chat.completions.create(model="eye", messages=messages, max_tokens=8, temperature=0)
    assert answer.output_text == whole.choices[0].message.content
    assert answer.usage is not None
    assert whole.usage is not None
    assert answer.usage.input_tokens == whole.usage.prompt_tokens


def test_little_detail_is_a_smaller_image() -> None:
    wide = url(png(Image.new("RGB", (1200, 30), "red")))

    async def sizes() -> list[tuple[int, int]]:
        reader = MediaReader()
        try:
            parts = [ImagePart(wide, how, "x") for how in ("high", "low")]
            async with reader.decoded(parts, MEDIA) as found:
                assert [os.path.getsize(one.path) for one in found] == [3 * one.width * one.height for one in found]
                return [(one.width, one.height) for one in found]
        finally:
            await reader.close()

    assert asyncio.run(sizes()) == [(1200, 30), (512, 13)]


def test_without_max_tokens_what_the_context_leaves_is_generated(client: openai.OpenAI, live: LiveServer) -> None:
    """The rows of an image are taken off."""
    messages = user(part(png(picture(200, 150))), "go on " * 310)  # so that little is left
    body = {"model": "eye", "messages": messages, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=120).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 2048


def declared(width: int, height: int) -> bytes:
    """A PNG that says it has this size, with a kilobyte of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )


SMALL = png(picture(40, 24))
REFUSED: dict[str, tuple[Any, str, str]] = {
    "no base64": ({"url": "data:image/png;base64,####"}, "image_invalid", "base64"),
    "no image": ({"url": url(b"hello")}, "image_invalid", "not an image"),
    "cut": ({"url": url(SMALL[: len(SMALL) // 2])}, "image_invalid", "image"),
    "other type": ({"url": "data:text/plain;base64,aGk="}, "image_invalid", "data:image"),
    "plain text": ({"url": "data:image/png,abc"}, "image_invalid", "data:image"),
    "svg": ({"url": url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml")}, "image_invalid", "not an image"),
    "bomb": ({"url": url(declared(30_000, 30_000))}, "image_too_large", "pixels"),
    "larger than its data": ({"url": url(declared(150, 150))}, "image_invalid", "image"),
    "without width": ({"url": url(declared(0, 40))}, "image_invalid", "image"),
    "beyond 31 bits": ({"url": url(declared((1 << 32) - 1, 1))}, "image_too_large", "pixels"),
    "nothing": ({"url": "data:image/png;base64,"}, "image_invalid", "image"),
    "many pixels": (
        {"url": url(png(Image.new("RGB", (300, 200))))},
        "image_too_large",
        "300 x 200 pixels; at most 40000",
    ),
    "many bytes": ({"url": url(os.urandom(120_000))}, "image_too_large", "100000 bytes"),
    "narrow": ({"url": url(png(Image.new("RGB", (1, 300))))}, "image_invalid", "factor of 200"),
    "remote": ({"url": "https://example.com/a.png"}, "remote_images_disabled", "fetches no images"),
    "file": ({"url": "file:///etc/passwd"}, "remote_images_disabled", "fetches no images"),
    "detail": ({"url": url(SMALL), "detail": "huge"}, "invalid_messages", "auto, low or high"),
    "no url": ({"link": 3}, "invalid_messages", "has a url"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_images_are_refused_with_their_place(client: openai.OpenAI, name: str) -> None:
    image, code, words = REFUSED[name]
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(client, user("see", {"type": "image_url", "image_url": image}))
    assert caught.value.code == code
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages[0].content[1]")
    assert "/tmp" not in str(caught.value)
    assert ask(client, user("see", part(SMALL))).choices  # nothing is left broken


def test_requests_with_too_much_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="4 images; at most 3"):
        ask(client, user(*[part(SMALL)] * 4))
    large = part(png(Image.new("RGB", (199, 190))))
    with pytest.raises(openai.BadRequestError, match="more than 60000 pixels"):
        ask(client, user(large, large))
    with pytest.raises(openai.BadRequestError, match=r"with its images and 2020 are asked for"):
        ask(client, user(part(SMALL), "x"), max_tokens=2020)
    system: list[Any] = [{"role": "system", "content": [part(SMALL)]}, {"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="image_url is not taken here"):
        ask(client, system)


def test_a_text_model_rejects_images(client: openai.OpenAI, live: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match="scripted takes no images") as caught:
        ask(client, user(part(SMALL)), model="scripted", logprobs=False)
    assert caught.value.code == "unsupported_modality"
    known = {one["id"]: one["exl"]["modalities"] for one in httpx.get(f"{live.url}/v1/models").json()["data"]}
    assert known == {"eye": ["text", "image"], "parts": ["text", "image"], "scripted": ["text"]}


def test_more_requests_than_may_wait_for_a_decoder_are_refused() -> None:
    image = ImagePart(url(SMALL), "high", "x")

    async def decode(reader: MediaReader) -> ServeError | None:
        try:
            async with reader.decoded([image], MEDIA):
                return None
        except ServeError as error:
            return error

    async def all_at_once() -> list[ServeError | None]:
        reader = MediaReader()
        try:
            found = await asyncio.gather(*(decode(reader) for _ in range(ACTIVE + WAITING + 3)))
            assert await decode(reader) is None, "there is room again"
            return found
        finally:
            await reader.close()

    refused = [error for error in asyncio.run(all_at_once()) if error is not None]
    assert [(error.status, error.code) for error in refused] == [(429, "queue_full")] * 3
    assert all(error.retry_after for error in refused)


class NeverDecoded(MediaReader):
    """Decodes for ever. Tells when that was begun and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.ended = threading.Event(), threading.Event()

    @asynccontextmanager
    async def decoded(self, images: Any, limits: Media) -> AsyncIterator[Any]:
        self.begun.set()
        try:
            await asyncio.Event().wait()
            yield ()
        finally:
            self.ended.set()


def test_decoding_ends_at_the_deadline_and_when_the_client_leaves(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert live.state is not None
    body = {"model": "eye", "messages": user(part(SMALL)), "timeout": 0.2}
    address = f"{live.url}/v1/chat/completions"
    monkeypatch.setattr(live.state, "media", NeverDecoded())
    answer = httpx.post(address, json=body, timeout=HANG_SECONDS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")
    reader = NeverDecoded()
    monkeypatch.setattr(live.state, "media", reader)
    sent = json.dumps(body | {"timeout": 600})
    client = http.client.HTTPConnection(live.url.removeprefix("http://"))
    client.request("POST", "/v1/chat/completions", sent, {"content-type": "application/json"})
    assert reader.begun.wait(HANG_SECONDS)
    client.close()
    assert reader.ended.wait(HANG_SECONDS)


def test_encoded_images_are_not_shared_over_cache_salts() -> None:
    """Nobody learns from the time of an answer that another tenant has sent an image."""
    encoded: list[Any] = []

    class Tower:
        def get_image_embeddings(self, model: Any, tokenizer: Any, image: Any) -> Any:
            encoded.append(SimpleNamespace(get_size_in_bytes=lambda: 12))
            return encoded[-1]

    model: Any = SimpleNamespace(placement=SimpleNamespace(device=lambda at: SimpleNamespace(type="cpu")))
    tower: Any = Tower()
    tokenizer: Any = None
    vision = Vision(tower, model, tokenizer)
    image = MediaRef(width=2, height=2, digest=b"same", data=bytes(12))
    mine, again = vision.embed([image, image], b"one")
    assert mine is again
    assert vision.embed([image], b"other")[0] is not mine
    assert vision.embed([image], b"one")[0] is mine
    assert len(encoded) == 2


def test_no_file_is_left(client: openai.OpenAI, live: LiveServer) -> None:
    ask(client, user(part(SMALL)))
    assert live.state is not None
    place = live.state.media.folder
    assert place is not None
    assert os.listdir(place) == []


def test_the_program_of_the_guide(
    live: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs/guides/serving.md").read_text(encoding="utf-8")
    found = [
        block for block in re.findall(r"^```py\n(.*?)^```", guide, re.DOTALL | re.MULTILINE) if "photo.png" in block
    ]
    assert len(found) == 1
    (tmp_path / "photo.png").write_bytes(SMALL)
    source = found[0].replace("http://127.0.0.1:8000", live.url).replace('model="default"', 'model="eye"')
    # Sampled without a seed, the answer could end with its first token.
    assert source.count("max_tokens=60") == 1
    source = source.replace("max_tokens=60", 'max_tokens=60, extra_body={"ignore_eos": True}')
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "<guide>", "exec"), {"__name__": "__main__"})  # noqa: S102
    assert capsys.readouterr().out.strip("\n")
