"""The chat page in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from exl_serve.api.auth import Authenticator
from exl_serve.api.text import FolderText
from exl_serve.config.model import Auth, ModelConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import until as until_any

CHROME, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
# Each look at the page is a request to the driver, which costs three processes time.
until = partial(until_any, pause=0.1)
# CI says EXL_BROWSER=required where it has installed one: there a missing browser is a failure.
pytestmark = pytest.mark.skipif(
    (CHROME is None or DRIVER is None) and os.environ.get("EXL_BROWSER") != "required",
    reason="needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)",
)


NO_SHORT_ANSWERS = """
const send = window.fetch;
window.fetch = (url, options) => {
  if (!options?.body) return send(url, options);
  const body = JSON.parse(options.body);
  return send(url, { ...options, body: JSON.stringify({ min_tokens: Math.min(16, body.max_tokens ?? 16), ...body }) });
};
"""
"""The model may end an answer with its first token, which shows nothing: requests of the page ask for some tokens."""


@pytest.fixture(scope="module")
def server(fable: EngineThread) -> Iterator[LiveServer]:
    live = LiveServer({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder)])
    yield live
    live.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = Options()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = CHROME or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": NO_SHORT_ANSWERS})
    yield browser
    browser.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, server: LiveServer) -> webdriver.Chrome:
    """The page as a new visitor sees it."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get("about:blank")
    browser.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": server.url, "storageTypes": "all"})
    browser.get(server.url)  # `clearDataForOrigin` leaves the session's storage
    browser.execute_script("sessionStorage.clear()")
    browser.get_log("browser")  # takes the entries of earlier tests out
    browser.get(server.url)
    return browser


def models_are_listed(page: webdriver.Chrome) -> None:
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#model option"))


def note_requests(page: webdriver.Chrome) -> None:
    """Keep the bodies of the page's next requests in `window.sent`."""
    page.execute_script(
        "window.sent = []; const send = window.fetch;"
        "window.fetch = (url, options) => { if (options?.body) window.sent.push(options.body);"
        " return send(url, options); };"
    )


def sent(page: webdriver.Chrome) -> dict[str, Any]:
    """The body of the last request."""
    found: dict[str, Any] = json.loads(page.execute_script("return window.sent.at(-1)"))
    return found


def ask(page: webdriver.Chrome, text: str) -> str:
    page.find_element(By.ID, "input").send_keys(text + "\n")
    until(lambda: not page.find_element(By.ID, "send").is_displayed() or page.find_elements(By.CSS_SELECTOR, ".facts"))
    until(lambda: page.find_element(By.ID, "send").is_displayed())
    return answered(page)


def test_a_chat(page: webdriver.Chrome) -> None:
    models_are_listed(page)
    page.execute_script("document.getElementById('max_tokens').value = '40'")
    first = ask(page, "Tell me a story about a fox.")
    assert len(first) > 20
    assert "tokens/s" in page.find_element(By.CSS_SELECTOR, ".facts").text
    page.find_element(By.XPATH, "//button[text()='Regenerate']").click()
    until(lambda: page.find_element(By.ID, "send").is_displayed())
    assert len(page.find_elements(By.CSS_SELECTOR, "#messages > li")) == 2
    page.refresh()
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, "#messages > li")) == 2)
    page.find_element(By.ID, "clear").click()
    assert not page.find_elements(By.CSS_SELECTOR, "#messages > li")
    bad = [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    assert not bad
    loaded = page.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert loaded
    assert all(name.startswith((page.current_url, "data:")) for name in loaded), "nothing comes from elsewhere"


def test_settings_are_sent_and_kept(page: webdriver.Chrome) -> None:
    models_are_listed(page)
    given = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "top_k": "40", "min_p": "0.05"}
    given |= {"repetition_penalty": "1.1", "max_tokens": "6", "seed": "3"}
    page.find_element(By.ID, "panel-toggle").click()
    for name, value in given.items():
        field = page.find_element(By.ID, name)
        field.clear()
        field.send_keys(value + "\t")
    note_requests(page)
    first = ask(page, "Tell me a story.")
    body = sent(page)
    assert body["messages"][0] == {"role": "system", "content": given.pop("system")}
    assert {name: body[name] for name in given} == {name: float(value) for name, value in given.items()}
    page.refresh()
    models_are_listed(page)
    assert page.find_element(By.ID, "system").get_attribute("value") == "Be brief."
    page.find_element(By.ID, "clear").click()
    assert ask(page, "Tell me a story.") == first, "the seed and the settings are those of before"


