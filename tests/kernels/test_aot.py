"""The AMD compile gate: it compiles, it sees each kind of failure, and its cache forgets nothing that matters.

Triton's compiler runs in processes of its own, for which this file is a module: there TRITON_INTERPRET is unset.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl

from hybrid_jax.errors import UserError
from hybrid_jax.kernels import aot, compiling
from hybrid_jax.kernels import launch as launching
from hybrid_jax.kernels.launch import Tile, launch

ROOT = Path(__file__).parents[2]


@triton.jit
def twice(x):
    return x * 2.0


@triton.jit
def matmul(x, y, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM + tl.arange(0, BM)[:, None], tl.arange(0, N)[None, :]
    total = tl.zeros((BM, N), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + m * K + k[None, :], mask=m < M, other=0.0)
        total = tl.dot(a, tl.load(y + k[:, None] * N + n), total, input_precision="ieee", out_dtype=tl.float32)
    tl.store(out + m * N + n, twice(total).to(out.dtype.element_ty), mask=m < M)


@triton.jit
def two_products(x, y, out, N: tl.constexpr, n: tl.constexpr):
    """A dot that has matrix instructions beside one that is too small for them."""
    large, small = tl.arange(0, N), tl.arange(0, n)
    a = tl.load(x + large[:, None] * N + large[None, :])
    b = tl.load(y + small[:, None] * n + small[None, :])
    tl.store(out + large[:, None] * N + large[None, :], tl.dot(a, a, input_precision="ieee"))
    tl.store(out + N * N + small[:, None] * n + small[None, :], tl.dot(b, b, input_precision="ieee"))


@triton.jit
def ill_typed(x, out, N: tl.constexpr):
    tl.store(out, tl.load(x + tl.arange(0, N)))


def _matmul(name, BM, N, BK, warps, stages=1, dtype=jnp.bfloat16, M=1000, K=256, **options):
    tile = Tile(warps, stages, (("BM", BM), ("BK", BK)), tuple(options.items()))

    def fn(x, y):
        out = (jax.ShapeDtypeStruct((M, N), jnp.float32),)
        return launch(matmul, (x, y), out, grid=(-(-M // BM),), tile=tile, constants=dict(M=M, N=N, K=K))

    return aot.Case("op", name, fn, (jax.ShapeDtypeStruct((M, K), dtype), jax.ShapeDtypeStruct((K, N), dtype)))


def _small(name, kernel, pointers, **sizes):
    def fn(*inputs):
        out = (jax.ShapeDtypeStruct((4096,), jnp.float32),)
        return launch(kernel, inputs, out, grid=(1,), tile=Tile(4, 1), constants=sizes)

    return aot.Case("op", name, fn, (jax.ShapeDtypeStruct((4096,), jnp.float32),) * pointers)


def cases(names):
    table = [
        _matmul("good", 64, 64, 64, 4, 2),
        _matmul("same", 64, 64, 64, 4, 2),
        _matmul("options", 64, 64, 64, 4, 2, waves_per_eu=2, matrix_instr_nonkdim=16),
        _matmul("oversized", 128, 128, 128, 8, 3, jnp.float32),
        _matmul("spilling", 256, 256, 32, 2),
        _small("scalar", matmul, 2, M=8, N=8, K=8, BM=8, BK=8),
        _small("mixed", two_products, 2, N=32, n=4),
        _small("ill_typed", ill_typed, 1, N=32),
        aot.Case("op", "silent", lambda x: x, (jax.ShapeDtypeStruct((3,), jnp.float32),)),
        _small("misspelt", matmul, 2, M=8, N=8, K=8, BM=8, BLOCK=8),
    ]
    return [case for case in table if case.name in names.split(",")]


def main(mode, names, arches, cache):
    """What the tests below run in a process of its own."""
    todo, arches = cases(names), arches.split(",")
    if mode == "crash":
        jobs, _ = aot.collect(todo, arches)
        good = next(iter(jobs))
        killer = aot.dataclasses.replace(good, module="killer", key="killer")
        for job, result, _ in compiling.compile_all([good, killer], 2, None):
            print(job.module, result)
        return 0
    return aot.run(todo, arches, 2, Path(cache) if cache else None)


def gate(names, arches="gfx942,gfx950", cache="", mode="run", folder=None):
    """Exit code and output of the gate over `names`, in a new process that imports this file from `folder`."""
    clean = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "XLA_FLAGS")}
    module = Path(__file__).stem
    clean |= {"PYTHONPATH": f"{folder or Path(__file__).parent}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    program = f"import sys, {module}; sys.exit({module}.main(*sys.argv[1:]))"
    command = [sys.executable, "-c", program, mode, names, arches, str(cache)]
    done = subprocess.run(command, env=clean, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stdout[-2000:] + done.stderr[-3000:]
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def bad():
    code, output = gate("good,same,options,oversized,spilling,scalar,mixed,ill_typed,silent,misspelt")
    assert code == 1
    return output


def failing(output, name):
    """The reasons that the output gives for a case, with its architecture."""
    return [line for line in output.splitlines() if re.match(rf"FAILS: op(\.\w+,)? {name}\b", line)]


def test_kernels_that_fit_have_no_failure():
    code, output = gate("good,same,options")
    assert code == 0 and "FAILS" not in output
    assert "4 kernels for gfx942, gfx950 (0 from the cache): 0 failures" in output
    lines = [line for line in output.splitlines() if "op.matmul, good +1" in line]
    assert len(lines) == 2 and all(line.endswith("fits") for line in lines)


def test_kernels_that_fit_are_not_blamed(bad):
    assert failing(bad, "good") == failing(bad, "options") == failing(bad, "same") == []


def test_an_oversized_tile_is_seen(bad):
    lds = {arch: [x for x in failing(bad, "oversized") if arch in x and "bytes of LDS" in x] for arch in aot.LDS_BYTES}
    assert lds["gfx942"] and "gfx942 has 65,536" in lds["gfx942"][0]
    assert lds["gfx950"] and "gfx950 has 163,840" in lds["gfx950"][0]


def test_a_spilling_tile_is_seen(bad):
    text = "\n".join(failing(bad, "spilling"))
    for arch in aot.LDS_BYTES:
        assert re.search(rf"{arch} .*: \d+ vector registers spilled to memory", text)
        assert re.search(rf"{arch} .*: \d+ bytes of scratch memory a lane", text)
    assert "LDS" not in text


def test_a_dot_without_matrix_instructions_is_seen(bad):
    for name, reason in (("scalar", "1 of 1 dots without"), ("mixed", "1 of 2 dots without")):
        found = failing(bad, name)
        assert len(found) == 2 and all(reason in line for line in found)


def test_what_does_not_compile_or_launch_is_seen(bad):
    assert len(failing(bad, "ill_typed")) == 2
    assert all("does not compile: " in line and "Error" in line for line in failing(bad, "ill_typed"))
    assert failing(bad, "silent") == [
        "FAILS: op silent on gfx942: launches no Triton kernel",
        "FAILS: op silent on gfx950: launches no Triton kernel",
    ]
    assert all("no constexpr parameter 'BLOCK'" in line for line in failing(bad, "misspelt"))
    assert len(failing(bad, "misspelt")) == 2


def test_an_empty_table_fails(capsys):
    assert aot.run([], ["gfx942"], 1, None) == 1
    assert "FAILS: there is no kernel to compile" in capsys.readouterr().out


def test_a_compiler_that_crashes_is_one_failure(tmp_path):
    (tmp_path / "killer.py").write_text("import os\nos._exit(9)\n")
    shutil.copy(__file__, tmp_path)
    code, output = gate("good", "gfx942", mode="crash", folder=tmp_path)
    assert code == 0 and "killer the compiler crashed" in output
    assert f"{Path(__file__).stem} Binary(vgpr=" in output


def test_results_are_kept_until_the_source_changes(tmp_path):
    source = tmp_path / Path(__file__).name
    shutil.copy(__file__, source)
    cache = tmp_path / "cache"

    def kept():
        code, output = gate("spilling", "gfx942", cache, folder=tmp_path)
        assert code == 1 and len(failing(output, "spilling")) == 2  # judged again, from the cache too
        return int(re.search(r"1 kernels for gfx942 \((\d) from the cache\)", output)[1])

    assert (kept(), kept()) == (0, 1)
    before = source.read_text()
    # In the function that the kernel calls, on the same lines.
    source.write_text(before.replace("return x * 2.0", "return x * 3.0"))
    assert (kept(), kept()) == (0, 1)


# -- parts -----------------------------------------------------------------------------------------------------

ASSEMBLY = """
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[2:3], v[4:5], a[0:15]
\tv_mfma_f32_16x16x16_bf16 v[0:3], v[2:3], v[4:5], v[0:3]
  - .agpr_count:     16
    .private_segment_fixed_size: 8
    .sgpr_spill_count: 9
    .vgpr_count:     96
    .vgpr_spill_count: 2
