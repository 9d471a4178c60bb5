"""Engines and servers for the tests of exl-serve."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from typing import Any

import certifi
import pytest
from served import Served

from exl_generate import bundled
from exl_serve.config.model import ModelConfig
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer

FABLE = ModelConfig(id="fable", path=str(bundled.default_model_dir()), device="cpu", max_batch_size=8)
SCRIPTED = ModelConfig(id="scripted", path=FABLE.path, device="cpu", max_batch_size=8, engine="free")


@pytest.fixture(scope="session", autouse=True)
def few_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clients of httpx trust one authority: each client reads all of them, which takes longer than most requests."""
    context = ssl.create_default_context(cafile=certifi.where())
    first = ssl.DER_cert_to_PEM_cert(context.get_ca_certs(binary_form=True)[0])
    file = tmp_path_factory.mktemp("authorities") / "one.pem"
    file.write_text(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session")
def fable() -> Iterator[EngineThread]:
    """The bundled model in a thread."""
    thread = EngineThread(FABLE)
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def scripted() -> Iterator[EngineThread]:
    """The scripted test engine in a thread."""
    thread = EngineThread(SCRIPTED)
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def server(fable: EngineThread, scripted: EngineThread) -> Iterator[LiveServer]:
    """Both models behind HTTP on loopback."""
    live = LiveServer({"fable": fable, "scripted": scripted}, [FABLE, SCRIPTED])
    yield live
    live.close()


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    """Starts `exl serve` with these options; what is left of it ends with the test."""
    made: list[Served] = []

    def start(*options: str, **given: Any) -> Served:
        made.append(Served(*options, **given))
        return made[-1]

    yield start
    for one in made:
        one.close()
