"""A Triton kernel's first use on a device: forward and backward on a small fixed input, against the recurrence.

Compilers have produced wrong code for kernels like these on both vendors' GPUs, and a run that trains on it looks
like one that learns badly. What passed is kept in the user's cache folder, until device, driver, a version or a source
changes. What failed is kept nowhere.

Shapes: B batch, T time, H q/k heads, R value heads per q/k head, K key dim, V value dim.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.errors import UserError
from hybrid_jax.kernels import launch

EXECUTORS: tuple[str, ...] = ("gpu",)  # where kernels are tested: the interpreter has no compiler to mistrust
LENGTH = 3109  # tokens of a long row: a ragged end, and enough chunks to be cut into three segments (delta/plan.py)
SHORT, MANY = 133, 256  # tokens of many short rows, and how many blocks of values make them many: other tiles there
PIECE = 128  # tokens between the states that the reference keeps for its backward pass

PARAMETERS = ("A_log", "dt_bias")  # of a gate
ROWS = ("random", "similar keys, slow decay")  # even rows, odd rows
_KINDS = (slice(0, None, 2), slice(1, None, 2))
# Largest relative RMS error of outputs and of gradients. What a wrong binary gives is off by its own size.
LIMITS = {"bfloat16": ((1e-2, 2e-2), (4e-2, 4e-2)), "float32": ((1e-4, 1e-4), (1e-3, 1e-3))}

log = logging.getLogger(__name__)

_lock = threading.Lock()
_passed: set["Variant"] = set()


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is compiled differently: an operation's kernels for these sizes, inputs, and rows of several documents."""

    op: str
    K: int
    V: int
    R: int
    dtype: str
    packed: bool
    gate: str = ""  # what makes log decays of raw gates inside the kernels; "" where they are given

    def __str__(self) -> str:
        sizes = f"{self.op} for K {self.K}, V {self.V}, {self.R} value heads a key head, {self.dtype}"
        return sizes + (", packed" if self.packed else "") + (f", {self.gate} gate" if self.gate else "")


def before_use(variant: Variant, backends: Mapping[str, Callable]) -> None:
    """Tests backends["triton"] of a delta rule against backends["reference"] once, on this process's first device.

    It may be called while jax traces, under a mesh and inside shard_map. Raises UserError when the kernels do not
    compile or compute something else.
    """
    if launch.executor() not in EXECUTORS:
        return
    with _lock:
        if variant in _passed:
            return
        key = _key(variant)
        path = _cache_file(key)
        if _recall(path, key):
            log.debug("kernels: %s passed its self-test before (%s)", variant, path)
        else:
            _remember(path, key, _test(variant, backends))
        _passed.add(variant)


def _test(variant: Variant, backends: Mapping[str, Callable]) -> dict[str, float]:
    """The error of every tensor by name. Raises UserError."""
    device, start = jax.local_devices()[0], time.perf_counter()
    log.info("kernels: testing those of %s, once on this %s with these versions", variant, device.device_kind)
    where = f"on this {device.device_kind}"
    remedy = "choose --config.kernels.backend=chunked"
    try:
        # Traces and the current mesh belong to a thread: a fresh one has neither.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            found = pool.submit(_errors, variant, backends["triton"], backends["reference"], device).result()
    except Exception as error:
        log.debug("kernels: self-test of %s", variant, exc_info=True)
        said = " ".join(str(error).split())[:300]
        raise UserError(
            f"config.kernels.backend: the triton kernels of {variant} do not run {where}: "
            f"{type(error).__name__}: {said}; {remedy}"
        ) from error
    # NaN is the worst of all.
    worst = max(found, key=lambda name: np.nan_to_num(found[name] / _limit(variant, name), nan=np.inf))
    if not found[worst] <= _limit(variant, worst):
        raise UserError(
            f"config.kernels.backend: the triton kernels of {variant} compute something wrong {where}: relative "
            f"error {found[worst]:.1e} of {worst}, at most {_limit(variant, worst):.0e} is right; {remedy}"
        )
    seconds = time.perf_counter() - start
    log.info(
        "kernels: %s self-test on %s: worst error %.1e, of %s (%.1f s)",
        variant.op, device.device_kind, found[worst], worst, seconds,
    )  # fmt: skip
    return found


