"""exl-filters alone, inside transformers: a choice from a list, by a logits processor. Needs transformers.

python examples/filters_in_transformers.py [MODEL]

Without an argument: a model of random numbers with a vocabulary of letters, to show that any model obeys.
"""

import sys
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
)

from exl_filters import ExLlamaV2SelectFilter
from exl_filters.adapters.transformers import FilterLogitsProcessor

model: Any  # the two classes share no type that has generate()
if len(sys.argv) > 1:
    tokenizer, model = AutoTokenizer.from_pretrained(sys.argv[1]), AutoModelForCausalLM.from_pretrained(sys.argv[1])
else:
    torch.manual_seed(0)
    letters = {c: i for i, c in enumerate(["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz ?:"])}
    plain = Tokenizer(models.BPE(letters, []))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>"
    )
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(letters), bos_token_id=0, eos_token_id=1, **shape))

choice = ExLlamaV2SelectFilter(None, tokenizer, ["yes", "no", "perhaps"])
inputs = tokenizer("is it raining?: ", return_tensors="pt")
output = model.generate(
    input_ids=inputs["input_ids"],
    max_new_tokens=20,
    do_sample=True,
    pad_token_id=tokenizer.eos_token_id,
    logits_processor=LogitsProcessorList([FilterLogitsProcessor([choice], tokenizer)]),
)
text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
print(str(text).replace(" ", ""))
