"""How Triton kernels are called: argument checks, recording, the interpreter, and what jax-triton is handed.

Kernels here run in the interpreter; what needs Triton's compiler runs in a process of its own (this file, as a
program), since TRITON_INTERPRET holds for a whole process.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from hybrid_jax.errors import UserError
from hybrid_jax.kernels import launch as lib
from hybrid_jax.kernels.launch import Tile, launch, recording

ROOT = Path(__file__).parents[2]
TILE = Tile(4, 2, (("BM", 32), ("BN", 64)), (("waves_per_eu", 2), ("matrix_instr_nonkdim", 32), ("maxnreg", 96)))


@triton.jit
def scaled_matmul(
    x,
    y,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    m = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None].to(tl.int64)
    n = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :].to(tl.int64)
    k = tl.arange(0, BK)
    a = tl.load(x + m * K + k[None, :], mask=(m < M) & (k < K)[None, :], other=0.0)
    b = tl.load(y + k[:, None] * N + n, mask=(k < K)[:, None] & (n < N), other=0.0)
    product = tl.dot(a, b, input_precision="ieee", out_dtype=tl.float32) * SCALE
    tl.store(out + m * N + n, product.to(out.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit
def copy(x, out, N: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + TO + at, tl.load(x + FROM + at, mask=at < N), mask=at < N)


@triton.jit
def overwrite(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, at)
    tl.store(out + at, at)


@triton.jit
def late_pointer(x, N: tl.constexpr, out):
    tl.store(out, tl.load(x) + N)


@triton.jit
def taken_word(x, out, grid: tl.constexpr):
    tl.store(out, tl.load(x) + grid)


def matmul(x, y, dtype=jnp.float32, tile=TILE):
    (M, K), N = x.shape, y.shape[1]
    sizes = dict(M=M, N=N, K=K, SCALE=0.5, BK=triton.next_power_of_2(K))
    grid = (-(-M // 32), -(-N // 64))
    (out,) = launch(
        scaled_matmul, (x, y), (jax.ShapeDtypeStruct((M, N), dtype),), grid=grid, tile=tile, constants=sizes
    )
    return out


def copied(x, size, N, FROM=0, TO=0):
    out = jax.ShapeDtypeStruct((size,), x.dtype)
    sizes = dict(N=N, FROM=FROM, TO=TO, BLOCK=triton.next_power_of_2(N))
    return launch(copy, (x,), (out,), grid=(1,), tile=Tile(1, 1), constants=sizes)[0]


def arrays(M=70, K=20, N=90, dtype=np.float32):
    rng = np.random.default_rng(0)
    return rng.standard_normal((M, K)).astype(dtype), rng.standard_normal((K, N)).astype(dtype)


# -- the interpreter -------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_interpreter_runs_a_kernel(wrap):
    x, y = arrays()
    np.testing.assert_allclose(wrap(matmul)(x, y), 0.5 * x @ y, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool", "int8"])
def test_interpreter_stores_every_type(dtype):
    x = jnp.arange(37).astype(dtype)
    np.testing.assert_array_equal(copied(x, 37, 37), x)


@pytest.mark.torch
def test_outputs_start_unset():
    out = copied(jnp.ones(5), 8, 3)
    np.testing.assert_array_equal(np.isnan(out), [False] * 3 + [True] * 5)
    np.testing.assert_array_equal(copied(jnp.arange(5), 4, 2), [0, 1, -1, -1])


@pytest.mark.torch
@pytest.mark.parametrize("TO", [-1, 6])
def test_a_write_outside_of_an_output_is_seen(TO):
    with pytest.raises(Exception, match="kernel copy wrote outside of out"):
        jax.block_until_ready(copied(jnp.ones(3), 8, 3, TO=TO))


@pytest.mark.torch
def test_a_read_outside_of_an_input_gives_nan():
    np.testing.assert_array_equal(np.isnan(copied(jnp.ones(3), 3, 3, FROM=1)), [False, False, True])


@pytest.mark.torch
def test_a_write_to_an_input_is_seen():
    out = jax.ShapeDtypeStruct((4,), jnp.int32)
    with pytest.raises(Exception, match="kernel overwrite wrote to or beside its input x"):
        call = launch(overwrite, (jnp.zeros(4, int),), (out,), grid=(1,), tile=Tile(1, 1), constants=dict(BLOCK=4))
        jax.block_until_ready(call)


# -- checks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(constants=dict(N=3, FROM=0, TO=0, BLOCK=4, BLCK=4)), "kernel copy: no constexpr parameter 'BLCK'"),
        (dict(constants=dict(N=3, FROM=0, BLOCK=4)), "kernel copy: constexpr parameter 'TO' is missing"),
        (dict(tile=Tile(1, 1, (("N", 3),))), "kernel copy: 'N' is given by the call and by its tile"),
        (dict(constants=dict(N=np.int64(3), FROM=0, TO=0, BLOCK=4)), "kernel copy: N must be a Python int"),
        (dict(inputs=()), r"kernel copy: 1 inputs and outputs for 2 pointers \(x, out\)"),
        (dict(kernel=late_pointer, constants=dict(N=3)), "late_pointer: a pointer comes after a constexpr"),
        (dict(kernel=taken_word, constants=dict(grid=3)), "taken_word: 'grid' is a word of jax-triton"),
        (dict(kernel=print), "kernel print: not a function under @triton.jit"),
        (dict(outputs=(jax.ShapeDtypeStruct((3,), jnp.complex64),)), "kernel copy: no pointer to complex64"),
        (dict(grid=(1, 65536)), "kernel copy: grid y=65536 is not within 1 and 65535"),
        (dict(grid=(2**31,)), "kernel copy: grid x=2147483648 is not within 1 and 2147483647"),
        (dict(grid=(0,)), "kernel copy: grid x=0 is not within"),
        (dict(grid=(1, 1, 1, 1)), "kernel copy: grid must be a tuple of 1 to 3 integers"),
        (dict(grid=4), "kernel copy: grid must be a tuple of 1 to 3 integers"),
        (dict(tile=Tile(32, 1)), "kernel copy: 32 warps of 64 threads exceed 1024 on gfx942"),
    ],
)
def test_a_call_that_does_not_fit_its_kernel(change, message):
    call = dict(
        kernel=copy,
        inputs=(jnp.ones(3),),
        outputs=(jax.ShapeDtypeStruct((3,), jnp.float32),),
        grid=(1,),
        tile=Tile(1, 1),
        constants=dict(N=3, FROM=0, TO=0, BLOCK=4),
    )
    with recording("gfx942"), pytest.raises((TypeError, ValueError), match=message):
        launch(**{**call, **change})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 1), "num_warps must be a power of two, got 3"),
        ((0, 1), "num_warps must be a positive integer, got 0"),
        ((4, 1.5), "num_stages must be a positive integer, got 1.5"),
        ((4, 1, (("BV", "64"),)), "constants.BV must be an integer, got '64'"),
        ((4, 1, (), (("waves", 1),)), "unknown option 'waves', known are waves_per_eu"),
    ],
)
def test_a_tile_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Tile(*arguments)


def test_tiles_come_from_the_architecture_or_the_default(tmp_path, monkeypatch):
    monkeypatch.setattr(lib, "_TABLES", tmp_path)
    folder = tmp_path / "op" / "tiles"
    folder.mkdir(parents=True)
    row = dict(num_warps=2, num_stages=1, constants=dict(BV=64), options=dict(waves_per_eu=1))
    (folder / "gfx942.json").write_text(json.dumps({"k64": {"scan": row}}))
    (folder / "default.json").write_text(json.dumps({"k64": {"scan": dict(num_warps=4, num_stages=1)}}))
    assert lib.tiles("op", "k64", "gfx942") == {"scan": Tile(2, 1, (("BV", 64),), (("waves_per_eu", 1),))}
    assert lib.tiles("op", "k64", "sm_90") == lib.tiles("op", "k64", "default") == {"scan": Tile(4, 1)}
    with pytest.raises(UserError, match=r"gfx942.json: no shape class 'k128'; it has k64"):
        lib.tiles("op", "k128", "gfx942")
    with pytest.raises(UserError, match=r"default.json: .*No such file"):
        lib.tiles("other", "k64", "gfx942")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "gfx942.json: Expecting"),
        ("[]", "no shape class 'k64'; it has nothing"),
        ('{"k64": {"scan": 4}}', "k64.scan: not an object"),
        ('{"k64": {"scan": {"num_warps": 4}}}', "k64.scan: .*num_stages"),
        ('{"k64": {"scan": {"num_warps": 4, "num_stages": 1, "warps": 4}}}', "k64.scan: .*warps"),
        ('{"k64": {"scan": {"num_warps": 3, "num_stages": 1}}}', "k64.scan: num_warps must be a power of two"),
        ('{"k64": {"scan": {"num_warps": 4, "num_stages": 1, "options": 2}}}', "k64.scan: "),
    ],
)
def test_a_malformed_table_names_its_entry(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr(lib, "_TABLES", tmp_path)
    (tmp_path / "op" / "tiles").mkdir(parents=True)
    (tmp_path / "op" / "tiles" / "gfx942.json").write_text(text)
    with pytest.raises(UserError, match=message):
        lib.tiles("op", "k64", "gfx942")


# -- recording -------------------------------------------------------------------------------------------------


def test_recording_notes_launches_and_runs_nothing():
    x, y = (jax.ShapeDtypeStruct(z.shape, jnp.bfloat16) for z in arrays())
    with recording("gfx942") as launches:
        out = jax.eval_shape(jax.jit(matmul), x, y)
        assert (lib.executor(), lib.architecture(), lib.why_not()) == ("recording", "gfx942", "")
    assert (out.shape, out.dtype) == ((70, 90), jnp.float32)
    (found,) = launches
    assert found.kernel is scaled_matmul
    assert found.pointers == ("bf16", "bf16", "fp32")
    assert found.constants == tuple(sorted(dict(BK=32, BM=32, BN=64, K=20, M=70, N=90, SCALE=0.5).items()))
    assert (found.tile, found.grid, found.arch) == (TILE, (3, 2), "gfx942")


@pytest.mark.torch
def test_traces_of_a_recording_are_not_reused():
    x, y = arrays()
    fn = jax.jit(matmul)
    before = fn(x, y)
    for arch in ("gfx942", "gfx950", "gfx950"):
        with recording(arch) as launches:
            jax.eval_shape(fn, x, y)
        assert [found.arch for found in launches] == [arch]
    np.testing.assert_array_equal(fn(x, y), before)
    np.testing.assert_array_equal(jax.jit(matmul)(x, y), before)


# -- where kernels run -----------------------------------------------------------------------------------------


def device(monkeypatch, platform, capability=""):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    fake = types.SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(lib, "_device", lambda: fake)


@pytest.mark.parametrize(
    ("platform", "capability", "architecture", "reason"),
    [
        ("cpu", "", "cpu", "it needs a GPU, and jax sees only cpu devices"),
        ("gpu", "gfx942", "gfx942", ""),
        ("gpu", "gfx950:sramecc+:xnack-", "gfx950", ""),
        ("gpu", "gfx90a", "gfx90a", ""),
        ("gpu", "gfx1100", "gfx1100", "jax-triton compiles for wavefronts of 64 lanes, and an AMD gfx1100 GPU has 32"),
        ("gpu", "gfx1201", "gfx1201", "jax-triton compiles for wavefronts of 64 lanes, and an AMD gfx1201 GPU has 32"),
        ("gpu", "9.0", "sm_90", ""),
        ("gpu", "10.0", "sm_100", ""),
        ("gpu", "7.5", "sm_75", "it needs an NVIDIA GPU of compute capability 8.0 or newer, this one is sm_75"),
        ("gpu", "xe-hpc", "xe-hpc", "unknown kind of GPU: xe-hpc"),
    ],
)
def test_why_not_on_each_device(monkeypatch, platform, capability, architecture, reason):
    device(monkeypatch, platform, capability)
    assert lib.architecture() == architecture
    assert lib.why_not() == reason
    if reason:
        with pytest.raises(UserError, match="triton cannot run here: ") as error:
            matmul(*arrays())
        assert reason in str(error.value) and "choose auto or chunked" in str(error.value)
    else:
        assert lib.executor() == "gpu"


def test_why_not_names_what_is_missing(monkeypatch):
    found = importlib.util.find_spec
    device(monkeypatch, "gpu", "9.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax_triton" else found(name))
    assert lib.why_not().startswith("jax-triton is not installed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    monkeypatch.setattr(triton, "__version__", "3.6.0+git12")
    assert lib.why_not() == "Triton 3.6.0 miscompiles kernels on some GPUs; install triton>=3.7.1"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert lib.why_not() == "Triton's interpreter needs torch (pip install torch)"
    with pytest.raises(UserError, match="triton cannot run here: Triton's interpreter needs torch"):
        lib.executor()


def test_rocm_refuses_the_persistent_compilation_cache(monkeypatch, tmp_path):
    device(monkeypatch, "gpu", "gfx942")
    old = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert "unset JAX_COMPILATION_CACHE_DIR or set JAX_ENABLE_COMPILATION_CACHE=false" in lib.why_not()
        jax.config.update("jax_enable_compilation_cache", False)
        assert lib.why_not() == ""
        jax.config.update("jax_enable_compilation_cache", True)
        device(monkeypatch, "gpu", "9.0")
        assert lib.why_not() == ""
    finally:
        jax.config.update("jax_compilation_cache_dir", old)
        jax.config.update("jax_enable_compilation_cache", True)


def test_a_kernel_of_the_other_executor_is_refused(monkeypatch):
    device(monkeypatch, "gpu", "9.0")
    with pytest.raises(RuntimeError, match="kernel scaled_matmul: TRITON_INTERPRET was changed"):
        matmul(*arrays())


# -- jax-triton ------------------------------------------------------------------------------------------------


def call_03(*args, kernel, out_shape, grid, name="", num_warps=None, num_stages=None, enable_fp_fusion=True, **meta):
    return _called(
        args, out_shape, dict(kernel=kernel, grid=grid, fusion=enable_fp_fusion), num_warps, num_stages, meta
    )


def call_04(*args, kernel, out_type=None, grid, name="", num_warps=None, num_stages=None, backend_options=None, **meta):
    return _called(args, out_type, dict(kernel=kernel, grid=grid, options=backend_options), num_warps, num_stages, meta)


def _called(args, outputs, call, num_warps, num_stages, meta):
    SEEN.append(call | dict(warps=num_warps, stages=num_stages, meta=meta))
    return [jnp.full(x.shape, len(args), x.dtype) for x in outputs]


SEEN: list[dict] = []


@pytest.mark.parametrize("call", [call_03, call_04])
@pytest.mark.parametrize("capability", ["gfx942", "9.0"])
def test_what_jax_triton_is_handed(monkeypatch, tmp_path, call, capability):
    device(monkeypatch, "gpu", capability)
    monkeypatch.setattr(lib, "_mend_amd_backend", lambda: None)
    lines = [
        "import os",
        "os.environ['TRITON_CACHE_DIR'] = ''",
        f"from {__name__} import {call.__name__} as triton_call",
    ]
    (tmp_path / "jax_triton.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "jax_triton", None)  # undone at the end, whatever is imported until then
    del sys.modules["jax_triton"]
    monkeypatch.setattr(lib, "_jax_triton", lib._jax_triton.__wrapped__)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/keep")
    compiled = triton.runtime.JITFunction(scaled_matmul.fn)
    monkeypatch.setitem(globals(), "scaled_matmul", compiled)
    SEEN.clear()
    np.testing.assert_array_equal(matmul(*arrays()), np.full((70, 90), 2))
    assert os.environ["TRITON_CACHE_DIR"] == "/keep"
    (seen,) = SEEN
    options = {"waves_per_eu": 2, "matrix_instr_nonkdim": 32} if capability == "gfx942" else {"maxnreg": 96}
    if call is call_03:
        fusion = seen.pop("fusion")
        amd = capability == "gfx942"
        assert (dict(fusion.options) if amd else fusion) == (options if amd else lib.FP_FUSION)
        assert hash(fusion) == hash(dataclasses.replace(fusion) if amd else fusion)
    else:
        assert seen.pop("options") == {"enable_fp_fusion": lib.FP_FUSION, **options}
    meta = dict(BK=32, BM=32, BN=64, K=20, M=70, N=90, SCALE=0.5)
    assert seen == dict(kernel=compiled, grid=(3, 2), warps=4, stages=2, meta=meta)


def in_process(*arguments, **environment):
    """Runs this file as a program, without the interpreter, and returns the lines it prints."""
    clean = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "XLA_FLAGS")}
    clean |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=clean, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.torch
def test_interpreter_inside_shard_map():
    flags = "--xla_force_host_platform_device_count=8"
    assert in_process("shard_map", TRITON_INTERPRET="1", XLA_FLAGS=flags)[-1] == "agrees"


@pytest.mark.parametrize("capability", ["gfx942", "9.0"])
def test_the_installed_jax_triton_compiles_what_the_gate_compiles(capability, tmp_path):
    """Its real lowering for a GPU that is not there; only jaxlib's part, which would load the binary, is played."""
    lines = in_process("lower", capability, TRITON_CACHE_DIR=str(tmp_path))
    assert lines[-1] == ("the same binary" if capability == "gfx942" else ".target sm_90a")


