"""Decode the images of a request in worker processes, into files that an engine process reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from exl_serve.config.model import Media
from exl_serve.errors import ServeError
from exl_serve.media.worker import HEAD
from exl_serve.request.body import LongUrl
from exl_serve.request.internal import MediaRef
from exl_serve.request.messages import ImagePart

__all__ = ["MediaReader"]

PROCESSES = 2
"""Decoder processes, started when they are needed."""
SECONDS = 20.0
"""Seconds that one image may take."""
ACTIVE, WAITING = 4, 32
"""Requests of one API worker whose images are decoded at once, and requests that may wait for a decoder."""
RETRY_SECONDS = 2.0
LONGEST_ANSWER = 1 << 16
"""Most bytes of an answer. A decoder whose answer begins with a larger size counts as dead."""
_threads = ThreadPoolExecutor(2 * PROCESSES, thread_name_prefix="exl-media")
"""Threads that send images to decoders and wait for them."""


class MediaReader:
    """The image decoders of one API worker. `folder`: the place of its files; default: a new temporary folder."""

    def __init__(self, folder: str | None = None) -> None:
        self._parent = folder
        #: the folder of decoded images, made for the first one
        self.folder: str | None = None
        self._idle: asyncio.LifoQueue[_Decoder] | None = None
        self._active = asyncio.Semaphore(ACTIVE)
        self._open = 0

    @asynccontextmanager
    async def decoded(self, images: Sequence[ImagePart], limits: Media) -> AsyncIterator[tuple[MediaRef, ...]]:
        """Decode the images to files, which are deleted at the end of the context.

        Raises ServeError 400 `image_invalid` or `image_too_large` with the place of the image, 429 where too many
        requests wait for a decoder, 501 without Pillow.
        """
        if len(images) > limits.max_images:
            raise ServeError.invalid(
                f"{len(images)} images; at most {limits.max_images} are taken in a request",
                "messages",
                "image_too_large",
            )
        if self._open >= ACTIVE + WAITING:
            raise ServeError(
                429,
                "rate_limit_error",
                "queue_full",
                f"{self._open} requests wait for their images to be decoded, the most that may: try again later",
                retry_after=RETRY_SECONDS,
            )
        paths: list[str] = []
        try:
            self._open += 1
            try:
                async with self._active:
                    found = await self._decode_all(images, limits, paths)
            finally:
                self._open -= 1
            yield found
        finally:
            for path in paths:
                if os.path.exists(path):
                    os.unlink(path)

    async def _decode_all(self, images: Sequence[ImagePart], limits: Media, paths: list[str]) -> tuple[MediaRef, ...]:
        """Decode the images to files. The paths are added to `paths` before they are written."""
        found: list[MediaRef] = []
        pixels = 0
        for image in images:
            paths.append(os.path.join(self._place(), secrets.token_hex(8)))
            made = await self._decode(image, paths[-1], limits)
            pixels += made.width * made.height
            if pixels > limits.max_request_pixels:
                raise ServeError.invalid(
                    f"the images of this request have more than {limits.max_request_pixels} pixels: send fewer or "
                    "smaller ones",
                    image.param,
                    "image_too_large",
                )
            found.append(made)
        return tuple(found)

    async def close(self) -> None:
        """End the processes and delete the folder."""
        while self._idle is not None and not self._idle.empty():
            await self._idle.get_nowait().close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def _place(self) -> str:
        if self.folder is None:
            self.folder = tempfile.mkdtemp(prefix="exl-media-", dir=self._parent)  # 0700
        return self.folder

    async def _decode(self, image: ImagePart, path: str, limits: Media) -> MediaRef:
        comma = image.url.find(",")
        head, size = image.url[: max(comma, 0)], len(image.url) - comma - 1
        if not head.startswith("data:image/") or not head.endswith(";base64"):
            raise ServeError.invalid(
                f"{image.param}: an image is a URL of the form data:image/TYPE;base64,DATA",
                image.param,
                "image_invalid",
            )
        if size // 4 * 3 > limits.max_bytes + 2:
            raise ServeError.invalid(
                f"{image.param}: the image has more than the {limits.max_bytes} bytes that are allowed",
                image.param,
                "image_too_large",
            )
        header = {
            "path": path,
            "max_bytes": limits.max_bytes,
            "max_pixels": limits.max_pixels,
            "low": image.detail == "low",
        }
        answer = await self._ask(header, image.url, comma + 1)
        if answer is None:
            raise ServeError.invalid(
                f"{image.param}: decoding the image took more time or memory than an image may take",
                image.param,
                "image_too_large",
            )
        if "error" in answer:
            if answer["code"] == "unsupported":
                raise ServeError(501, "not_implemented", "unsupported", answer["error"], param=image.param)
            if answer["code"] == "unavailable":
                raise ServeError.unavailable("media_unavailable", f"{answer['error']}: try again later", RETRY_SECONDS)
            raise ServeError.invalid(f"{image.param}: {answer['error']}", image.param, answer["code"])
        return MediaRef(
            path=path, width=answer["width"], height=answer["height"], digest=bytes.fromhex(answer["digest"])
        )

    async def _ask(self, header: dict[str, Any], url: str | LongUrl, begin: int) -> dict[str, Any] | None:
        """Return a decoder's answer to `url` from `begin` on; None if it died or took too long."""
        if self._idle is None:
            self._idle = asyncio.LifoQueue()
            for _ in range(PROCESSES):
                self._idle.put_nowait(_Decoder())
        decoder = await self._idle.get()
        try:
            return await decoder.ask(header, url, begin)
        finally:
            self._idle.put_nowait(decoder)


class _Decoder:
    """One process, started at the first image and again after it had to be ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    async def ask(self, header: dict[str, Any], url: str | LongUrl, begin: int) -> dict[str, Any] | None:
        process = self._process
        if process is None or process.poll() is not None:
            self.end()
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "exl_serve.media.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        answer: dict[str, Any] | None = None
        try:
            async with asyncio.timeout(SECONDS):
                asked = _threads.submit(_exchange, process, json.dumps(header).encode(), url, begin)
                answer = await asyncio.wrap_future(asked)
        except TimeoutError:
            pass
        finally:
            if answer is None:  # also where the client has left: the next request would read this answer
                self.end()
        return answer

    def end(self) -> None:
        """End the process, and so a thread that talks to it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _threads.submit(_close, process)

    async def close(self) -> None:
        process = self._process
        self.end()
        if process is not None:
            await asyncio.to_thread(process.wait)


def _exchange(process: subprocess.Popen[bytes], header: bytes, url: str | LongUrl, begin: int) -> dict[str, Any] | None:
    """Send an image to a decoder and return its answer, None if it died or the answer is invalid; runs on a thread.

    Waiting for a pipe keeps no other thread from running. The event loop would copy a large image piece by piece.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(len(header).to_bytes(HEAD, "little") + (len(url) - begin).to_bytes(HEAD, "little") + header)
        if isinstance(url, LongUrl):
            url.write_to(process.stdin, begin)
        else:
            process.stdin.write(url[begin:].encode("ascii", "replace"))
        process.stdin.flush()
        size = int.from_bytes(process.stdout.read(HEAD), "little")
        if size > LONGEST_ANSWER:
            return None
        answer: dict[str, Any] = json.loads(process.stdout.read(size))
    except (OSError, ValueError):  # a pipe that ends early has no whole JSON
        return None
    return answer


def _close(process: subprocess.Popen[bytes]) -> None:
    """Wait for a decoder that was ended, and close its pipes."""
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what the decoder did not read
                pipe.close()