@pytest.fixture
def slow(scripted: EngineThread, page: webdriver.Chrome, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineThread]:
    """The page of a model whose answers take some seconds: none ends by itself before its last token."""
    iterate = scripted.generator.iterate_columns

    def late() -> Any:
        time.sleep(0.03)
        return iterate()

    monkeypatch.setattr(scripted.generator, "iterate_columns", late)
    live = LiveServer({"scripted": scripted}, [ModelConfig(id="scripted", path=scripted.card.folder, engine="free")])
    page.get(live.url)
    models_are_listed(page)
    go_on(page)
    yield scripted
    page.get("about:blank")
    live.close()


def go_on(page: webdriver.Chrome) -> None:
    """Let the answers to the page's next requests end with their last token, and not by chance before it."""
    page.execute_script(
        "const send = window.fetch; window.fetch = (url, options) => send(url, options?.body ?"
        " { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true }) } : options);"
    )


def answered(page: webdriver.Chrome) -> str:
    """The text of the last answer, read by one script: the page may replace its elements between two requests."""
    script = "return [...document.querySelectorAll('li.assistant .body')].at(-1)?.innerText ?? ''"
    return str(page.execute_script(script))


def test_stop_ends_the_answer_here_and_in_the_engine(page: webdriver.Chrome, slow: EngineThread) -> None:
    page.find_element(By.ID, "input").send_keys("Go on for ever.\n")
    until(lambda: answered(page))
    page.find_element(By.ID, "stop").click()
    until(lambda: page.find_element(By.ID, "send").is_displayed())
    until(lambda: not slow.generator.num_remaining_jobs())
    assert answered(page), "what has come stays"
    assert not page.find_element(By.ID, "error").is_displayed()


def saved(page: webdriver.Chrome) -> list[dict[str, Any]]:
    """The messages that the browser keeps of the newest conversation."""
    chats = json.loads(page.execute_script("return localStorage.getItem('exl-chat')"))["chats"]
    found: list[dict[str, Any]] = chats[-1]["messages"]
    return found


def test_an_answer_leaves_the_conversation_of_another_tab(page: webdriver.Chrome, slow: EngineThread) -> None:
    """Both begin with the same conversation. The second one shows its own again after the first one's answer."""
    page.find_element(By.ID, "input").send_keys("Go on for ever.\n")
    until(lambda: answered(page))
    first, url = page.current_window_handle, page.current_url
    page.switch_to.new_window("tab")
    try:
        page.get(url)
        models_are_listed(page)
        go_on(page)
        page.execute_script("document.getElementById('max_tokens').value = '4'")
        page.find_element(By.ID, "clear").click()
        assert ask(page, "A newer one.")
        second = page.current_window_handle
        page.switch_to.window(first)
        page.find_element(By.ID, "stop").click()
        until(lambda: page.find_element(By.ID, "send").is_displayed())
        assert saved(page)[0]["content"] == "Go on for ever."
        page.switch_to.window(second)
        page.refresh()
        until(lambda: page.find_elements(By.CSS_SELECTOR, "li.user .body"))
        assert page.find_element(By.CSS_SELECTOR, "li.user .body").text == "A newer one."
        page.close()
    finally:
        page.switch_to.window(first)


def test_the_rest_by_another_model_names_both_and_a_lost_one_may_be_continued(page: webdriver.Chrome) -> None:
    half = {"role": "assistant", "content": "Once", "model": "other", "cut": True}
    chat = [{"role": "user", "content": "Tell me a story."}, half]
    page.execute_script("localStorage.setItem('exl-chat', JSON.stringify({messages: arguments[0]}))", chat)
    page.refresh()
    models_are_listed(page)
    page.execute_script(
        "const send = window.fetch;"
        "window.fetch = (url, options) => options?.body ? Promise.reject(new TypeError()) : send(url, options);"
    )
    page.find_element(By.XPATH, "//button[text()='Continue']").click()
    error = page.find_element(By.ID, "error")
    until(error.is_displayed)
    assert error.text == "The connection to the server was lost. Press Continue to try again."
    assert page.find_element(By.CSS_SELECTOR, "li.assistant .who").text == "other, fable"


