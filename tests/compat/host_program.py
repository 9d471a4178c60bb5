"""A server's model container in the form that programs around exllamav2's async generator have.

Nothing here knows this project: only names and behaviour of exllamav2 are used. Requests are async generators that a
web framework drives and closes; a table holds the jobs that run; models are loaded and unloaded while clients wait.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import torch

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync, ExLlamaV2Sampler
from exllamav2.generator.filters import ExLlamaV2PrefixFilter

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


class ModelContainer:
    """One model with its generator, and the requests that run on it."""

    def __init__(self, model_dir: str, draft_dir: str | None = None, cache_tokens: int = 4096) -> None:
        self.config = ExLlamaV2Config(model_dir)
        self.config.max_seq_len = min(self.config.max_seq_len, 1024)
        self.draft_config = None if draft_dir is None else ExLlamaV2Config(draft_dir)
        self.cache_tokens = cache_tokens
        self.model: Any = None
        self.draft_model: Any = None
        self.cache: Any = None
        self.draft_cache: Any = None
        self.tokenizer: Any = None
        self.generator: Any = None
        self.max_batch_size: int | None = None
        self.active_jobs: dict[str, Any] = {}
        self.unhealthy: list[BaseException] = []
        self.load_lock = asyncio.Lock()

    # ---- loading ---------------------------------------------------------------------------------------------------

    async def load(self) -> AsyncIterator[tuple[int, int]]:
        """Load everything, module by module in threads; yields (module, modules) of each model."""
        async with self.load_lock:
            steps = self._load_in_inference_mode()
            while (progress := await asyncio.to_thread(next, steps, None)) is not None:
                yield progress
            await self.create_generator()

    @torch.inference_mode()
    def _load_in_inference_mode(self) -> Iterator[tuple[int, int]]:
        def progress(done: int, total: int) -> Iterator[tuple[int, int]]:
            yield done, total

        self.tokenizer = ExLlamaV2Tokenizer(self.config)
        if self.draft_config is not None:
            self.draft_model = ExLlamaV2(self.draft_config)
            self.draft_cache = ExLlamaV2Cache(self.draft_model, max_seq_len=self.cache_tokens, lazy=True)
            yield from self.draft_model.load_autosplit_gen(
                self.draft_cache, reserve_vram=[96 * 1024**2], last_id_only=True, callback_gen=progress
            )
        self.model = ExLlamaV2(self.config)
        self.cache = ExLlamaV2Cache_Q4(self.model, max_seq_len=self.cache_tokens, lazy=True)
        yield from self.model.load_autosplit_gen(
            self.cache, reserve_vram=[96 * 1024**2], last_id_only=True, callback_gen=progress
        )
        # A pass of full length shows at once whether memory is enough.
        longest = torch.zeros((1, self.config.max_input_len), dtype=torch.long)
        self.model.forward(longest[:, : self.config.max_seq_len - 1], cache=self.cache, preprocess_only=True)
        self.cache.current_seq_len = 0

    async def create_generator(self) -> None:
        """A new generator on the caches; the old one, if any, is left to the garbage collector."""
        self.generator = ExLlamaV2DynamicGeneratorAsync(
            model=self.model,
            cache=self.cache,
            draft_model=self.draft_model,
            draft_cache=self.draft_cache,
            tokenizer=self.tokenizer,
            max_batch_size=self.max_batch_size,
            paged=True,
        )
        self.max_batch_size = self.max_batch_size or self.generator.generator.max_batch_size

    async def wait_for_jobs(self, skip_wait: bool = False) -> None:
        """Wait until no request runs; with `skip_wait` they are all cancelled first."""
        if self.generator is None:
            return
        if skip_wait:
            for job in self.active_jobs.values():
                await job.cancel()
        while self.active_jobs:
            await asyncio.sleep(0.001)

    async def unload(self, skip_wait: bool = False, shutdown: bool = False) -> None:
        """Drop everything. `shutdown` waits for nobody and takes the model away under the requests."""
        if not shutdown:
            await self.load_lock.acquire()
            await self.wait_for_jobs(skip_wait)
        try:
            if self.generator is not None and self.generator.generator.current_loras:
                self.generator.generator.set_loras([])
            for model in (self.model, self.draft_model):
                if model is not None:
                    model.unload()
            self.model = self.draft_model = self.cache = self.draft_cache = self.tokenizer = None
            if self.generator is not None:
                await self.generator.close()
                self.generator = None
            gc.collect()
        finally:
            if not shutdown:
                self.load_lock.release()

    def forget_prompts(self) -> None:
        """Drop the prompt cache, after making sure that nothing runs."""
        generator = self.generator.generator
        if generator.num_remaining_jobs() == 0 and not self.generator.jobs and generator.page_table is not None:
            generator.reset_page_table()

    # ---- requests --------------------------------------------------------------------------------------------------

    def grammar(self, kind: str) -> list[Any]:
        """Filters for JSON: formatron's alone, or lm-format-enforcer's with a prefix."""
        if kind == "formatron":
            from formatron.formatter import FormatterBuilder
            from formatron.integrations.exllamav2 import create_formatter_filter
            from formatron.schemas.dict_inference import infer_mapping

            builder = FormatterBuilder()
            builder.append_line(f"{builder.json(infer_mapping({'name': 'x', 'age': 3}), capture_name='json')}")
            return [create_formatter_filter(self.model, self.tokenizer, builder)]
        from lmformatenforcer import JsonSchemaParser
        from lmformatenforcer.integrations.exllamav2 import ExLlamaV2TokenEnforcerFilter

        return [
            ExLlamaV2TokenEnforcerFilter(JsonSchemaParser(SCHEMA), self.tokenizer),
            ExLlamaV2PrefixFilter(self.model, self.tokenizer, ["{", "["]),
        ]

    def settings(self, **values: Any) -> Any:
        """Sampler settings, set one by one as the fields of a request are read."""
        settings = ExLlamaV2Sampler.Settings()
        for name, value in {"token_repetition_penalty": 1.0, "temperature": 0.9, "top_k": 40, **values}.items():
            setattr(settings, name, value)
        return settings

    @torch.inference_mode()
    def ids_of(self, prompt: str) -> torch.Tensor:
        """Tokens of a prompt; a request is prepared in another mode than the one that runs it."""
        return self.tokenizer.encode(prompt, add_bos=True, encode_special_tokens=True)

    async def generate(
        self,
        prompt: str,
        request_id: str,
        max_tokens: int = 40,
        seed: int | None = None,
        grammar: str | None = None,
        disconnected: asyncio.Event | None = None,
        steer: Callable[[Any, int], None] | None = None,
        **sampling: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream one choice: {"text", "finish_reason", ...} a chunk. `steer` may change the running job's settings, by
        the number of tokens so far."""
        settings = self.settings(**sampling)
        filters = [] if grammar is None else self.grammar(grammar)
        job = ExLlamaV2DynamicJobAsync(
            self.generator,
            input_ids=self.ids_of(prompt),
            max_new_tokens=max_tokens,
            min_new_tokens=0,
            gen_settings=settings,
            seed=seed,
            stop_conditions=[self.tokenizer.eos_token_id, "\n\nThe end"],
            decode_special_tokens=True,
            filters=filters,
            filter_prefer_eos=bool(filters),
            return_probs=True,
            return_top_tokens=2,
            banned_strings=None,
            token_healing=False,
            identifier=request_id,
        )
        self.active_jobs[request_id] = job
        generated = 0
        try:
            async for result in job:
                if disconnected is not None and disconnected.is_set():
                    await job.cancel()
                    break
                if result["stage"] != "streaming":
                    continue
                chunk = {"text": result.get("text", ""), "finish_reason": None}
                if (ids := result.get("token_ids")) is not None:
                    generated += ids.numel()
                    chunk["probs"] = result["token_probs"].flatten().tolist()
                if steer is not None:
                    steer(settings, generated)
                if result["eos"]:
                    reasons = {"max_new_tokens": "length"}
                    chunk["finish_reason"] = reasons.get(result["eos_reason"], "stop")
                    chunk["cached_tokens"] = result["cached_tokens"]
                    chunk["usage"] = (result["prompt_tokens"], result["new_tokens"])
                yield chunk
        except asyncio.CancelledError:
            await job.cancel()
            raise
        except Exception as error:
            # The generator is thought to be broken: health turns bad, and a new one is made.
            self.unhealthy.append(error)
            raise
        finally:
            del self.active_jobs[request_id]

    async def complete(self, prompt: str, request_id: str, n: int = 1, **request: Any) -> list[dict[str, Any]]:
        """n choices, each {"text", "finish_reason", "cached_tokens"}; choice i of a seeded request uses seed + i."""

        async def one(number: int) -> dict[str, Any]:
            seed = None if request.get("seed") is None else request["seed"] + number
            stream = self.generate(prompt, f"{request_id}-{number}", **{**request, "seed": seed})
            chunks = [chunk async for chunk in stream]
            last: dict[str, Any] = chunks[-1] if chunks else {"finish_reason": None}
            return {**last, "text": "".join(chunk["text"] for chunk in chunks)}

        return list(await asyncio.gather(*map(one, range(n))))


def as_person(text: str) -> dict[str, Any]:
    """The JSON object that a grammar was to give."""
    found: dict[str, Any] = json.loads(text)
    assert set(found) == {"name", "age"}, found
    return found