"""
TTGIR = """
    %10 = tt.dot %8, %9, %7 : tensor<16x16xbf16, #ttg.dot_op<{parent = #mma}>> * tensor<> -> tensor<16x16xf32, #mma>
    %11 = tt.dot %8, %9, %7 : tensor<4x4xf32, #ttg.dot_op<{parent = #blocked}>> * tensor<> -> tensor<4x4xf32, #blocked>
"""


def binary(**change):
    result = compiling.read({"amdgcn": ASSEMBLY, "ttgir": TTGIR}, 4096, 1.0)
    return aot.dataclasses.replace(result, **change)


def test_the_compilers_output_is_read():
    assert binary() == compiling.Binary(
        vgpr=80,
        agpr=16,
        vgpr_spills=2,
        sgpr_spills=9,
        scratch=8,
        lds=4096,
        dots=2,
        slow_dots=1,
        mfma=2,
        seconds=1.0,
    )


@pytest.mark.parametrize("field", ["agpr_count", "private_segment_fixed_size", "vgpr_spill_count"])
def test_a_field_that_is_not_there_is_no_pass(field):
    with pytest.raises(ValueError, match=field):
        compiling.read({"amdgcn": ASSEMBLY.replace(field, "other"), "ttgir": TTGIR}, 0, 1.0)


def test_a_dot_of_unknown_layout_is_no_pass():
    with pytest.raises(ValueError, match="unknown layout"):
        compiling.read({"amdgcn": ASSEMBLY, "ttgir": TTGIR.replace("#blocked>\n", "?>\n")}, 0, 1.0)


def test_limits_are_the_architectures():
    fits = binary(vgpr_spills=0, scratch=0, slow_dots=0)
    assert aot.failures(fits, "gfx942") == []
    for arch, most in (("gfx942", 65536), ("gfx950", 163840)):
        assert aot.failures(aot.dataclasses.replace(fits, lds=most), arch) == []
        assert len(aot.failures(aot.dataclasses.replace(fits, lds=most + 1), arch)) == 1
    assert aot.failures(aot.dataclasses.replace(fits, mfma=0), "gfx942") == ["2 of 2 dots without matrix instructions"]
    assert len(aot.failures(binary(), "gfx942")) == 3


@pytest.mark.parametrize(
    ("vgpr", "agpr", "lds", "warps", "arch", "expected"),
    [
        (64, 0, 0, 4, "gfx942", 8),
        (65, 0, 0, 4, "gfx942", 7),
        (128, 0, 0, 4, "gfx942", 4),
        (125, 3, 0, 4, "gfx942", 3),  # accumulation registers start at a multiple of 4
        (256, 170, 16384, 4, "gfx942", 1),
        (64, 0, 32768, 4, "gfx942", 2),
        (64, 0, 32768, 4, "gfx950", 5),
        (64, 0, 65536, 8, "gfx942", 2),
        (64, 0, 65536, 1, "gfx942", 0.25),
        (160, 0, 0, 8, "gfx942", 2),  # three waves a SIMD would be one workgroup and a half
        (64, 0, 65537, 4, "gfx942", 0),
    ],
)
def test_waves(vgpr, agpr, lds, warps, arch, expected):
    assert aot.waves(binary(vgpr=vgpr, agpr=agpr, lds=lds), warps, arch) == expected


@pytest.mark.parametrize("damage", ["", "{", "[1]", "{}", "vgpr", "null", "\\xff"])
def test_an_unreadable_entry_of_the_cache_is_a_miss(tmp_path, damage):
    path = tmp_path / "key.json"
    compiling._keep(path, binary())
    assert compiling._kept(path) == binary() and list(tmp_path.iterdir()) == [path]
    fields = json.loads(path.read_text())
    if damage == "vgpr":
        path.write_text(json.dumps(fields | {"vgpr": "80"}))
    else:
        path.write_bytes(damage.encode("latin-1"))
    assert compiling._kept(path) is None
    assert compiling._kept(tmp_path / "none.json") is None


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_cache_that_cannot_be_used_is_said_first(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(aot, "collect", lambda *_: pytest.fail("went on"))
    with pytest.raises(UserError, match=rf"--cache {tmp_path / place}: .*not a folder"):
        aot.run([], ["gfx942"], 1, tmp_path / place)


def _launched(kernel, warps, BV):
    function = types.SimpleNamespace(fn=types.SimpleNamespace(__name__=kernel))
    constants = (("BV", BV), ("V", 64))
    return launching.Launch(function, (), constants, Tile(warps, 1, (("BV", BV),)), (1,), "gfx942")


def test_rows_that_no_shape_compiles_are_failures(tmp_path, monkeypatch):
    (tmp_path / "op" / "tiles").mkdir(parents=True)
    wide, narrow, other = (
        {"num_warps": w, "num_stages": 1, "constants": {"BV": b}} for w, b in ((4, 64), (4, 32), (8, 64))
    )
    table = {"a": {"scan": wide, "scan_narrow": narrow}, "b": {"scan": wide, "scan_narrow": wide}, "c": {"scan": other}}
    (tmp_path / "op" / "tiles" / "gfx942.json").write_text(json.dumps(table))
    monkeypatch.setattr(aot, "_TABLES", tmp_path)
    monkeypatch.setattr(launching, "_TABLES", tmp_path)
    launches = {"a": [_launched("scan", 4, 32)], "b": [_launched("scan", 4, 64)], "c": [_launched("scan", 4, 64)]}
    unused = [("op tiles gfx942.json", f"{row} is compiled by no named shape") for row in ("a.scan", "c.scan")]
    assert aot.unused_rows("op", "gfx942", launches) == unused
    assert aot.unused_rows("op", "gfx942", launches, ["c"]) == unused[:1]


def test_every_row_of_the_tables_is_compiled(monkeypatch):
    monkeypatch.setattr(aot, "as_job", lambda op, launch: op)  # nothing compiles here
    jobs, reasons = aot.collect(aot.published_cases(), list(aot.LDS_BYTES))
    assert jobs and not reasons


def test_failures_that_repeat_are_folded():
    reasons = [(f"case{i}", "broken") for i in range(27)] + [("other", "worse"), ("one more", "worse")]
    assert aot._folded(reasons) == ["case0: broken (and 26 more like it)", "other: worse", "one more: worse"]
    assert compiling.one_line(UserError("no such thing")) == "no such thing"


SLOW = """
import sys, time
from pathlib import Path
from hybrid_jax.kernels import aot, compiling