def test_a_reload_in_the_middle_keeps_what_has_come(page: webdriver.Chrome, slow: EngineThread) -> None:
    """The engine ends the answer; the page goes on with it when asked to."""
    page.find_element(By.ID, "input").send_keys("Go on for ever.\n")
    until(lambda: answered(page))
    page.refresh()
    until(lambda: not slow.generator.num_remaining_jobs())
    question, half = saved(page)
    assert question["content"] == "Go on for ever."
    assert half["content"]
    models_are_listed(page)
    assert answered(page)
    page.execute_script("document.getElementById('max_tokens').value = '20'")
    note_requests(page)
    page.find_element(By.XPATH, "//button[text()='Continue']").click()
    until(lambda: page.find_elements(By.CSS_SELECTOR, ".facts"))
    body = sent(page)
    assert body["continue_final_message"] is True
    assert body["messages"][-1] == {"role": "assistant", "content": half["content"]}
    until(lambda: page.find_element(By.ID, "send").is_displayed())
    whole = saved(page)
    assert len(whole) == 2
    assert whole[1]["content"].startswith(half["content"])
    assert len(whole[1]["content"]) > len(half["content"])
    assert not page.find_elements(By.XPATH, "//button[text()='Continue']")


def test_a_reload_before_the_first_token_keeps_the_question(page: webdriver.Chrome) -> None:
    models_are_listed(page)
    page.execute_script(
        "document.getElementById('max_tokens').value = '8'; const send = window.fetch;"
        "window.fetch = (url, options) => options?.body ? new Promise(() => {}) : send(url, options);"
    )
    page.find_element(By.ID, "input").send_keys("Tell me a story.\n")
    until(lambda: page.find_element(By.ID, "stop").is_displayed())
    page.refresh()
    models_are_listed(page)
    assert len(page.find_elements(By.CSS_SELECTOR, "#messages > li")) == 1
    page.execute_script("document.getElementById('max_tokens').value = '8'")
    page.find_element(By.XPATH, "//button[text()='Send again']").click()
    until(lambda: page.find_elements(By.CSS_SELECTOR, ".facts"))
    assert saved(page)[0]["content"] == "Tell me a story."
    assert answered(page)


def test_an_engine_that_fails_in_the_middle(
    page: webdriver.Chrome, slow: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says so, keeps what has come, and asks again."""
    page.execute_script("document.getElementById('max_tokens').value = '60'")
    iterate, steps = slow.generator.iterate_columns, iter(range(1000))
    with monkeypatch.context() as patch:

        def failing() -> Any:
            if next(steps) > 20:
                raise RuntimeError("a device error, say")
            return iterate()

        patch.setattr(slow.generator, "iterate_columns", failing)
        page.find_element(By.ID, "input").send_keys("Go on.\n")
        error = page.find_element(By.ID, "error")
        until(error.is_displayed)
        assert "engine_error" in error.text
        half = answered(page)
        assert half
    page.find_element(By.XPATH, "//button[text()='Regenerate']").click()
    until(lambda: page.find_elements(By.CSS_SELECTOR, ".facts"))
    assert not error.is_displayed()
    assert len(answered(page)) > len(half)


def test_a_key_is_asked_for_and_kept_for_the_session(
    page: webdriver.Chrome, fable: EngineThread, tmp_path: Path
) -> None:
    key = "exl-" + "k" * 43
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text(f'[[key]]\nname = "ann"\nkey = "{key}"\n')
    auth = Authenticator(Auth(key_file=str(file)))
    live = LiveServer({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder)], None, auth)
    try:
        page.get(live.url)
        field = page.find_element(By.ID, "key")
        until(field.is_displayed)
        assert "key" in page.find_element(By.ID, "error").text
        field.send_keys(key + "\t")
        models_are_listed(page)
        page.execute_script("document.getElementById('max_tokens').value = '8'")
        assert ask(page, "Tell me a story.")
        page.refresh()
        models_are_listed(page)
        assert page.execute_script("return JSON.stringify(localStorage).includes(arguments[0])", key) is False
    finally:
        page.get("about:blank")
        live.close()


CONTRAST = """
const light = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).map((one) => {
  const part = one / 255;
  return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
}).reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
const back = getComputedStyle(document.body).backgroundColor;
const texts = "body, header button, #send, .user .body, .assistant .body, #error";
return [...document.querySelectorAll(texts)].map((one) => {
  const style = getComputedStyle(one);
  const own = /, 0\\)$/.test(style.backgroundColor) ? back : style.backgroundColor;
  const [dim, bright] = [light(style.color), light(own)].sort((a, b) => a - b);
  return [one.id || one.className || one.tagName, (bright + 0.05) / (dim + 0.05)];
});
"""
"""The contrast of texts and what they stand on, as WCAG 2 defines it."""


@pytest.mark.parametrize(("scheme", "back"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 22, 26)")])
def test_light_and_dark_can_be_read(page: webdriver.Chrome, scheme: str, back: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        page.execute_script("document.getElementById('max_tokens').value = '8'")
        models_are_listed(page)
        ask(page, "Tell me a story.")
        assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == back
        found = page.execute_script(CONTRAST)
        assert len(found) >= 6
        assert all(ratio >= 4.5 for _, ratio in found), found
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.fixture(scope="module")
def eye(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A model that takes images."""
    pytest.importorskip("transformers")
    pytest.importorskip("PIL.Image")
    from vision_models import QWEN_TEXT, write_model, write_tokenizer

    folder = tmp_path_factory.mktemp("vision") / "model"
    folder.mkdir()
    text = {**QWEN_TEXT, "vocab_size": 288, "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": 260}
    write_model("Qwen2VL", folder, text_config=text)
    write_tokenizer(folder)
    config = ModelConfig(id="eye", path=str(folder), device="cpu", max_batch_size=4)
    thread = EngineThread(config)
    live = LiveServer({"eye": thread}, [config])
    yield live
    live.close()
    thread.close()


