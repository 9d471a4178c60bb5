"""Libraries that speak OpenAI's API, in an environment of their own, against a server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exl_generate import bundled
from exl_serve.config.model import ModelConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

PAGES = [
    "instructor==1.17.0",
    "langchain-openai==1.7.3",
    "llama-index-llms-openai-like==0.8.1",
    "openai-agents==0.20.0",
    "openai==2.54.0",
]
"""For client_pages.py: openai-agents and langchain-openai keep openai below 3."""
NEWEST = ["openai==3.54.0", "pydantic-ai-slim[openai]==2.68.0", "litellm==1.109.1"]
"""For newest_clients.py."""
QUIET = {"OPENAI_API_KEY": "x", "OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""No client asks another server than this one."""
pytestmark = [pytest.mark.install, pytest.mark.timeout(7200)]


@pytest.mark.parametrize(
    ("script", "clients", "pages"),
    [
        ("client_pages.py", PAGES, ["with_instructor", "with_langchain", "with_llama_index", "with_agents"]),
        ("newest_clients.py", NEWEST, ["with_openai", "with_pydantic_ai", "with_litellm"]),
    ],
)
def test_pages_of_their_documentation(tmp_path: Path, script: str, clients: list[str], pages: list[str]) -> None:
    uv, python = shutil.which("uv") or "uv", tmp_path / "env" / "bin" / "python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(tmp_path / "env")], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", str(python), *clients], check=True)
    config = ModelConfig(id="fable", path=str(bundled.default_model_dir()), device="cpu", family="hermes")
    engine = EngineThread(config)
    live = LiveServer({"fable": engine}, [config])
    try:
        done = subprocess.run(
            [str(python), "-I", str(Path(__file__).with_name(script)), f"{live.url}/v1"],
            env={"HOME": str(tmp_path)} | QUIET,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        live.close()
        engine.close()
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert done.stdout.split() == pages