def attempt(job):
    Path(f"{job.key}.began").touch()
    time.sleep(0.1 if job.key == "0" else 60)
    return compiling.Binary(*[0] * 10)

compiling._attempt = attempt
if __name__ == "__main__":
    jobs = {compiling.Job("op", "m", "k", (), (), 4, 1, (), "gfx942", str(i)): ["case"] for i in range(6)}
    aot.collect = lambda *_: (jobs, [])
    sys.exit(aot.run([], ["gfx942"], 2, Path("cache")))
"""


def test_ctrl_c_stops_at_once_and_keeps_what_is_done(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    clean = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    how = dict(env=clean, cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    gate = subprocess.Popen([sys.executable, "slow.py"], text=True, **how)
    try:
        deadline = time.monotonic() + 60
        while not ((tmp_path / "cache" / "0.json").exists() and len(list(tmp_path.glob("*.began"))) == 3):
            assert gate.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        start = time.monotonic()
        os.killpg(gate.pid, signal.SIGINT)  # as a terminal does
        error = gate.communicate(timeout=30)[1]
        assert time.monotonic() - start < 5
    finally:
        if gate.poll() is None:
            os.killpg(gate.pid, signal.SIGKILL)
    assert (gate.returncode, error) == (130, "stopped at 1/6; the same command goes on from there\n")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["0.json"]
    # The workers are gone; what tracks their semaphores ends by itself.
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(gate.pid, 0)
            time.sleep(0.05)


def test_a_reader_that_leaves_is_no_error(tmp_path):
    program = "import sys; from hybrid_jax.kernels import aot; aot._checked = lambda _: print('x' * 10**6) or 0; "
    program += "sys.exit(aot.main([]))"
    command = f"'{sys.executable}' -c \"{program}\" | head -c 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("x", "")


def test_the_list_of_architectures_is_forgiving(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(aot, "run", lambda cases, arches, *_: arches == ["gfx950", "gfx942"])
    assert aot.main(["--arch", " gfx950, gfx942,gfx950,"]) is True


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--arch", "gfx942,gfx1100"], {}, "error: --arch: 'gfx1100' is not one of gfx942, gfx950"),
        (["--jobs", "0"], {}, "error: --jobs must be at least 1"),
        (["--jobs", "x"], {}, "error: --jobs: invalid int value: 'x'"),
        (["--frobnicate"], {}, "error: unrecognized arguments: --frobnicate"),
        ([], {"TRITON_INTERPRET": "1"}, "error: TRITON_INTERPRET is set"),
    ],
)
def test_wrong_use_is_one_line(monkeypatch, capsys, arguments, environment, message):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert aot.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1
