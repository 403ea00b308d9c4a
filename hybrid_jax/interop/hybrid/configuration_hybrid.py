"""Configuration of a hybrid language model: a string that names its sublayers, and one section of sizes for each kind.

*  multi-head latent attention (mla)     A  grouped-query attention (gqa)     -  SwiGLU
G  Gated DeltaNet (gdn)                  K  Kimi Delta Attention (kda)        S  Mamba2 (mamba2)
"""

from types import SimpleNamespace
from typing import Any

from transformers import PretrainedConfig

_ROPE = {
    "style": "interleaved",  # pairs that turn together: (2i, 2i+1) "interleaved", (i, i + R/2) "half"; or "none"
    "theta": 10000.0,
    "rotary_fraction": 1.0,  # leading share of the channels that turns
    "yarn_factor": 1.0,  # YaRN length extension, 1 is off
    "yarn_original_max_position": 0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "llama3_factor": 1.0,  # Llama 3.1's length extension, 1 is off
    "llama3_original_max_position": 0,
    "llama3_high_rotations": 4.0,
    "llama3_low_rotations": 1.0,
}
_DELTA = {
    "num_heads": 0,  # of queries and keys
    "num_v_heads": 0,
    "head_dim": 0,  # of queries and keys
    "expand_v": 1.0,  # value channels a head = head_dim * expand_v
    "conv_size": 4,
    "use_short_conv": True,
    "allow_neg_eigval": False,  # beta is doubled
    "norm_eps": 0.0,
}
# A norm_eps of 0 stands for the model's.
SECTIONS: dict[str, dict[str, Any]] = {
    "mla": {
        "num_heads": 0,
        "q_lora_rank": 0,  # 0: queries are projected directly
        "kv_lora_rank": 0,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
        "rope": _ROPE,
        "norm_eps": 0.0,
    },
    "gqa": {
        "num_heads": 0,
        "num_kv_heads": 0,
        "head_dim": 0,
        "qk_norm": False,
        "bias": False,  # on the q, k and v projections
        "output_gate": False,
        "rope": {**_ROPE, "style": "half"},
        "norm_eps": 0.0,
    },
    "gdn": {**_DELTA, "use_gate": True},
    "kda": {**_DELTA, "lower_bound": 0.0, "gate_bias": True},  # lower_bound 0: the softplus gate
    "mamba2": {
        "state_size": 0,
        "head_dim": 0,
        "n_groups": 1,
        "expand": 2,
        "conv_size": 4,
        "chunk_size": 64,
        "pre_norm": True,  # RMSNorm before the mixer
        "norm_eps": 1e-5,
    },
}
SYMBOLS = "*AGKS-"


def _filled(defaults: dict, given: dict | None, where: str) -> dict:
    """`given` over `defaults`, nested. Raises ValueError for a key that does not exist."""
    filled = {key: dict(value) if isinstance(value, dict) else value for key, value in defaults.items()}
    for key, value in (given or {}).items():
        if key not in defaults:
            raise ValueError(f"{where}.{key}: unknown key, expected one of {', '.join(defaults)}")
        nested = isinstance(defaults[key], dict)
        filled[key] = _filled(defaults[key], value, f"{where}.{key}") if nested else value
    return filled


class HybridConfig(PretrainedConfig):
    """`layout` has one symbol a sublayer, first to last.

    max_position_embeddings: tokens of the rows it was trained on; longer ones run. training: keys that change no
    result of the model, as the code that trained it has them.
    """

    model_type = "hybrid_jax"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    def __init__(
        self,
        layout: str = "",
        vocab_size: int = 0,
        hidden_size: int = 0,
        intermediate_size: int = 0,
        norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        rescale_out_proj: bool = False,
        mla: dict | None = None,
        gqa: dict | None = None,
        gdn: dict | None = None,
        kda: dict | None = None,
        mamba2: dict | None = None,
        training: dict | None = None,
        max_position_embeddings: int = 2048,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        **kwargs,
    ):
        wrong = sorted(set(layout) - set(SYMBOLS))
        if wrong:
            raise ValueError(f"layout {layout!r}: {wrong[0]!r} is not one of {' '.join(SYMBOLS)}")
        self.layout = layout
        self.num_hidden_layers = len(layout)
        if kwargs.pop("num_hidden_layers", len(layout)) != len(layout):
            raise ValueError(
                f"num_hidden_layers: the layout {layout!r} has {len(layout)} sublayers; change that instead"
            )
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.norm_eps = norm_eps
        self.initializer_range = initializer_range
        self.rescale_out_proj = rescale_out_proj
        given = {"mla": mla, "gqa": gqa, "gdn": gdn, "kda": kda, "mamba2": mamba2}
        for name, defaults in SECTIONS.items():
            setattr(self, name, _filled(defaults, given[name], name))
        self.training = dict(training or {})
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        kwargs["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(**kwargs)

    def section(self, name: str) -> SimpleNamespace:
        """Sizes of one kind of sublayer as attributes, `rope` too, with norm_eps resolved."""
        values = {k: SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in getattr(self, name).items()}
        values["norm_eps"] = values["norm_eps"] or self.norm_eps
        return SimpleNamespace(**values)
