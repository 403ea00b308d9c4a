"""How a Triton kernel is called: on a GPU, in Triton's interpreter on a CPU, or only recorded for a compiler.

A kernel is a function under `@triton.jit`. Its parameters are, in this order, a pointer for each input, a
pointer for each output, and `tl.constexpr` parameters; every size is a constexpr, so that one call is one
compiled kernel and the three executors cannot disagree. Triton and jax-triton are imported when needed only.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hybrid_jax.errors import UserError

# Contract a*b+c to one instruction. Said explicitly: Triton 3.10 will change its default.
FP_FUSION = True
AMD_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
CUDA_OPTIONS = ("maxnreg",)

# JAX's names of the types a pointer may have, and Triton's.
POINTERS = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "bool": "i1",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint32": "u32",
}  # fmt: skip

_GRID_LIMITS = (2**31 - 1, 65535, 65535)
_MAX_THREADS = 1024
_TABLES = Path(__file__).parent
# Parameter names that jax-triton's own call would take for itself.
_RESERVED = frozenset(
    "kernel fn grid name num_warps num_stages num_ctas compute_capability debug backend_options out_shape out_shapes "
    "out_type enable_fp_fusion input_output_aliases zeroed_outputs serialized_metadata cost_estimate has_side_effect "
    "custom_call_target_name scalar_args in_tree metaparams".split()
)


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one kernel is compiled for one shape class on one architecture: a row of a tile table.

    constants: tile sizes that the kernel takes as tl.constexpr. options: AMD_OPTIONS and CUDA_OPTIONS, each ignored on
    the other's GPUs.
    Raises ValueError when a number is out of range or an option is unknown.
    """

    num_warps: int
    num_stages: int
    constants: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, int], ...] = ()

    def __post_init__(self):
        for name in ("num_warps", "num_stages"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        if self.num_warps & (self.num_warps - 1):
            raise ValueError(f"num_warps must be a power of two, got {self.num_warps}")
        for field in ("constants", "options"):
            for key, value in getattr(self, field):
                if type(value) not in (int, bool):
                    raise ValueError(f"{field}.{key} must be an integer, got {value!r}")
        for key, _ in self.options:
            if key not in AMD_OPTIONS + CUDA_OPTIONS:
                raise ValueError(f"unknown option {key!r}, known are {', '.join(AMD_OPTIONS + CUDA_OPTIONS)}")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One recorded call: all that its compilation depends on, and its grid.

    pointers: Triton's type names, inputs then outputs. constants: sorted by name, the tile's among them.
    """

    kernel: Any
    pointers: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    tile: Tile
    grid: tuple[int, ...]
    arch: str


def launch(
    kernel: Any,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    tile: Tile,
    constants: Mapping[str, Any],
) -> tuple[jax.Array, ...]:
    """Runs `kernel` once per point of `grid` (1 to 3 integers) and returns its outputs, which start unset.

    The names of the kernel's constexpr parameters are exactly the keys of `constants` and of tile.constants.
    There is no derivative and no vmap. An operation that GSPMD may split calls this inside jax.shard_map.

    Raises TypeError or ValueError, naming kernel and argument, for a call that does not fit the kernel;
    UserError where no Triton kernel can run.
    """
    mode, arch = executor(), architecture()
    inputs, outputs = tuple(jnp.asarray(x) for x in inputs), tuple(outputs)
    name = _name(kernel)
    values = _bind(kernel, len(inputs) + len(outputs), tile, constants)
    types = [x.dtype.name for x in inputs] + [x.dtype.name for x in outputs]
    if unknown := sorted(set(types) - POINTERS.keys()):
        raise TypeError(f"kernel {name}: no pointer to {unknown[0]}")
    _check_grid(name, grid)
    warp = 64 if arch.startswith("gfx") else 32
    if tile.num_warps * warp > _MAX_THREADS:
        raise ValueError(f"kernel {name}: {tile.num_warps} warps of {warp} threads exceed {_MAX_THREADS} on {arch}")

    if mode == "recording":
        pointers = tuple(POINTERS[x] for x in types)
        record = Launch(kernel, pointers, tuple(sorted(values.items())), tile, grid, arch)
        _recorder.value.launches.append(record)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in outputs)
    interpreted = type(kernel).__name__ == "InterpretedFunction"
    if interpreted != (mode == "interpreter"):
        raise RuntimeError(f"kernel {name}: TRITON_INTERPRET was changed after Triton was imported")
    if mode == "interpreter":
        from hybrid_jax.kernels import interpreter

        return interpreter.run(kernel, _parameters(kernel.fn)[0], inputs, outputs, grid, values)
    return _run_on_gpu(kernel, inputs, outputs, grid, tile, values, arch)


def executor() -> str:
    """What a launch does now: "recording", "interpreter" or "gpu". Raises UserError where none can."""
    if _recorder.value is not None:
        return "recording"
    if reason := why_not():
        raise UserError(f"config.kernels.backend: triton cannot run here: {reason}; choose auto or chunked")
    return "interpreter" if interpreting() else "gpu"


def why_not() -> str:
    """Why Triton kernels cannot run here, in one line; "" if they can."""
    if _recorder.value is not None:
        return ""
    if interpreting():
        missing = [name for name in ("triton", "torch") if importlib.util.find_spec(name) is None]
        needs = f"Triton's interpreter needs {' and '.join(missing)} (pip install {' '.join(missing)})"
        return needs if missing else ""
    device = _device()
    if device.platform not in ("gpu", "cuda", "rocm"):
        return f"it needs a GPU, and jax sees only {device.platform} devices"
    arch = _architecture(device)
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package.replace('_', '-')} is not installed (pip install 'hybrid_jax[triton]')"
    if (installed := _triton_version()) < (3, 7, 1):
        return f"Triton {'.'.join(map(str, installed))} miscompiles kernels on some GPUs; install triton>=3.7.1"
    if arch.startswith("gfx"):
        if not re.fullmatch(r"gfx9[0-9a-f]{2}", arch):
            return f"jax-triton compiles for wavefronts of 64 lanes, and an AMD {arch} GPU has 32"
        config: Any = jax.config
        directory = config.jax_compilation_cache_dir
        if directory and config.jax_enable_compilation_cache:
            # jax-triton puts the path of a temporary file in the program, and the file is gone later.
            return (
                f"on ROCm jax's persistent compilation cache ({directory}) cannot hold Triton kernels; "
                "unset JAX_COMPILATION_CACHE_DIR or set JAX_ENABLE_COMPILATION_CACHE=false"
            )
    elif not arch.startswith("sm_"):
        return f"unknown kind of GPU: {arch}"
    elif int(arch[3:]) < 80:
        return f"it needs an NVIDIA GPU of compute capability 8.0 or newer, this one is {arch}"
    return ""


def unfit(dtype: str) -> str:
    """Why kernels compute wrongly here with matmul inputs of `dtype`; "" if they do not."""
    if _recorder.value is None and interpreting() and dtype == "bfloat16":
        return "bfloat16 inputs, which Triton's interpreter multiplies wrongly (set config.train.compute_dtype=float32)"
    return ""


def architecture() -> str:
    """The GPU that launches are for: "gfx942", "gfx950", "sm_90", ...; "default" in the interpreter."""
    if _recorder.value is not None:
        return _recorder.value.arch
    return "default" if interpreting() else _architecture(_device())


@contextlib.contextmanager
def recording(arch: str) -> Iterator[list[Launch]]:
    """Within it, and under jax.eval_shape, launches run nothing and append themselves to the list it yields."""
    recorder = _Recorder(arch, [])
    with _recorder(recorder):
        yield recorder.launches


def tiles(
    op: str, shape_class: str, arch: str, rows: Mapping[str, Mapping[str, Sequence[int]]] | None = None
) -> dict[str, Tile]:
    """The tiles of `op` by row, from kernels/<op>/tiles/<arch>.json, or default.json where that is missing.

    rows: the rows that a shape class has, each with its constants and the values they may have (None: any).
    Raises UserError, naming the file, for a shape class that is not in it or an entry that is no such tile.
    """
    folder = _TABLES / op / "tiles"
    path = folder / f"{arch}.json"
    if not path.exists():
        path = folder / "default.json"
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"tile table {path}: {error}") from None
    if not isinstance(table, dict) or shape_class not in table:
        known = ", ".join(table) if isinstance(table, dict) else "nothing"
        raise UserError(f"tile table {path}: no shape class {shape_class!r}; it has {known}")
    if not isinstance(table[shape_class], dict):
        raise UserError(f"tile table {path}: {shape_class}: not an object with a row for each kernel")
    found = {name: _tile(f"{path}: {shape_class}.{name}", row) for name, row in table[shape_class].items()}
    if rows is not None:
        if found.keys() != rows.keys():
            name = sorted(found.keys() ^ rows.keys())[0]
            problem = "unknown row" if name in found else "missing row"
            raise UserError(f"tile table {path}: {shape_class}: {problem} {name!r}; there have to be {', '.join(rows)}")
        for name, allowed in rows.items():
            constants = dict(found[name].constants)
            where = f"tile table {path}: {shape_class}.{name}.constants"
            if constants.keys() != allowed.keys():
                raise UserError(f"{where}: has {', '.join(constants) or 'none'}, needs {', '.join(allowed)}")
            for key, values in allowed.items():
                if constants[key] not in values:
                    raise UserError(f"{where}.{key}: {constants[key]} is not one of {', '.join(map(str, values))}")
    return found


# -- checks ----------------------------------------------------------------------------------------------------


def _tile(where: str, row: Any) -> Tile:
    try:
        if not isinstance(row, dict):
            raise TypeError("not an object")
        fields = ("num_warps", "num_stages", "constants", "options")
        if unknown := sorted(row.keys() - set(fields)):
            raise TypeError(f"unknown field {unknown[0]!r}, known are {', '.join(fields)}")
        if missing := [name for name in fields[:2] if name not in row]:
            raise TypeError(f"{missing[0]} is missing")
        pairs = {key: tuple(dict(row.get(key, {})).items()) for key in ("constants", "options")}
        return Tile(**{**row, **pairs})
    except (TypeError, ValueError) as error:
        raise UserError(f"tile table {where}: {error}") from None


def _name(kernel: Any) -> str:
    return getattr(kernel, "__name__", str(kernel))


@functools.cache
def _parameters(function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a kernel's pointers and of its constexpr parameters."""
    found = inspect.signature(function).parameters.values()
    constexpr = [("constexpr" in str(p.annotation)) for p in found]
    if constexpr != sorted(constexpr):
        raise TypeError(f"kernel {function.__name__}: a pointer comes after a constexpr parameter")
    names = [p.name for p in found]
    count = constexpr.count(False)
    if taken := _RESERVED.intersection(names[count:]):
        raise TypeError(f"kernel {function.__name__}: {sorted(taken)[0]!r} is a word of jax-triton; rename it")
    return tuple(names[:count]), tuple(names[count:])


def _bind(kernel: Any, arrays: int, tile: Tile, constants: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every constexpr parameter; raises TypeError unless they and the arrays fit the kernel."""
    where = f"kernel {_name(kernel)}"
    if not hasattr(kernel, "fn"):
        raise TypeError(f"{where}: not a function under @triton.jit")
    pointers, names = _parameters(kernel.fn)
    if arrays != len(pointers):
        raise TypeError(f"{where}: {arrays} inputs and outputs for {len(pointers)} pointers ({', '.join(pointers)})")
    if twice := [key for key, _ in tile.constants if key in constants]:
        raise TypeError(f"{where}: {twice[0]!r} is given by the call and by its tile")
    values = {**constants, **dict(tile.constants)}
    if unknown := sorted(values.keys() - set(names)):
        raise TypeError(f"{where}: no constexpr parameter {unknown[0]!r}; it has {', '.join(names)}")
    if missing := [name for name in names if name not in values]:
        raise TypeError(f"{where}: constexpr parameter {missing[0]!r} is missing")
    for name, value in values.items():
        if type(value) not in (int, float, bool, str):
            raise TypeError(f"{where}: {name} must be a Python int, float, bool or str, got {type(value).__name__}")
    return values


def _check_grid(name: str, grid: tuple[int, ...]) -> None:
    if not isinstance(grid, tuple) or not 1 <= len(grid) <= 3 or any(type(n) is not int for n in grid):
        raise TypeError(f"kernel {name}: grid must be a tuple of 1 to 3 integers, got {grid!r}")
    for axis, n, limit in zip("xyz", grid, _GRID_LIMITS, strict=False):
        if not 1 <= n <= limit:
            raise ValueError(f"kernel {name}: grid {axis}={n} is not within 1 and {limit}")


# -- the machine -----------------------------------------------------------------------------------------------


def interpreting() -> bool:
    """Whether Triton was told to interpret kernels on the CPU, by TRITON_INTERPRET=1 (before its import)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _device() -> jax.Device:
    return jax.local_devices()[0]


def _architecture(device: Any) -> str:
    capability = str(getattr(device, "compute_capability", "")).split(":")[0]  # gfx942:sramecc+:xnack-, or 9.0
    if re.fullmatch(r"\d+\.\d+", capability):
        return "sm_" + capability.replace(".", "")
    return capability or device.platform


def _triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:3])


