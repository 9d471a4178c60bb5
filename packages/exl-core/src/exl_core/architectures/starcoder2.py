"""StarCoder2: LayerNorm, plain MLP with biases, a window when the file defines one."""

from .base import Architecture
from .windows import one_window

STARCODER2 = Architecture(
    name="Starcoder2ForCausalLM",
    defaults={"norm_epsilon": 1e-5, "use_bias": True},
    norm="layer",
    norm_bias=True,
    norm_eps_keys=("norm_epsilon", "layer_norm_epsilon"),
    bias_keys=("use_bias",),
    windows=one_window(),
    mlp_gated=False,
    mlp_bias_keys=("use_bias",),
    activation="gelu",
    up_proj="mlp.c_fc",
    down_proj="mlp.c_proj",
    tied_head=True,
)