PASTE = """
const bytes = Uint8Array.from(atob(arguments[1]), (one) => one.charCodeAt(0));
const transfer = new DataTransfer();
transfer.items.add(new File([bytes], 'seen.png', { type: 'image/png' }));
const event = arguments[0] === 'paste'
  ? new ClipboardEvent('paste', { clipboardData: transfer, bubbles: true, cancelable: true })
  : new DragEvent('drop', { dataTransfer: transfer, bubbles: true, cancelable: true });
document.getElementById('input').dispatchEvent(event);
return event.defaultPrevented;
"""


def test_images_by_file_paste_and_drop(page: webdriver.Chrome, eye: LiveServer, tmp_path: Path) -> None:
    import base64

    from PIL import Image

    file = tmp_path / "seen.png"
    Image.new("RGB", (64, 48), (200, 40, 40)).save(file)
    data = base64.b64encode(file.read_bytes()).decode()
    page.get(eye.url)
    until(lambda: page.find_element(By.ID, "attach").is_displayed())
    page.execute_script("document.getElementById('max_tokens').value = '6'")
    note_requests(page)
    shown = "#attached img"
    page.find_element(By.ID, "files").send_keys(str(file))
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, shown)) == 1)
    for kind in ("paste", "drop"):
        assert page.execute_script(PASTE, kind, data)
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, shown)) == 3)
    page.find_element(By.XPATH, "//button[text()='Remove']").click()
    assert len(page.find_elements(By.CSS_SELECTOR, shown)) == 2
    ask(page, "What is in the pictures?")
    *images, text = sent(page)["messages"][0]["content"]
    assert images == [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}] * 2
    assert text == {"type": "text", "text": "What is in the pictures?"}
    assert not page.find_elements(By.CSS_SELECTOR, shown)
    wide = "return [...document.querySelectorAll('li.user img')].map((one) => one.naturalWidth)"
    until(lambda: page.execute_script(wide) == [64, 64])
    page.refresh()
    until(lambda: page.execute_script(wide) == [64, 64])
    page.find_element(By.XPATH, "//button[text()='Edit']").click()
    assert len(page.find_elements(By.CSS_SELECTOR, shown)) == 2
    page.find_element(By.ID, "clear").click()
    assert not page.find_elements(By.CSS_SELECTOR, shown)


SIZES = """
const done = arguments[0];
const images = [...document.querySelectorAll('#attached img')];
Promise.all(images.map((one) => one.decode()))
  .then(() => done(images.map((one) => [one.src.slice(0, 15), one.src.length, one.naturalWidth, one.naturalHeight])));
"""


