"""What a configuration must satisfy beyond types: sizes that divide, ranges, and a batch that fits the
devices.

Every failure is a UserError of one line: the key, what is wrong with it, and what to do. No jax here.
"""

import math
import re
from typing import Any

from hybrid_jax import weights
from hybrid_jax.config import CheckpointConfig, Config, MeshConfig, ModelConfig, RopeConfig
from hybrid_jax.errors import UserError
from hybrid_jax.kernels import support
from hybrid_jax.pattern import NAMES, period
from hybrid_jax.signals import PEER_LOST_EXIT_CODE

MAX_LENGTH = 4_194_304  # hybrid_jax/layers/rotary.py has positions below this; a test holds the two together
_TAKEN_EXIT_CODES = (1, 2, PEER_LOST_EXIT_CODE, 130, 134, 137, 139)


def check(config: Config) -> None:
    """Raises UserError for the first key of a whole run that cannot work."""
    check_model(config.model)
    _check_train(config)
    _check_data(config)
    _check_logistics(config)


def check_model(model: ModelConfig) -> None:
    """Raises UserError for the first key of the model that cannot work; only sections in use count."""
    layout = model.layout  # raises for a bad pattern
    where = "config.model"
    if model.pattern and model.num_layers and model.num_layers != len(layout):
        raise UserError(
            f"{where}.num_layers: {model.num_layers} but the pattern has {len(layout)} sublayers; "
            "leave it at 0 when a pattern is given"
        )
    _positive(where, model, "vocab_size", "hidden_size", "norm_eps", "initializer_range")
    _not_negative(where, model, "loss_chunk_tokens", "z_loss")
    _check_remat(model)
    if "-" in layout:
        _positive(where, model, "intermediate_size")
    for symbol, checker in (("*", _check_mla), ("A", _check_gqa), ("G", _check_delta), ("K", _check_delta)):
        if symbol in layout:
            checker(model, symbol)
    if "S" in layout:
        _check_mamba2(model)


def _check_remat(model: ModelConfig) -> None:
    layers, (unit, repeats, _) = model.remat_layers, period(model.layout)
    if not -1 <= layers <= repeats:
        raise UserError(
            f"config.model.remat_layers: {layers}, but the stack has {repeats} period{'s'[: repeats != 1]} ({unit}); "
            f"use 0 to {repeats}, or -1 for the whole stack"
        )
    if layers > 0 and model.remat == "none":
        raise UserError(
            f"config.model.remat_layers: {layers}, but config.model.remat is none, so nothing is recomputed; set it to "
            "dots, names or full"
        )


