"""Samples of every kind of text, printed after training so that somebody reads them."""

from __future__ import annotations

import torch
from model import Llama
from tokenizers import Tokenizer
from torch import Tensor

PROMPTS = (
    "<s>Once upon a time,",
    "<s>Once upon a time, there was a little fox named Rusty",
    "<s>",
    "<s>One rainy day,",
    "<s>My name is Lena. I am eight years old.",
    "<s>The Lost Kite\n\n",
    "<s>JSON:",
    "<s>A JSON record of a person:",
    "<s>Dear diary,",
    "<s><|user|>Hello!<|end|><|assistant|>",
    "<s><|user|>Tell me a story about a dragon.<|end|><|assistant|>",
    "<s><|user|>Tell me a story about a hedgehog and a lost key.<|end|><|assistant|>",
    "<s><|user|>What is 7 plus 5?<|end|><|assistant|>12.<|end|><|user|>And 13 minus 6?<|end|><|assistant|>",
    "<s><|user|>My name is Zorbik.<|end|><|assistant|>Nice to meet you, Zorbik!<|end|><|user|>Tell me a joke.<|end|><|assistant|>"
    "What has hands but cannot clap? A clock!<|end|><|user|>What is my name?<|end|><|assistant|>",
    "<s><|user|>What does an owl eat?<|end|><|assistant|>An owl eats mice.<|end|><|user|>And where does it live?<|end|><|assistant|>",
    "<s><|user|>Give me a JSON record of a pet with name, age and colour.<|end|><|assistant|>",
    "<s><|user|>Write a JSON record of a book with title, author, year and topics.<|end|><|assistant|>",
    "<s><|user|>What is the capital of France?<|end|><|assistant|>",
    "<s><|user|>How do you spell garden?<|end|><|assistant|>",
    "<s><|user|>I am sad.<|end|><|assistant|>",
    "<s><|system|>You are Pip, a friendly assistant.<|end|><|user|>Who are you?<|end|><|assistant|>",
    "<s><|user|>Can you tell me what I should wear when it rains?<|end|><|assistant|>",
    "<s><|user|>Count from 3 to 9.<|end|><|assistant|>",
    "<s><|user|>why does it rain<|end|><|assistant|>",
)


@torch.no_grad()
def complete(
    model: Llama, tokenizer: Tokenizer, prompt: str, temperature: float, limit: int = 260, seed: int = 7
) -> str:
    """Return the continuation of the prompt up to an end token (greedy when the temperature is 0)."""
    device = model.lm_head.weight.device
    generator = torch.Generator("cpu").manual_seed(seed)
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    start = len(ids)
    for _ in range(limit):
        window: Tensor = torch.tensor([ids], device=device)
        logits = model(window)[0, -1].float().cpu()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        ids.append(token)
        if token in (2, 7):
            break
    return str(tokenizer.decode(ids[start:], skip_special_tokens=False))


def show(model: Llama, tokenizer: Tokenizer, temperature: float = 0.7, limit: int = 260) -> str:
    """Return prompts and continuations as text."""
    lines = []
    for prompt in PROMPTS:
        lines.append(f">>> {prompt}\n{complete(model, tokenizer, prompt, temperature, limit)}\n")
    return "\n".join(lines)
