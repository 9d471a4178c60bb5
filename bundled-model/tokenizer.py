"""Train the tokenizer of the bundled models on a sample of the corpus.

    python tokenizer.py OUT_DIR [--documents 60000]

Byte-level BPE with single digits; all 256 bytes are in the alphabet, so any text can be encoded.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from corpus import BOS, END, EOS, SPECIALS, document
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 3072
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|system|>Call functions so: "
    '<tool_calls>[{"name": "NAME", "arguments": {}}]</tool_calls>'
    "{% for tool in tools %}{{ '\\n' + tool['function'] | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' + (message['content'] or '') }}"
    "{% if message['tool_calls'] %}<tool_calls>[{% for call in message['tool_calls'] %}"
    "{% if not loop.first %}, {% endif %}"
    '{"name": {{ call["function"]["name"] | tojson }}, "arguments": {{ call["function"]["arguments"] | tojson }}}'
    "{% endfor %}]</tool_calls>{% endif %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The models have never seen a tool: the template shows tools and calls, so that programs can be tried with them."""


def train(documents: int, seed: int = 1) -> Tokenizer:
    """Return a tokenizer trained on this many training documents."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_bare(document(rng, "train")) for _ in range(documents)), trainer)
    bos = SPECIALS.index(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def _bare(text: str) -> str:
    for token in SPECIALS:
        text = text.replace(token, "\n")
    return text


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = [SPECIALS.index(EOS), SPECIALS.index(END)]
    generation = {"bos_token_id": SPECIALS.index(BOS), "eos_token_id": ends, "pad_token_id": SPECIALS.index("<pad>")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--documents", type=int, default=60_000)
    arguments = parser.parse_args()
    save(train(arguments.documents), arguments.out)


if __name__ == "__main__":
    main()