def _check_mla(model: ModelConfig, symbol: str) -> None:
    mla, where = model.mla, "config.model.mla"
    _positive(where, mla, "num_heads", "kv_lora_rank", "v_head_dim")
    _not_negative(where, mla, "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "norm_eps")
    if mla.qk_nope_head_dim + mla.qk_rope_head_dim == 0:
        raise UserError(f"{where}.qk_nope_head_dim: 0 like qk_rope_head_dim, so keys are empty; make either positive")
    if mla.qk_rope_head_dim:
        _check_rope(f"{where}.rope", mla.rope, mla.qk_rope_head_dim, f"{where}.qk_rope_head_dim")


def _check_gqa(model: ModelConfig, symbol: str) -> None:
    gqa, where = model.gqa, "config.model.gqa"
    _positive(where, gqa, "num_heads", "num_kv_heads", "head_dim")
    _not_negative(where, gqa, "norm_eps")
    _divides(f"{where}.num_heads", gqa.num_heads, "num_kv_heads", gqa.num_kv_heads)
    _check_rope(f"{where}.rope", gqa.rope, gqa.head_dim, f"{where}.head_dim")


def _check_rope(where: str, rope: RopeConfig, head_dim: int, head_key: str) -> None:
    if rope.style == "none":
        return
    _positive(where, rope, "theta", "rotary_fraction")
    if rope.rotary_fraction > 1.0:
        raise UserError(f"{where}.rotary_fraction: {rope.rotary_fraction} is more than the whole head; use at most 1.0")
    rotated = head_dim * rope.rotary_fraction
    if rotated != int(rotated) or int(rotated) % 2:
        raise UserError(
            f"{head_key}: rotary positions turn pairs, but {head_dim} * rotary_fraction "
            f"{rope.rotary_fraction} = {rotated:g} dims; make it even, or set rope.style to none"
        )
    for kind, fast, slow in (("yarn", "beta_fast", "beta_slow"), ("llama3", "high_rotations", "low_rotations")):
        factor = getattr(rope, f"{kind}_factor")
        if factor < 1.0:
            raise UserError(f"{where}.{kind}_factor: {factor} would shorten the context; use 1.0 (off) or more")
        if factor > 1.0:
            _positive(where, rope, *(f"{kind}_{name}" for name in ("original_max_position", fast, slow)))
            high, low = getattr(rope, f"{kind}_{fast}"), getattr(rope, f"{kind}_{slow}")
            if high <= low:
                raise UserError(f"{where}.{kind}_{fast}: {high} must exceed {kind}_{slow} {low}")
    if rope.yarn_factor > 1.0 and rope.llama3_factor > 1.0:
        raise UserError(
            f"{where}.llama3_factor: {rope.llama3_factor} beside yarn_factor {rope.yarn_factor}; a model has one "
            "length extension, so set either to 1.0"
        )


def _rotates(model: ModelConfig) -> bool:
    """Whether any sublayer of the stack has rotary positions."""
    mla, gqa, layout = model.mla, model.gqa, model.layout
    return ("*" in layout and mla.qk_rope_head_dim > 0 and mla.rope.style != "none") or (
        "A" in layout and gqa.rope.style != "none"
    )


def _check_delta(model: ModelConfig, symbol: str) -> None:
    """Gated DeltaNet ("G") and Kimi Delta Attention ("K")."""
    name = {"G": "gdn", "K": "kda"}[symbol]
    where, section = f"config.model.{name}", getattr(model, name)
    _positive(where, section, "num_heads", "num_v_heads", "head_dim", "expand_v", "conv_size")
    _not_negative(where, section, "norm_eps")
    _divides(f"{where}.num_v_heads", section.num_v_heads, "num_heads", section.num_heads)
    _whole(f"{where}.expand_v", "head_dim", section.head_dim, "expand_v", section.expand_v)
    if symbol == "K" and section.lower_bound and not -5.0 <= section.lower_bound < 0.0:
        raise UserError(f"{where}.lower_bound: {section.lower_bound} is not in [-5, 0); use 0 for the softplus gate")


def _check_mamba2(model: ModelConfig) -> None:
    mamba2, where = model.mamba2, "config.model.mamba2"
    _positive(where, mamba2, "state_size", "head_dim", "n_groups", "expand", "conv_size", "chunk_size")
    _not_negative(where, mamba2, "norm_eps")
    inner = model.hidden_size * mamba2.expand
    _divides("config.model.mamba2: hidden_size * expand", inner, "head_dim", mamba2.head_dim)
    _divides(
        "config.model.mamba2: heads (hidden_size * expand / head_dim)",
        inner // mamba2.head_dim,
        "n_groups",
        mamba2.n_groups,
    )


def _check_train(config: Config) -> None:
    train, optimizer = config.train, config.optimizer
    _positive("config.train", train, "steps", "global_batch_size", "sequence_length", "max_bad_steps")
    _not_negative("config.train", train, "micro_batch_size", "seed")
    if train.sequence_length >= MAX_LENGTH and _rotates(config.model):
        raise UserError(
            f"config.train.sequence_length: {train.sequence_length} tokens, but the rotary tables end there; use "
            f"less than {MAX_LENGTH}, or set rope.style to none"
        )
    if train.micro_batch_size > train.global_batch_size:
        raise UserError(
            f"config.train.micro_batch_size: {train.micro_batch_size} rows a device at once, but the whole "
            f"step has {train.global_batch_size}; lower it, or set 0 for the device's whole share"
        )
    if not 1 <= train.requeue_exit_code <= 255 or train.requeue_exit_code in _TAKEN_EXIT_CODES:
        raise UserError(
            f"config.train.requeue_exit_code: {train.requeue_exit_code} is not from 1 to 255, or is one that means "
            "something else (1 and 2 errors, 69 a lost process, 130 Ctrl-C, 134, 137 and 139 a crash or kill); 75 is "
            "what sysexits.h calls a temporary failure"
        )
    if train.profile_steps:
        match = re.fullmatch(r"([0-9]+):([0-9]+)", train.profile_steps)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(
                f"config.train.profile_steps: {train.profile_steps!r} is not first:last with 1 <= first <= last, "
                "such as 10:13 (steps count from 1)"
            )
        if int(match[1]) > train.steps:
            raise UserError(
                f"config.train.profile_steps: {train.profile_steps!r} begins after the last step; use steps up to "
                f"train.steps {train.steps}"
            )
    _positive("config.optimizer", optimizer, "learning_rate", "eps")
    _not_negative(
        "config.optimizer",
        optimizer,
        "min_learning_rate",
        "warmup_steps",
        "decay_steps",
        "weight_decay",
        "clip_norm",
    )
    for name in ("b1", "b2"):
        if not 0.0 <= getattr(optimizer, name) < 1.0:
            raise UserError(f"config.optimizer.{name}: {getattr(optimizer, name)} is not in [0, 1)")
    if optimizer.min_learning_rate > optimizer.learning_rate:
        raise UserError(
            f"config.optimizer.min_learning_rate: {optimizer.min_learning_rate} is above "
            f"learning_rate {optimizer.learning_rate}; the cosine goes down"
        )
    decay = optimizer.decay_steps or train.steps
    if optimizer.warmup_steps > decay:
        key = "optimizer.decay_steps" if optimizer.decay_steps else "train.steps"
        raise UserError(
            f"config.optimizer.warmup_steps: {optimizer.warmup_steps} is beyond {key} {decay}, where the "
            "cosine ends; lower it, or set optimizer.decay_steps to the length of the full schedule"
        )


def _check_data(config: Config) -> None:
    data = config.data
    if data.source == "files" and not data.path:
        raise UserError(
            "config.data.path: empty; data.source 'files' needs a folder or a glob such as 'corpus/**/*.txt'"
        )
    if data.path and data.source not in ("files", "store"):
        raise UserError(
            f"config.data.path: {data.path!r}, but data.source {data.source!r} has its own text; set data.source to "
            "store or files, or leave the path empty"
        )
    if not 0.0 <= data.validation_fraction < 1.0:
        raise UserError(f"config.data.validation_fraction: {data.validation_fraction} is not in [0, 1)")
    if data.validation_path and data.source not in ("files", "store"):
        raise UserError(
            f"config.data.validation_path: {data.validation_path!r}, but data.source {data.source!r} has its own text; "
            "leave it empty, or set data.source to files or store"
        )
    nothing_held_out = data.validation_fraction == 0 and not data.validation_path and data.source != "synthetic"
    if nothing_held_out and config.eval.batches:
        raise UserError(
            f"config.data.validation_fraction: 0 holds nothing out for the {config.eval.batches} batches of a "
            "validation; set eval.batches to 0, or name other text in data.validation_path"
        )
    if data.tokenizer == "bpe" and data.bpe_vocab_size < 257:
        raise UserError(
            f"config.data.bpe_vocab_size: {data.bpe_vocab_size} is too few; 256 bytes and a document end need 257"
        )


def _check_logistics(config: Config) -> None:
    _not_negative(
        "config.eval",
        config.eval,
        "every_steps",
        "batches",
        "ngram_order",
        "sample_tokens",
        "sample_temperature",
    )
    if config.eval.ngram_order and config.data.source == "store":
        raise UserError(
            f"config.eval.ngram_order: {config.eval.ngram_order}, but n-grams are counted in memory, where a token "
            "store need not fit; set it to 0 with data.source 'store'"
        )
    _check_checkpoint(config.checkpoint)
    _not_negative("config.divergence", config.divergence, "max_rollbacks", "spike_steps")
    _positive("config.divergence", config.divergence, "window", "width")
    _positive("config.log", config.log, "every_steps")
    if config.kernels.backend == "triton":
        _check_triton(config.model)
    mesh = config.mesh
    if mesh.data != -1 and mesh.data < 1:
        raise UserError(f"config.mesh.data: {mesh.data} devices; give a positive number, or -1 for all that are left")
    _positive("config.mesh", mesh, "fsdp", "tensor")
    if mesh.zero not in (1, 3):
        raise UserError(f"config.mesh.zero: {mesh.zero} is neither 1 (moments are cut) nor 3 (parameters too)")
    _check_tensor(config.model, mesh.tensor)


def _cut_by_tensor(model: ModelConfig) -> list[tuple[str, int]]:
    """What mesh.tensor cuts: every sublayer's heads, the MLP's columns and the vocabulary; config key and size."""
    sizes = {
        "*": [("mla.num_heads", model.mla.num_heads)],
        "A": [("gqa.num_heads", model.gqa.num_heads), ("gqa.num_kv_heads", model.gqa.num_kv_heads)],
        "G": [("gdn.num_heads", model.gdn.num_heads)],
        "K": [("kda.num_heads", model.kda.num_heads)],
        "S": [("mamba2.n_groups", model.mamba2.n_groups)],  # whose multiple the heads are
        "-": [("intermediate_size", model.intermediate_size)],
    }
    return [("vocab_size", model.vocab_size), *(pair for s in sorted(set(model.layout)) for pair in sizes[s])]


def _check_tensor(model: ModelConfig, ways: int) -> None:
    """Raises UserError unless `ways` devices can share all that mesh.tensor cuts."""
    for name, size in _cut_by_tensor(model):
        if size % ways:
            raise UserError(
                f"config.mesh.tensor: {ways} devices cannot share config.model.{name} {size}; use "
                f"{_divisor(size, ways)}, or another size"
            )


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    where = "config.checkpoint"
    _not_negative(where, checkpoint, "every_steps", "keep_every")
    _positive(where, checkpoint, "keep", "max_failures", "timeout_seconds")
    if checkpoint.keep_every and checkpoint.every_steps and checkpoint.keep_every % checkpoint.every_steps:
        raise UserError(
            f"{where}.keep_every: {checkpoint.keep_every} is not a multiple of every_steps {checkpoint.every_steps}, "
            "so there is no checkpoint of each of those steps; change either"
        )


def _check_triton(model: ModelConfig) -> None:
    """kernels.backend=triton: every mixer has Triton kernels, and they can take its heads."""
    for symbol, op in (("G", "gdn"), ("K", "kda"), ("S", "ssd")):
        if symbol not in model.layout:
            continue
        if op not in support.TRITON:
            raise UserError(
                f"config.kernels.backend: {NAMES[symbol]} has no 'triton' implementation; use auto, which picks "
                "triton for the mixers that have one, or chunked"
            )
        heads = getattr(model, op)
        if reason := support.unfit_heads(op, heads.head_dim, heads.v_head_dim):
            raise UserError(f"config.kernels.backend: triton cannot run model.{op}: {reason}; use auto or chunked")


def mesh_shape(mesh: MeshConfig, num_devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) sizes that multiply to `num_devices`, -1 inferred. Raises UserError if none do."""
    inner = mesh.fsdp * mesh.tensor
    data = num_devices // inner if mesh.data == -1 else mesh.data
    if data * inner == num_devices and data:
        return data, mesh.fsdp, mesh.tensor
    there = f"{num_devices} device{'s'[: num_devices != 1]}"
    if num_devices % inner:
        key = "fsdp" if mesh.fsdp > 1 else "tensor"
        both = f"{mesh.fsdp} x tensor {mesh.tensor}" if mesh.fsdp > 1 and mesh.tensor > 1 else f"{inner}"
        fitting = [str(n) for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise UserError(
            f"config.mesh.{key}: {both} does not divide {there}; use {', '.join(fitting[-8:])}"
            f"{' for their product' * (both != str(inner))}, or a multiple of {inner} devices"
        )
    raise UserError(
        f"config.mesh.data: {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor} does not make {there}; set mesh.data "
        "to -1 to use all of them"
    )


def check_devices(config: Config, num_devices: int, num_processes: int = 1) -> None:
    """Raises UserError unless mesh, batch and micro-batch divide over the `num_devices` of all processes."""
    if num_devices % num_processes:
        raise UserError(f"--num_processes: {num_devices} devices do not divide over {num_processes} processes")
    data, fsdp, tensor = mesh_shape(config.mesh, num_devices)
    rows, ways, micro = config.train.global_batch_size, data * fsdp, config.train.micro_batch_size
    if rows % ways:
        raise UserError(
            f"config.train.global_batch_size: {rows} rows do not divide over {ways} devices; use "
            f"{_multiple(rows, ways, micro)}{_shared_rows(config, num_devices, fsdp, tensor)}"
        )
    check_cuts(config)
    share = rows // ways
    if micro and share % micro:
        raise UserError(
            f"config.train.micro_batch_size: {micro} does not divide the {share} rows of a device "
            f"({rows} over {ways}); use {_divisor(share, micro)}, or 0 for all at once"
        )


def check_cuts(config: Config) -> str:
    """A warning that names the weights that mesh.fsdp leaves whole, "" if there are none. Raises UserError where it
    cuts none at all."""
    model, fsdp = config.model, config.mesh.fsdp
    if fsdp == 1:
        return ""
    share, whole = weights.cut_by_fsdp(model, fsdp, config.mesh.tensor)
    if not whole:
        return ""
    width = model.hidden_size
    remedy = f"a divisor of config.model.hidden_size {width}, such as {_divisor(width, fsdp)}"
    if not share:
        raise UserError(
            f"config.mesh.fsdp: {fsdp} devices cannot cut any weight, so each would hold the whole state; use {remedy}"
        )
    remedy = f"; use {remedy}" if width % fsdp else ""
    return (
        f"config.mesh.fsdp: {fsdp} devices do not divide {', '.join(whole)}: {1 - share:.2%} of what is to be cut "
        f"stays whole on each{remedy}"
    )


def _divisor(size: int, most: int) -> int:
    """The largest that is not above `most`."""
    return max(n for n in range(1, min(size, most) + 1) if size % n == 0)


def _multiple(rows: int, ways: int, micro: int) -> str:
    """What number of rows `ways` devices could share, in words."""
    each = ways * (micro or 1)
    return f"a multiple of {each}, such as {math.ceil(rows / each) * each}"


def _shared_rows(config: Config, num_devices: int, fsdp: int, tensor: int) -> str:
    """For the end of that line: how more devices could share a row, where mesh.data gives way and the model can be cut
    so; "" where not."""
    rows, micro = config.train.global_batch_size, config.train.micro_batch_size
    largest = math.gcd(num_devices // fsdp, *(size for _, size in _cut_by_tensor(config.model)))
    ways = [n for n in range(tensor + 1, largest + 1) if largest % n == 0 and config.mesh.data == -1]
    for n in ways:
        if rows % (num_devices // n * (micro or 1)) == 0:
            return f", or config.mesh.tensor={n}"
    return f"; with config.mesh.tensor={ways[-1]}, {_multiple(rows, num_devices // ways[-1], micro)}" if ways else ""


def _positive(where: str, section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if not (math.isfinite(value) and value > 0):
            what = "positive" if math.isfinite(value) else "finite"
            raise UserError(f"{where}.{name}: must be {what}, got {value}")


def _not_negative(where: str, section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{where}.{name}: must not be negative, got {value}")


def _divides(what: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise UserError(f"{what}: {value} is not a multiple of {divisor_name} {divisor}; change either")


def _whole(path: str, name: str, size: int, factor_name: str, factor: float) -> None:
    product = size * factor
    if abs(product - round(product)) > 1e-6 or round(product) < 1:
        raise UserError(
            f"{path}: {name} {size} * {factor_name} {factor} = {product:g} is not a whole number of channels"
        )
