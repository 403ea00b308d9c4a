"""Times reading and writing: tokens a second, and what states take, for rows of several numbers and lengths."""

import argparse
import time
from collections.abc import Callable

import jax
import numpy as np

from hybrid_jax import config_file
from hybrid_jax.bench import milliseconds
from hybrid_jax.decoding.complete import BLOCK
from hybrid_jax.decoding.decoder import Decoder, Timing, capacity_for
from hybrid_jax.decoding.sampling import Sampling
from hybrid_jax.kernels import timing
from hybrid_jax.model import Model
from hybrid_jax.report import aligned

BLOCKS = 8  # that are timed, after one that is not
MOST_READ = 2**18  # tokens of all rows; where there are more, states are taken as if that many had been read


def random(config: str, dtype: str) -> Decoder:
    """The model of a config file, its weights as training draws them at first. Raises UserError."""
    cfg = config_file.load(config)
    model = Model(cfg.model, compute_dtype=dtype or cfg.train.compute_dtype)
    return Decoder(model, jax.jit(model.init)(jax.random.key(cfg.train.seed)))


def run(decoder: Decoder, options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Prints the table; options: batch_sizes and lengths, empty for the defaults. Returns the exit code."""
    if decoder.end >= 0:
        raise ValueError("a benchmark's rows must not end")
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    batches = options.batch_sizes or ([1, 4] if on_cpu else [1, 64])
    lengths = options.lengths or ([1024] if on_cpu else [1024, 65536])
    say(f"measuring a copy on this {device.device_kind} ({device.platform})")
    speed = timing.measure_peaks().bytes_per_second
    model = decoder.model
    head = ("rows", "length", "read tok/s", "write tok/s", "ms a step", "floor ms", "x floor", "recurrent", "cache")
    lines: list[tuple[str, ...]] = [(*head, "compile s")]
    for batch in batches:
        for length in lengths:
            say(f"{batch} x {length:,} tokens")
            lines.append(_line(decoder, batch, length, speed))
    print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}, {model.compute_dtype}, {model.cfg.layout}")
    print("\n".join(aligned(lines)))
    print(
        "recurrent and cache: MiB of states. floor: weights and cache read, recurrent states read and written, at the "
        f"{speed / 1e9:,.0f} GB/s of a large copy."
    )
    return 0


def _line(decoder: Decoder, batch: int, length: int, speed: float) -> tuple[str, ...]:
    count = 1 + BLOCK * (1 + BLOCKS)
    rows = decoder.rows(range(batch), Sampling())
    decoder.timing = Timing()
    read = "-"
    if batch * length <= MOST_READ:
        draw = np.random.default_rng(0)
        ids = draw.integers(0, decoder.model.cfg.vocab_size, (batch, length)).tolist()
        rows.read(ids, count)  # compiles, and runs everything once
        rows.reset()
        compiled = decoder.timing.compile_seconds
        decoder.timing = Timing(compile_seconds=compiled)
        rows.read(ids, count)
        read = f"{decoder.timing.read_tokens / decoder.timing.read_seconds:,.0f}"
    else:
        rows.assume(length, count)
    ends = [time.perf_counter() for _ in rows.write([count] * batch, BLOCK)]
    step = (ends[-1] - ends[1]) / (BLOCK * BLOCKS)
    recurrent, cache = decoder.state_bytes(batch, capacity_for(length + count))
    weights = sum(x.nbytes for x in jax.tree.leaves(decoder.params))
    if not decoder.model.cfg.tie_word_embeddings:
        weights -= decoder.params["embed"]["weight"].nbytes
    used = cache * length / capacity_for(length + count)
    floor = (weights + 2 * recurrent + used) / speed
    return (
        f"{batch}", f"{length:,}", read, f"{batch / step:,.0f}", milliseconds(step), milliseconds(floor),
        f"{step / floor:.1f}", f"{recurrent / 2**20:,.1f}", f"{cache / 2**20:,.1f}",
        f"{decoder.timing.compile_seconds:.1f}",
    )  # fmt: skip
