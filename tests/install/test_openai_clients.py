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

CLIENTS = [
    "instructor==1.17.0",
    "langchain-openai==1.7.3",
    "llama-index-llms-openai-like==0.8.1",
    "openai-agents==0.20.0",
    "openai==2.54.0",
]
pytestmark = [pytest.mark.install, pytest.mark.timeout(7200)]


def test_pages_of_their_documentation(tmp_path: Path) -> None:
    uv, python = shutil.which("uv") or "uv", tmp_path / "env" / "bin" / "python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(tmp_path / "env")], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", str(python), *CLIENTS], check=True)
    config = ModelConfig(id="fable", path=str(bundled.default_model_dir()), device="cpu", family="hermes")
    engine = EngineThread(config)
    live = LiveServer({"fable": engine}, [config])
    try:
        script = Path(__file__).with_name("client_pages.py")
        done = subprocess.run(
            [str(python), "-I", str(script), f"{live.url}/v1"],
            env={"OPENAI_API_KEY": "x", "OPENAI_AGENTS_DISABLE_TRACING": "1", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        live.close()
        engine.close()
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert len(done.stdout.split()) == 4
