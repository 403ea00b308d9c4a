"""The configuration of a run: frozen, hashable dataclasses, made once at start from an ml_collections
ConfigDict.

`default_config()` gives the ConfigDict that the files in `configs/` fill in, `resolve()` turns it into a
validated `Config`, `to_dict()` back into plain Python for `config.json`. There is no None anywhere: 0, 0.0
and "" mean "unset", so that every key has a type and can be set on the command line. No jax here.
"""

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import ml_collections

from hybrid_jax import pattern as pattern_lib
from hybrid_jax.errors import UserError

T = TypeVar("T")


def key(default: T, meaning: str, choices: tuple[str, ...] = ()) -> T:
    """A config key: its default, its meaning (shown by --help) and, for a closed set, its choices."""
    metadata = {"help": meaning, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    style: str = key("interleaved", "pairs that rotate together", ("interleaved", "half", "none"))
    theta: float = key(10000.0, "base of the frequencies")
    rotary_fraction: float = key(1.0, "leading share of the head dims that rotates")
    yarn_factor: float = key(1.0, "YaRN length extension (1 = off)")
    yarn_original_max_position: int = key(0, "YaRN: length the model was trained at")
    yarn_beta_fast: float = key(32.0, "YaRN: rotations above which a frequency is kept")
    yarn_beta_slow: float = key(1.0, "YaRN: rotations below which a frequency is interpolated")
    llama3_factor: float = key(1.0, "Llama 3.1's length extension (1 = off)")
    llama3_original_max_position: int = key(0, "Llama 3.1's: length that rotations are counted in")
    llama3_high_rotations: float = key(4.0, "Llama 3.1's: rotations above which a frequency is kept")
    llama3_low_rotations: float = key(1.0, "Llama 3.1's: rotations below which a frequency is divided by the factor")


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    num_heads: int = key(0, "attention heads")
    q_lora_rank: int = key(0, "query latent width (0 = one direct projection)")
    kv_lora_rank: int = key(0, "key/value latent width")
    qk_nope_head_dim: int = key(0, "query/key dims per head without positions")
    qk_rope_head_dim: int = key(0, "query/key dims per head with rotary positions")
    v_head_dim: int = key(0, "value dims per head")
    rope: RopeConfig = RopeConfig()
    norm_eps: float = key(0.0, "epsilon of the latent norms (0 = model.norm_eps)")


@dataclasses.dataclass(frozen=True)
class GQAConfig:
    num_heads: int = key(0, "query heads")
    num_kv_heads: int = key(0, "key/value heads")
    head_dim: int = key(0, "dims per head")
    qk_norm: bool = key(False, "RMSNorm on q and k per head (Qwen3)")
    bias: bool = key(False, "bias on the q, k and v projections (Qwen2.5)")
    output_gate: bool = key(False, "sigmoid gate on the attention output (Qwen3.5)")
    rope: RopeConfig = RopeConfig(style="half")
    norm_eps: float = key(0.0, "epsilon of the q/k norms (0 = model.norm_eps)")


@dataclasses.dataclass(frozen=True)
class GDNConfig:
    num_heads: int = key(0, "query/key heads")
    num_v_heads: int = key(0, "value heads, a multiple of num_heads")
    head_dim: int = key(0, "query/key dims per head")
    expand_v: float = key(1.0, "value dims per head = head_dim * expand_v")
    conv_size: int = key(4, "taps of the short causal convolution")
    use_short_conv: bool = key(True, "short convolution on q, k and v")
    use_gate: bool = key(True, "output gate")
    allow_neg_eigval: bool = key(False, "double beta, so that state eigenvalues reach [-1, 1]")
    norm_eps: float = key(0.0, "epsilon of the gated norm (0 = model.norm_eps)")

    @property
    def v_head_dim(self) -> int:
        """Value dims per head."""
        return round(self.head_dim * self.expand_v)


@dataclasses.dataclass(frozen=True)
class KDAConfig:
    num_heads: int = key(0, "query/key heads")
    num_v_heads: int = key(0, "value heads, a multiple of num_heads")
    head_dim: int = key(0, "query/key dims per head")
    expand_v: float = key(1.0, "value dims per head = head_dim * expand_v")
    conv_size: int = key(4, "taps of the short causal convolution")
    use_short_conv: bool = key(True, "short convolution on q, k and v")
    allow_neg_eigval: bool = key(False, "double beta, so that state eigenvalues reach [-1, 1]")
    lower_bound: float = key(0.0, "log-decay floor of the sigmoid gate, in [-5, 0) (0 = softplus gate)")
    gate_bias: bool = key(True, "bias on the output gate's second projection")
    norm_eps: float = key(0.0, "epsilon of the gated norm (0 = model.norm_eps)")

    @property
    def v_head_dim(self) -> int:
        """Value dims per head."""
        return round(self.head_dim * self.expand_v)


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    state_size: int = key(0, "state dims N per head")
    head_dim: int = key(0, "channels P per head")
    n_groups: int = key(1, "groups of heads that share B and C")
    expand: int = key(2, "inner width = hidden_size * expand")
    conv_size: int = key(4, "taps of the short causal convolution")
    chunk_size: int = key(64, "tokens per chunk of the scan")
    pre_norm: bool = key(True, "RMSNorm before the mixer")
    norm_eps: float = key(1e-5, "epsilon of the gated norm (0 = model.norm_eps)")


class _HasNormEps(typing.Protocol):
    @property
    def norm_eps(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    pattern: str = key("", "the stack, one symbol a sublayer: * MLA, M mixer, - MLP, G GDN, K KDA, S Mamba2, A GQA")
    num_layers: int = key(0, "without a pattern: sublayers, mixers and MLPs alternating")
    attention_ratio: float = key(0.0, "without a pattern: share of the mixers that are MLA")
    mixer: str = key("gdn", "what M stands for", tuple(pattern_lib.MIXERS))
    vocab_size: int = key(0, "rows of the embedding")
    hidden_size: int = key(0, "width of the residual stream")
    intermediate_size: int = key(0, "inner width of the MLP")
    norm_eps: float = key(1e-6, "epsilon of every RMSNorm without its own")
    tie_word_embeddings: bool = key(True, "the head is the embedding")
    initializer_range: float = key(0.02, "standard deviation of the initial weights")
    rescale_out_proj: bool = key(False, "divide it by sqrt(2 * sublayers) on output projections")
    scan_layers: bool = key(True, "scan over the pattern's period (False: unroll)")
    remat: str = key("none", "what the backward pass recomputes", ("none", "dots", "names", "full"))
    remat_layers: int = key(-1, "periods of the pattern, from the first, that remat is for (-1 = the whole stack)")
    loss_chunk_tokens: int = key(0, "tokens per chunk of the loss (0 = automatic)")
    z_loss: float = key(0.0, "weight of log(Z)^2 (0 = off)")
    mla: MLAConfig = MLAConfig()
    gqa: GQAConfig = GQAConfig()
    gdn: GDNConfig = GDNConfig()
    kda: KDAConfig = KDAConfig()
    mamba2: Mamba2Config = Mamba2Config()

    @property
    def layout(self) -> str:
        """The sublayers, first to last, over the symbols `* - G K S A`. UserError if there are none."""
        if self.pattern:
            return pattern_lib.resolve(self.pattern, self.mixer)
        return pattern_lib.resolve(pattern_lib.derive(self.num_layers, self.attention_ratio), self.mixer)

    @property
    def recomputed_sublayers(self) -> int:
        """Sublayers of the layout, from the first, that `remat` is for."""
        if self.remat == "none" or self.remat_layers < 0:
            return 0 if self.remat == "none" else len(self.layout)
        return self.remat_layers * len(pattern_lib.period(self.layout)[0])

    def norm_eps_of(self, section: _HasNormEps) -> float:
        """The epsilon of a section's own norms: its norm_eps, or the model's where that is 0."""
        return section.norm_eps or self.norm_eps


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    steps: int = key(1000, "optimizer steps")
    global_batch_size: int = key(8, "rows per step over all devices")
    micro_batch_size: int = key(0, "rows per device per accumulation step (0 = the device's whole share at once)")
    sequence_length: int = key(2048, "tokens per row")
    seed: int = key(42, "of the initial weights and the data order")
    compute_dtype: str = key("bfloat16", "of activations and matmuls", ("bfloat16", "float32"))
    max_bad_steps: int = key(
        10,
        "non-finite steps in a row that are a divergence, and end the run where it may not roll back (each is skipped: "
        "no update, no schedule)",
    )
    profile_steps: str = key("", "first:last, both included, steps written as a jax.profiler trace")
    requeue_exit_code: int = key(75, "after SIGTERM or SIGUSR1, once saved; for schedulers that start a run again")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float = key(3e-4, "peak")
    min_learning_rate: float = key(3e-5, "end of the cosine")
    warmup_steps: int = key(0, "steps of linear warm-up")
    decay_steps: int = key(0, "step at which the cosine reaches its minimum (0 = train.steps)")
    b1: float = key(0.9, "AdamW beta 1")
    b2: float = key(0.95, "AdamW beta 2")
    eps: float = key(1e-8, "AdamW epsilon")
    weight_decay: float = key(0.01, "decoupled; on matrices only")
    clip_norm: float = key(1.0, "largest global gradient norm (0 = no clipping)")


@dataclasses.dataclass(frozen=True)
class DivergenceConfig:
    max_rollbacks: int = key(3, "returns to the last good checkpoint and past the data since, in a run (0 = none)")
    spike_steps: int = key(32, "steps in a row with the loss above its band that are a divergence (0 = none are)")
    window: int = key(128, "good steps, the last ones, whose losses make the band; it moves down only")
    width: float = key(6.0, "of the band above their median, in robust standard deviations (each at least 1% of it)")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    source: str = key("python", "where text comes from", ("python", "files", "store", "synthetic"))
    path: str = key(
        "",
        "files: a folder or glob of .txt/.md/.py/.jsonl; store: PREFIX of .bin and .idx, or a mixture "
        "PREFIX:WEIGHT,PREFIX:WEIGHT,... (WEIGHT is the number after the last colon, 1 if there is none; text that "
        "as a whole names a store is one PREFIX, commas and colons included)",
    )
    tokenizer: str = key(
        "bytes",
        "bytes, or a BPE trained on the source; store: how samples are written where no manifest names its tokenizer, "
        "bytes or else the ids as numbers",
        ("bytes", "bpe"),
    )
    bpe_vocab_size: int = key(4096, "tokens of the trained BPE")
    cache_dir: str = key("", "of tokenizers and token stores (empty = the user's cache folder)")
    validation_fraction: float = key(0.05, "share of the files, or of a store's documents, held out")
    validation_path: str = key("", "files, store: validate on this instead, of the form of path; nothing is held out")
    isolate_documents: bool = key(True, "reset state, attention and positions at document ends")
    allow_change: bool = key(False, "let a run go on with other data than it began with")
    prepare: str = key("", "said where source is store and path is empty: arguments of hybrid_jax.data.prepare")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every_steps: int = key(0, "steps between validations (0 = only at the end)")
    batches: int = key(8, "batches of a validation (0 = none)")
    ngram_order: int = key(0, "n of the n-gram model whose loss stands beside the final one (0 = none)")
    sample_tokens: int = key(256, "tokens of the text written at the end (0 = none)")
    sample_prompt: str = key("", "its beginning")
    sample_temperature: float = key(0.8, "0 = the likeliest token always")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = key(500, "steps between checkpoints, and one at the end (0 = none at all)")
    keep: int = key(3, "newest scheduled checkpoints kept, beside the newest")
    keep_every: int = key(0, "steps whose multiples are kept for good (0 = none)")
    max_failures: int = key(3, "checkpoints in a row that could not be written that end the run")
    init_from: str = key(
        "", "a run, or one checkpoint, whose parameters the first step begins with, in place of random ones"
    )
    timeout_seconds: int = key(
        600, "longest that a checkpoint may take to write, or that processes wait for each other"
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int = key(-1, "devices with copies of the whole state (-1 = all that are left)")
    fsdp: int = key(1, "devices that cut the state between them, each with rows of its own")
    tensor: int = key(1, "devices that share heads, columns and the vocabulary, and rows")
    zero: int = key(3, "what fsdp cuts: 3 = parameters, gradients and moments, 1 = gradients and moments")


@dataclasses.dataclass(frozen=True)
class KernelsConfig:
    backend: str = key("auto", "of the mixers G, K and S", ("auto", "reference", "chunked", "triton"))
    attention: str = key("auto", "backend of softmax attention, * and A", ("auto", "reference", "chunked"))


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    gemm_cache: str = key("", "folder that keeps XLA's choices of GEMM algorithms for later starts (empty = none)")


@dataclasses.dataclass(frozen=True)
class LogConfig:
    every_steps: int = key(1, "steps between lines")
    tensorboard: bool = key(False, "write TensorBoard events")
    wandb: bool = key(False, "write to Weights & Biases")
    wandb_mode: str = key("offline", "of Weights & Biases", ("offline", "online", "disabled"))
    wandb_project: str = key("hybrid_jax", "of Weights & Biases")


@dataclasses.dataclass(frozen=True)
class Config:
    workdir: str = key("", "output folder (empty = WORKSPACE/GROUP/USER/<config file's name>, without empty parts)")
    workspace: str = key("runs", "folder of the runs of all")
    group: str = key("", "folder in it of a team")
    user: str = key("", "folder in that of a person")
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    divergence: DivergenceConfig = DivergenceConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()
    kernels: KernelsConfig = KernelsConfig()
    tune: TuneConfig = TuneConfig()
    log: LogConfig = LogConfig()


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dict of a Config (or of one of its sections), JSON-ready."""
    return dataclasses.asdict(config)


def default_config() -> ml_collections.ConfigDict:
    """Every key with its default, for config files to fill in; `resolve` finds wrong keys and types."""
    return ml_collections.ConfigDict(to_dict(Config()), type_safe=False)


def fields() -> Iterator[tuple[str, "dataclasses.Field[Any]"]]:
    """(path such as "model.gdn.num_heads", field) of every key that holds a value, in order."""
    yield from _fields(Config, "")


def _fields(section: Any, prefix: str) -> Iterator[tuple[str, "dataclasses.Field[Any]"]]:
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(field.type):
            yield from _fields(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def from_dict(values: Mapping[str, Any]) -> Config:
    """A Config of nested mappings, types and choices checked but sizes not. Missing keys take their defaults.

    Raises UserError for an unknown key, a wrong type or a value outside a closed set.
    """
    return _build(Config(), values, "config")


def resolve(config: ml_collections.ConfigDict | Mapping[str, Any]) -> Config:
    """The frozen, validated Config of a ConfigDict. Raises UserError: one line, the key and the remedy."""
    from hybrid_jax import config_checks  # it needs the classes above

    values = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
    resolved = from_dict(values)
    config_checks.check(resolved)
    return resolved


def check_devices(config: Config, num_devices: int, num_processes: int = 1) -> None:
    """Raises UserError unless mesh and batch divide over `num_devices` (of all processes together)."""
    from hybrid_jax import config_checks

    config_checks.check_devices(config, num_devices, num_processes)


def unknown_key(path: str, name: str, valid: list[str]) -> UserError:
    """The error for a key that does not exist, with the likeliest correction."""
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    elsewhere = [full for full, _ in fields() if full.rpartition(".")[2] == name]
    if near:
        hint = f"did you mean {near[0]!r}?"
    elif elsewhere:
        hint = f"did you mean 'config.{elsewhere[0]}'?"
    else:
        hint = f"valid keys are {', '.join(valid)}"
    return UserError(f"{path}.{name}: unknown key, {hint}")


def _build(base: Any, values: Any, path: str) -> Any:
    """`base` with `values` put in."""
    # A base and not a class: a section's default may differ from its class's, as gqa.rope does.
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: expected a section with keys, got {values!r}")
    known = {field.name: field for field in dataclasses.fields(base)}
    arguments = {}
    for name, value in values.items():
        if name not in known:
            raise unknown_key(path, str(name), list(known))
        if dataclasses.is_dataclass(known[name].type):
            arguments[name] = _build(getattr(base, name), value, f"{path}.{name}")
        else:
            arguments[name] = typed_value(known[name], value, f"{path}.{name}")
    return dataclasses.replace(base, **arguments)


def typed_value(field: "dataclasses.Field[Any]", value: Any, path: str) -> Any:
    """`value` as the field's type: an int may stand for a float, nothing else converts. Raises UserError."""
    kind: Any = field.type
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        hint = "; use the key's empty value (0, 0.0, '' or False) instead of None" if value is None else ""
        raise UserError(f"{path}: expected {names[kind]}, got {value!r}{hint}")
    choices = field.metadata["choices"]
    if choices and value not in choices:
        near = difflib.get_close_matches(value, choices, n=1, cutoff=0.6)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{path}: {value!r} is not one of {', '.join(choices)}{hint}")
    return value