def one_more(page: webdriver.Chrome, before: int) -> bool:
    """Whether another image is attached."""
    return len(page.find_elements(By.CSS_SELECTOR, "#attached img")) == before + 1


def test_large_images_are_scaled_down(page: webdriver.Chrome, eye: LiveServer, tmp_path: Path) -> None:
    import base64
    import random

    from PIL import Image

    noise = Image.frombytes("RGB", (2048, 1024), random.Random(1).randbytes(2048 * 1024 * 3))
    noise.save(tmp_path / "photo.jpg", quality=95)
    noise.save(tmp_path / "drawing.png")
    noise.crop((0, 0, 1536, 10)).save(tmp_path / "wide.png")
    Image.new("1", (20, 4000)).save(tmp_path / "narrow.bmp")
    names = ("photo.jpg", "drawing.png", "wide.png", "narrow.bmp")
    page.get(eye.url)
    until(lambda: page.find_element(By.ID, "attach").is_displayed())
    for name in names:
        before = len(page.find_elements(By.CSS_SELECTOR, "#attached img"))
        page.find_element(By.ID, "files").send_keys(str(tmp_path / name))
        until(partial(one_more, page, before))
    found = page.execute_async_script(SIZES)
    assert [one[0] for one in found] == ["data:image/jpeg", "data:image/png;", "data:image/png;", "data:image/png;"]
    assert [one[2:] for one in found] == [[1536, 768], [1536, 768], [1536, 10], [8, 1536]]
    urls = [len(base64.b64encode((tmp_path / name).read_bytes())) for name in names]
    assert found[0][1] < urls[0]
    assert found[1][1] < urls[1]
    assert found[2][1] == urls[2] + len("data:image/png;base64,"), "the file as it was"
    page.find_element(By.ID, "clear").click()


def test_a_message_waits_for_its_images(page: webdriver.Chrome, eye: LiveServer, tmp_path: Path) -> None:
    from PIL import Image

    file = tmp_path / "small.png"
    Image.new("RGB", (8, 8), "red").save(file)
    page.get(eye.url)
    models_are_listed(page)
    until(lambda: page.find_element(By.ID, "attach").is_displayed())
    page.execute_script(
        "const decode = window.createImageBitmap; let open;"
        "const opened = new Promise((done) => { open = done; }); window.openImages = open;"
        "window.createImageBitmap = async (file) => { await opened; return decode(file); };"
    )
    note_requests(page)
    page.find_element(By.ID, "files").send_keys(str(file))
    page.find_element(By.ID, "input").send_keys("What is it?\n")
    assert page.execute_script("return window.sent.length") == 0
    page.execute_script("window.openImages()")
    until(lambda: page.execute_script("return window.sent.length"))
    assert [part["type"] for part in sent(page)["messages"][-1]["content"]] == ["image_url", "text"]


def test_a_model_that_is_loaded_later_takes_images(page: webdriver.Chrome, eye: LiveServer) -> None:
    assert eye.state is not None
    (handle,) = eye.state.models.list()
    shown = "return document.querySelector('#model option')?.textContent"
    handle.state = "loading"  # type: ignore[misc]
    try:
        page.get(eye.url)
        until(lambda: page.execute_script(shown) == "eye (loading)")
        assert not page.find_element(By.ID, "attach").is_displayed()
        page.execute_script(  # one look meets a server that restarts
            "const send = window.fetch; window.fetch = (url, options) => { window.fetch = send;"
            " window.failed = true; return Promise.resolve(new Response('', { status: 503 })); };"
        )
        until(lambda: page.execute_script("return window.failed"))
    finally:
        handle.state = "ready"  # type: ignore[misc]
    until(lambda: page.find_element(By.ID, "attach").is_displayed())
    assert page.execute_script(shown) == "eye"


def test_a_model_that_a_request_has_loaded_takes_images(page: webdriver.Chrome, eye: LiveServer) -> None:
    assert eye.state is not None
    (handle,) = eye.state.models.list()
    handle.state = "unloaded"  # type: ignore[misc]
    try:
        page.get(eye.url)
        models_are_listed(page)
        page.execute_script("document.getElementById('max_tokens').value = '2'")
        assert not page.find_element(By.ID, "attach").is_displayed()
    finally:
        handle.state = "ready"  # type: ignore[misc]
    ask(page, "Hm?")
    until(lambda: page.find_element(By.ID, "attach").is_displayed())