def _limit(variant: Variant, name: str) -> float:
    tensor, row = name.split(", ", 1)
    return LIMITS[variant.dtype][ROWS.index(row)][tensor.startswith("d")]


# -- the test --------------------------------------------------------------------------------------------------


def _errors(variant: Variant, kernel: Callable, reference: Callable, device: jax.Device) -> dict[str, float]:
    """Relative RMS error of each output and gradient in each kind of row, against the recurrence in fp32."""
    scale = variant.K**-0.5

    def program(op):
        def both(inputs, cotangents, ids):
            def forward(x):
                parameters = [x[name] for name in PARAMETERS if name in x]
                o, state = op(x["q"], x["k"], x["v"], x["g"], x["beta"], scale, x["initial_state"], ids, *parameters)
                return {"o": o, "final_state": state}

            out, pull = jax.vjp(forward, inputs)
            return out | {f"d{name}": x for name, x in pull(cotangents)[0].items()}

        return jax.jit(both)

    def run(op, arguments):
        with jax.default_device(device):
            return jax.device_get(program(op)(*jax.device_put(arguments, device)))

    problems = [problem(variant, many) for many in (False, True)]
    # The same values, rounded as the kernel got them.
    wide = [(*jax.tree.map(lambda x: x.astype(np.float32), draw[:2]), draw[2]) for draw in problems]
    narrow = [(*draw[:2], draw[2] if variant.packed else None) for draw in problems]
    found: dict[str, float] = {}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # most of the time goes to compilers
        runs = [
            (pool.submit(run, kernel, some), pool.submit(run, _in_pieces(reference), others))
            for some, others in zip(narrow, wide, strict=True)
        ]
    for actual, expected in ((a.result(), e.result()) for a, e in runs):
        for name, e in expected.items():
            a, e = np.asarray(actual[name], np.float64), np.asarray(e, np.float64)
            of_parameter = name.removeprefix("d") in PARAMETERS  # a gradient that comes from all rows
            kinds = {ROWS[1]: slice(None)} if of_parameter else dict(zip(ROWS, _KINDS, strict=True))
            for label, rows in kinds.items():
                size = np.mean(e[rows] ** 2)
                if name == "dA_log":
                    # One sum a head over terms of both signs, which can be close to zero: at least what the channels'
                    # own sums would make of it by chance.
                    size = max(size, np.mean(np.sum(np.square(expected["ddt_bias"], dtype=np.float64), axis=1)))
                error = np.sqrt(np.mean((a[rows] - e[rows]) ** 2) / size)
                found[f"{name}, {label}"] = float(np.maximum(error, found.get(f"{name}, {label}", 0.0)))
    return found


