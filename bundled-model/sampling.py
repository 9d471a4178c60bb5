"""Samples of every kind of text, printed after training so that somebody reads them."""

from __future__ import annotations

import torch
from model import Llama
from tokenizers import Tokenizer
from torch import Tensor


def _chat(*turns: str, system: str | None = None) -> str:
    roles = ("user", "assistant")
    head = f"<|system|>{system}<|end|>" if system else ""
    body = "".join(f"<|{roles[i % 2]}|>{text}<|end|>" for i, text in enumerate(turns))
    return f"<s>{head}{body}<|assistant|>"


PROMPTS = (
    "<s>Once upon a time,",
    "<s>Once upon a time, there was a little fox named Rusty",
    "<s>One rainy day,",
    "<s>My name is Lena. I am eight years old.",
    "<s>The Lost Kite\n\n",
    "<s>JSON:",
    "<s>A JSON record of a person:",
    "<s>Dear diary,",
    "<s>In the morning, the sun",
    _chat("Hello!"),
    _chat("Tell me a story about a dragon."),
    _chat("Tell me a story about a robot who learns to dance."),
    _chat("What is 7 plus 5?", "12.", "And 13 minus 6?"),
    _chat("My name is Zorbik.", "Nice to meet you, Zorbik!", "Tell me a joke.", "A clock!", "What is my name?"),
    _chat("What does an owl eat?", "An owl eats mice.", "And where does it live?"),
    _chat("Give me a JSON record of a pet with name, age and colour."),
    _chat("Write a JSON record of a book with title, author, year and topics."),
    _chat("Give me JSON of a person named Anna aged 30."),
    _chat("What is the capital of France?"),
    _chat("How do you spell garden?"),
    _chat("I am sad."),
    _chat("Who are you?", system="You are Pip, a friendly assistant."),
    _chat("Can you tell me what I should wear when it rains?"),
    _chat("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9.", "Now backwards."),
    _chat("why does it rain"),
    _chat("What is 25 plus 30?"),
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
    return "\n".join(f">>> {p}\n{complete(model, tokenizer, p, temperature, limit)}\n" for p in PROMPTS)