def _shard_map():
    size = 2**19  # 2 MB a device: with jax.pure_callback this hangs
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")

    def twice(x):
        return copied(copied(2 * x, size, size) + copied(x, size, size), size, size)

    fn = jax.jit(jax.shard_map(twice, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
    x = np.arange(8 * size, dtype=np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(fn(x), 3 * x)
    print("agrees")


def _lower(capability):
    kernels = []

    class Plugin(types.ModuleType):
        get_serialized_metadata = None

        def get_compute_capability(self, device):
            return 90

        def get_arch_details(self, device):
            return "gfx942:sramecc+:xnack-"

        def create_array_parameter(self, zeroed, alignment):
            assert (zeroed, alignment) == (0, 16)

        def TritonKernel(self, name, num_warps, num_ctas, shared, binary, *_):
            kernels.append(binary)

        def TritonKernelCall(self, kernel, x, y, z, parameters):
            assert (x, y, z) == (3, 2, 1)
            return types.SimpleNamespace(to_proto=lambda name, metadata: name.encode())

    import jax._src.lib
    import jaxlib

    jaxlib.gpu_triton = jax._src.lib.gpu_triton = sys.modules["jaxlib.gpu_triton"] = Plugin("gpu_triton")
    lib._device = lambda: types.SimpleNamespace(platform="gpu", compute_capability=capability)
    rocm = capability.startswith("gfx")
    x, y = (jax.ShapeDtypeStruct(z.shape, jnp.bfloat16) for z in arrays(K=64, N=96))
    program = jax.jit(matmul).trace(x, y).lower(lowering_platforms=("rocm" if rocm else "cuda",))
    assert "triton_kernel_call" in program.as_text()
    (binary,) = kernels
    if not rocm:
        print(next(line for line in binary.splitlines() if line.startswith(".target")))
        return

    from hybrid_jax.kernels import compiling

    with recording(capability) as launches:
        jax.eval_shape(matmul, x, y)
    job = compiling.as_job("test", launches[0])
    with_options = compiling.build(job).asm["hsaco"]
    without = compiling.build(dataclasses.replace(job, options=())).asm["hsaco"]
    assert with_options != without, "the options change nothing here: choose others"
    print("the same binary" if Path(binary).read_bytes() == with_options else "another binary")


if __name__ == "__main__":
    {"shard_map": _shard_map, "lower": _lower}[sys.argv[1]](*sys.argv[2:])