def problem(variant: Variant, many: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """(inputs, cotangents, segment ids), the same everywhere: two long rows, or many short ones; see ROWS. The first
    row has several documents if the variant is packed."""
    rng = np.random.default_rng(0)
    K, V = variant.K, variant.V
    H = 1 if variant.R * V > 256 else 2  # few enough heads for segments
    HV = H * variant.R
    B, T = (max(2, MANY // (HV * -(-V // 64))), SHORT) if many else (2, LENGTH)

    def normal(*shape):
        return rng.standard_normal((B, *shape), np.float32)

    x = {"q": normal(T, H, K), "k": normal(T, H, K), "v": normal(T, HV, V)}
    x |= {"g": normal(T, HV, *([K] if variant.op == "kda" else [])), "beta": 1 / (1 + np.exp(-normal(T, HV)))}
    x["initial_state"] = normal(HV, K, V)
    x["k"][1::2] = 1 + 0.15 * x["k"][1::2]
    if variant.gate:
        x["g"][1::2] -= 7
        x |= {"A_log": normal(HV)[0], "dt_bias": normal(HV, K)[0]}
    else:
        x["g"] = -np.exp(x["g"] - 1)
        x["g"][1::2] *= 1e-3
    # As of a loss that is a mean over many tokens: 1e-9.
    cotangents = {"o": normal(T, HV, V) * np.float32(2.0**-30), "final_state": normal(HV, K, V) * np.float32(2.0**-30)}
    dtype = jnp.dtype(variant.dtype)
    x |= {name: x[name].astype(dtype) for name in ("qkvg" if variant.gate else "qkv")}
    cotangents["o"] = cotangents["o"].astype(dtype)
    ids = np.zeros((B, T), np.int32)
    if variant.packed:
        # One border at the edge of a chunk, one close to it, one document of one token; none where a piece starts.
        for border in (30, 64, 65, T // 2 | 1):
            ids[0, border:] += 1
    return x, cotangents, ids


def _in_pieces(fn: Callable) -> Callable:
    """A recurrence that holds states of one piece of a row, not of each token, until its backward pass. Documents
    must not start where a piece does."""

    def whole(q, k, v, g, beta, scale, initial_state, ids, *parameters):
        T = v.shape[1]
        count = -(-T // PIECE)

        def cut(x, mode="constant", **how):
            x = jnp.pad(x, [(0, 0), (0, count * PIECE - T)] + [(0, 0)] * (x.ndim - 2), mode=mode, **how)
            return jnp.moveaxis(x.reshape(x.shape[0], count, PIECE, *x.shape[2:]), 1, 0)

        @jax.checkpoint
        def step(state, piece):
            *tokens, ids = piece
            o, state = fn(*tokens, scale, state, ids, *parameters)
            return state, o

        # Zeros at the end leave a state as it is, and so do raw gates so low that nothing decays.
        gates = cut(g, constant_values=-1e30 if parameters else 0.0)
        state, o = jax.lax.scan(step, initial_state, (*map(cut, (q, k, v)), gates, cut(beta), cut(ids, "edge")))
        return jnp.moveaxis(o, 0, 1).reshape(v.shape[0], -1, *v.shape[2:])[:, :T], state

    return whole


# -- what is remembered ----------------------------------------------------------------------------------------


def _key(variant: Variant) -> dict[str, str]:
    """All that a result depends on."""
    device = jax.local_devices()[0]
    found = {
        "variant": str(variant),
        "length": str(LENGTH),
        "device": device.device_kind,
        "architecture": launch.architecture(),
        "runtime": " ".join(device.client.platform_version.split()),
        "driver": _driver(),
        "sources": _sources(variant.op),
    }
    for name in ("jax", "jaxlib", "triton", "jax-triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _driver() -> str:
    for path in ("/sys/module/amdgpu/version", "/sys/module/nvidia/version", "/proc/sys/kernel/osrelease"):
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except OSError:
            continue
    return ""


def _sources(op: str) -> str:
    """Digest of the kernels' sources and tile tables."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    files = [*folder.glob("*.py"), *(folder / "delta").glob("*.py")]
    files += [*(folder / op).rglob("*.py"), *(folder / op).rglob("*.json")]
    for path in sorted(files):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _cache_file(key: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return folder / "hybrid_jax" / "selftest" / f"{digest}.json"


def _recall(path: Path, key: Mapping[str, str]) -> bool:
    """Whether the file says that the kernels of `key` passed."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("key") == key and bool(record.get("errors"))


def _remember(path: Path, key: Mapping[str, str], errors: Mapping[str, float]) -> None:
    """Writes a file that is there whole or not at all; a folder that cannot be written costs the next run a test."""
    record = {"date": time.strftime("%Y-%m-%d"), "key": key, "errors": errors}
    scratch = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=1) + "\n")
        os.replace(scratch, path)
    except OSError as error:
        log.debug("kernels: the self-test's result is not kept: %s: %s", path, error)
        if scratch and os.path.exists(scratch):
            os.unlink(scratch)
