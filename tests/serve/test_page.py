"""The chat page in a real browser."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from exl_serve.api.text import FolderText
from exl_serve.config.model import ModelConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import until

CHROME, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
# CI says EXL_BROWSER=required where it has installed one: there a missing browser is a failure.
pytestmark = pytest.mark.skipif(
    (CHROME is None or DRIVER is None) and os.environ.get("EXL_BROWSER") != "required",
    reason="needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)",
)


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
    yield browser
    browser.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, server: LiveServer) -> webdriver.Chrome:
    """The page as a new visitor sees it."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get("about:blank")
    browser.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": server.url, "storageTypes": "all"})
    browser.get_log("browser")  # takes the entries of earlier tests out
    browser.get(server.url)
    return browser


def ask(page: webdriver.Chrome, text: str) -> str:
    page.find_element(By.ID, "input").send_keys(text + "\n")
    until(lambda: not page.find_element(By.ID, "send").is_displayed() or page.find_elements(By.CSS_SELECTOR, ".facts"))
    until(lambda: page.find_element(By.ID, "send").is_displayed())
    return page.find_elements(By.CSS_SELECTOR, "li.assistant .body")[-1].text


def test_a_chat(page: webdriver.Chrome) -> None:
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#model option"))
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


@pytest.mark.parametrize("width", [360, pytest.param(1280, marks=pytest.mark.full)])
def test_everything_fits(page: webdriver.Chrome, width: int) -> None:
    size = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
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


def test_what_a_model_writes_is_text(page: webdriver.Chrome) -> None:
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