def test_a_model_without_eyes_gets_no_images(page: webdriver.Chrome) -> None:
    models_are_listed(page)
    assert not page.find_element(By.ID, "attach").is_displayed()
    assert page.execute_script(PASTE, "drop", "")
    error = page.find_element(By.ID, "error")
    until(error.is_displayed)
    assert "takes no images" in error.text
    assert not page.find_elements(By.CSS_SELECTOR, "#attached img")


@pytest.mark.parametrize("width", [360, pytest.param(1280, marks=pytest.mark.full)])
def test_everything_fits(page: webdriver.Chrome, width: int) -> None:
    size = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.execute_script("document.getElementById('max_tokens').value = '60'")
    ask(page, "Tell me a story.")
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    assert page.execute_script("return document.documentElement.scrollHeight") <= 740
    assert page.find_element(By.ID, "send").rect["y"] < 740


XSS = [
    '<img src=x onerror="window.__pwned=1">',
    "<script>window.__pwned=1</script>",
    "[x](javascript:window.__pwned=1)",
    "**<svg/onload=window.__pwned=1>**",
    "```\n</code></pre><script>window.__pwned=1</script>\n```",
    "`<iframe srcdoc='<script>parent.__pwned=1</script>'>`",
    '- <a href="javascript:window.__pwned=1" autofocus onfocus=window.__pwned=1>x</a>',
    '# <math><mi//xlink:href="data:x,<script>window.__pwned=1</script>">',
]


def test_markup_written_by_a_model_stays_text(page: webdriver.Chrome) -> None:
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#model option"))
    saved = [{"role": "assistant", "content": text, "reasoning": text, "model": text} for text in XSS]
    page.execute_script("localStorage.setItem('exl-chat', JSON.stringify({messages: arguments[0]}))", saved)
    page.refresh()
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, "#messages > li")) == len(XSS))
    time.sleep(0.3)
    assert page.execute_script("return window.__pwned === undefined")
    assert page.execute_script(
        "return document.querySelectorAll('#messages :is(img, script, svg, iframe, a, math)').length === 0"
    )


@pytest.fixture(scope="module")
def forgetful(fable: EngineThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose chat template takes the last message alone, so that a long chat fits the bundled model."""
    whole = FolderText(fable.card.folder).template or ""
    template = tmp_path_factory.mktemp("template") / "last.jinja"
    template.write_text("{% set messages = messages[-1:] %}" + whole)
    live = LiveServer({"fable": fable}, [ModelConfig(id="fable", path=fable.card.folder, template=str(template))])
    yield live
    live.close()


def test_a_long_chat_costs_a_token_no_more(page: webdriver.Chrome, forgetful: LiveServer) -> None:
    """While an answer streams into a chat of 200 messages, the page changes the last message alone."""
    page.get(forgetful.url)
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#model option"))
    saved = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"Message **{i}**."} for i in range(200)]
    page.execute_script("localStorage.setItem('exl-chat', JSON.stringify({messages: arguments[0]}))", saved)
    page.refresh()
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, "#messages > li")) == 200)
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#model option"))
    page.execute_script(
        "const list = document.getElementById('messages');"
        "window.seen = {list: 0, last: 0, others: 0};"
        "new MutationObserver((records) => { for (const { target } of records) {"
        "  const own = target === list ? 'list' : list.lastElementChild.contains(target) ? 'last' : 'others';"
        "  if (list.contains(target)) window.seen[own] += 1;"
        "} }).observe(list, { childList: true, subtree: true, characterData: true });"
    )
    ask(page, "Tell me a story about a fox.")
    assert len(page.find_elements(By.CSS_SELECTOR, "#messages > li")) == 202
    seen = page.execute_script("return window.seen")
    assert seen["last"] > 0
    assert seen["others"] == 0
    assert seen["list"] <= 2, "the list is written at the begin and at the end of an answer"


def test_an_error_is_shown_in_words(page: webdriver.Chrome) -> None:
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#model option"))
    page.execute_script("document.getElementById('max_tokens').value = '99999'")
    page.find_element(By.ID, "input").send_keys("x\n")
    error = page.find_element(By.ID, "error")
    until(error.is_displayed)
    assert "context" in error.text
    assert not page.find_elements(By.CSS_SELECTOR, "li.assistant")