# -- recording -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Recorder:
    arch: str
    launches: list[Launch]


# Part of jax's trace cache key: a trace made while recording is never run, nor one made before it reused.
_recorder = jax.make_user_context(default_value=None)


# -- GPU -------------------------------------------------------------------------------------------------------


@functools.cache
def _jax_triton() -> Any:
    """The jax_triton module. Its import clears TRITON_CACHE_DIR, and an empty one breaks other users of Triton."""
    saved = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    os.environ.pop("TRITON_CACHE_DIR", None)
    if saved is not None:
        os.environ["TRITON_CACHE_DIR"] = saved
    return jax_triton


def _run_on_gpu(kernel, inputs, outputs, grid, tile, constants, arch) -> tuple[jax.Array, ...]:
    call = _jax_triton().triton_call
    amd = arch.startswith("gfx")
    if amd:
        _mend_amd_backend()
    known = AMD_OPTIONS if amd else CUDA_OPTIONS
    options = tuple((key, value) for key, value in tile.options if key in known)
    how: dict[str, Any] = dict(
        kernel=kernel, name=_name(kernel), grid=grid, num_warps=tile.num_warps, num_stages=tile.num_stages, **constants
    )
    if "out_type" in inspect.signature(call).parameters:  # jax-triton 0.4
        how |= dict(out_type=outputs, backend_options={"enable_fp_fusion": FP_FUSION, **dict(options)})
    else:
        # NVIDIA's only option changes no result: without it a kernel is slower.
        carried = _FusionAndOptions(options) if options and amd else FP_FUSION
        how |= dict(out_shape=outputs, enable_fp_fusion=carried)
    return tuple(call(*inputs, **how))


@dataclasses.dataclass(frozen=True)
class _FusionAndOptions:
    options: tuple[tuple[str, int], ...]


@functools.cache
def _mend_amd_backend() -> None:
    """Makes Triton's AMD compiler take what jax-triton hands it.

    jax-triton 0.3 has no argument for AMD's options. They travel as its `enable_fp_fusion`, the one value that
    reaches the compiler as it is and also belongs to its cache key. And jax-triton up to 0.4.1 passes empty
    metadata, in which Triton 3.9 looks for the options that triton.compile writes there.
    """
    from triton.backends.amd.compiler import HIPBackend

    parse, lower = HIPBackend.parse_options, HIPBackend.make_llir

    @functools.wraps(parse)
    def parse_options(self, opts):
        carried = opts.get("enable_fp_fusion")
        if isinstance(carried, _FusionAndOptions):
            opts = {**opts, "enable_fp_fusion": FP_FUSION, **dict(carried.options)}
        return parse(self, opts)

    @functools.wraps(lower)
    def make_llir(src, metadata, options):
        metadata.setdefault("num_ctas", options.num_ctas)
        return lower(src, metadata, options)

    HIPBackend.parse_options, HIPBackend.make_llir = parse_options, staticmethod(make_llir)
