"""The self-test before a Triton kernel's first use. Faults are planted in a stand-in; the kernels run interpreted."""

import concurrent.futures
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.errors import UserError
from hybrid_jax.kernels import gdn, kda, launch, selftest, shapes
from hybrid_jax.kernels.selftest import Variant

ROOT = Path(__file__).parents[2]
REFERENCE = gdn.BACKENDS["reference"]
SIZES = dict(K=16, V=16, R=2, dtype="float32", packed=True)
GDN = Variant("gdn", **SIZES)
# What decays of a head, of channels, and of channels by raw gates differ in.
OPS = pytest.mark.parametrize(
    ("op", "gate", "backends"),
    [
        ("gdn", "", gdn.BACKENDS),
        ("kda", "", kda.BACKENDS),
        ("kda", "softplus", kda._backends(None)),
        ("kda", "bounded", kda._backends(shapes.BOUND)),
    ],
    ids=["gdn", "kda", "kda softplus", "kda bounded"],
)


def stand_in(fault=lambda o, state: (o, state)):
    """Backends whose "triton" is the recurrence with a fault; its calls are counted."""
    calls = []

    def kernel(*args):
        calls.append(args)
        *args, ids = args
        return fault(*REFERENCE(*args, jnp.zeros(args[0].shape[:2], jnp.int32) if ids is None else ids))

    return {"reference": REFERENCE, "triton": kernel}, calls


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(selftest, "_passed", set())
    monkeypatch.setattr(selftest, "EXECUTORS", ("gpu", "interpreter"))
    monkeypatch.setattr(selftest, "LENGTH", 133)
    monkeypatch.setattr(selftest, "MANY", 16)
    monkeypatch.setattr(launch, "executor", lambda: "gpu")
    monkeypatch.setattr(launch, "architecture", lambda: "gfx942")
    caplog.set_level(logging.DEBUG, "hybrid_jax")
    return tmp_path / "hybrid_jax" / "selftest"


def info(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def test_what_passes_is_said_and_kept(fresh, caplog):
    backends, calls = stand_in()
    for _ in range(3):
        selftest.before_use(GDN, backends)
    assert len(calls) == 2  # long rows, many rows
    before, line = info(caplog)
    assert before.startswith("kernels: testing those of gdn for K 16, V 16, ")
    assert line.startswith("kernels: gdn self-test on cpu: worst error ") and line.endswith(" s)")
    (file,) = fresh.iterdir()
    record = json.loads(file.read_text())
    assert record["key"]["variant"] == "gdn for K 16, V 16, 2 value heads a key head, float32, packed"
    assert {"device", "runtime", "driver", "architecture", "jax", "jaxlib", "triton", "jax-triton"} < record[
        "key"
    ].keys()
    assert max(record["errors"].values()) < 1e-5 and len(record["errors"]) == 2 * 8

    selftest._passed.clear()  # another process
    selftest.before_use(GDN, backends)
    assert len(calls) == 2 and len(info(caplog)) == 2 and "passed its self-test before" in caplog.messages[-1]


@pytest.fixture
def tested(monkeypatch):
    """The variants that are tested, in place of the test."""
    found = []
    passes = {f"o, {row}": 1e-7 for row in selftest.ROWS}
    monkeypatch.setattr(selftest, "_errors", lambda variant, *_: (found.append(variant), passes)[1])
    return found


def test_each_variant_is_tested(tested):
    changes = ({}, {"op": "gdn"}, {"K": 20}, {"V": 20}, {"R": 1}, {"packed": False}, {"dtype": "bfloat16"})
    changes += ({"gate": "softplus"}, {"gate": "bounded -5"}, {"gate": "bounded -3"})
    variants = [Variant(**{"op": "kda", **SIZES, **change}) for change in changes]
    for variant in variants * 2:
        selftest.before_use(variant, kda.BACKENDS)
    assert tested == variants


def test_each_variant_is_kept_by_itself(tested):
    """Another process finds none but what passed."""
    variants = [Variant(**{"op": "kda", **SIZES, "gate": gate}) for gate in ("", "softplus", "bounded")]
    for count in range(1, len(variants) + 1):
        for variant in variants[:count]:
            selftest._passed.clear()
            selftest.before_use(variant, kda.BACKENDS)
        assert tested == variants[:count]


@pytest.mark.parametrize("change", ["version", "driver", "sources", "architecture", "damage", "other key"])
def test_what_is_kept_does_not_outlive_what_it_depends_on(fresh, monkeypatch, tested, change):
    selftest.before_use(GDN, gdn.BACKENDS)
    selftest._passed.clear()
    version = selftest.metadata.version
    (file,) = fresh.iterdir()
    if change == "version":
        monkeypatch.setattr(selftest.metadata, "version", lambda name: version(name) + "x" * (name == "jaxlib"))
    elif change == "driver":
        monkeypatch.setattr(selftest, "_driver", lambda: "6.12.12")
    elif change == "sources":
        monkeypatch.setattr(selftest, "_sources", lambda op: "0")
    elif change == "architecture":
        monkeypatch.setattr(launch, "architecture", lambda: "gfx950")
    elif change == "damage":
        file.write_text(file.read_text()[:40])
    else:
        record = json.loads(file.read_text())
        file.write_text(json.dumps(record | {"key": record["key"] | {"device": "other"}}))
    for _ in range(2):
        selftest.before_use(GDN, gdn.BACKENDS)
        selftest._passed.clear()
    assert len(tested) == 2


def test_sources_are_the_kernels_and_their_tiles(tmp_path, monkeypatch):
    changed = ("device.py", "delta/scans.py", "gdn/triton.py", "gdn/tiles/gfx942.json")
    for name in ("selftest.py", *changed, "kda/triton.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(selftest, "__file__", str(tmp_path / "selftest.py"))
    seen = {selftest._sources("gdn")}
    for name in changed:
        (tmp_path / name).write_text("2")
        seen.add(selftest._sources("gdn"))
    assert len(seen) == 5
    (tmp_path / "kda/triton.py").write_text("2")
    assert selftest._sources("gdn") in seen


@jax.custom_vjp
def _no_gradient_in_the_second_row(x):
    return x


_no_gradient_in_the_second_row.defvjp(lambda x: (x, None), lambda _, ct: (ct.at[1].set(0),))

FAULTS = {
    r"error [\d.e+-]+ of o, random, at most 1e-04": lambda o, state: (o.at[0, 64:80].set(0), state),
    "error nan of o, random": lambda o, state: (o.at[0, 3, 0, 0].set(jnp.nan), state),
    "of final_state, similar keys, slow decay": lambda o, state: (o, state.at[1].multiply(1.1)),
    r"of d\w+, similar keys, slow decay": lambda o, state: (_no_gradient_in_the_second_row(o), state),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_stops_the_run(fresh, message):
    backends, _ = stand_in(FAULTS[message])
    with pytest.raises(UserError, match=message) as error:
        selftest.before_use(GDN, backends)
    text = str(error.value)
    assert text.startswith("config.kernels.backend: the triton kernels of gdn for K 16, V 16")
    assert "compute something wrong on this cpu" in text
    assert text.endswith("choose --config.kernels.backend=chunked") and "\n" not in text
    assert not fresh.exists()


def test_a_failure_is_not_kept(tested, fresh, monkeypatch):
    monkeypatch.setattr(selftest, "_errors", lambda *_: {"dq, random": float("inf")})
    for _ in range(2):
        with pytest.raises(UserError, match="error inf of dq, random"):
            selftest.before_use(GDN, gdn.BACKENDS)
    assert not fresh.exists()


def test_kernels_that_do_not_compile_stop_the_run(fresh):
    def broken(o, state):
        raise RuntimeError("PassManager::run failed\nsee above")

    backends, _ = stand_in(broken)
    with pytest.raises(
        UserError, match="do not run on this cpu: RuntimeError: PassManager::run failed see above; choose"
    ):
        selftest.before_use(GDN, backends)
    assert not fresh.exists()


def test_a_folder_that_cannot_be_written_costs_a_test(monkeypatch, tmp_path, caplog, tested):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        selftest.before_use(GDN, gdn.BACKENDS)
    assert len(tested) == 1 and len(info(caplog)) == 2 and "result is not kept" in caplog.messages[-1]


def test_threads_share_one_test(tested):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: selftest.before_use(GDN, gdn.BACKENDS), range(8)))
    assert len(tested) == 1


def test_other_executors_are_not_tested(monkeypatch, tested):
    monkeypatch.setattr(selftest, "EXECUTORS", ("gpu",))
    for mode in ("interpreter", "recording"):
        monkeypatch.setattr(launch, "executor", lambda mode=mode: mode)
        selftest.before_use(GDN, gdn.BACKENDS)
    assert not tested


@OPS
def test_rounding_of_bfloat16_stays_far_below_its_limits(monkeypatch, op, gate, backends):
    """By the chunked form, whose operands are rounded as the kernels round theirs."""
    monkeypatch.setattr(selftest, "LENGTH", 2085)
    variant = Variant(op, **SIZES | {"dtype": "bfloat16", "R": 1, "gate": gate})
    device = jax.local_devices()[0]
    found = selftest._errors(variant, backends["chunked"], backends["reference"], device)
    for name, error in found.items():
        assert error < 0.5 * selftest._limit(variant, name), name
    # All results and gradients in both kinds of rows; once for a parameter, whose gradient comes from all rows.
    parameters = selftest.PARAMETERS if gate else ()
    arrays = {"o", "final_state", *(f"d{name}" for name in ("q", "k", "v", "g", "beta", "initial_state"))}
    assert found.keys() == {f"{name}, {row}" for name in arrays for row in selftest.ROWS} | {
        f"d{name}, {selftest.ROWS[1]}" for name in parameters
    }


@OPS
def test_pieces_change_nothing(op, gate, backends):
    inputs, _, ids = selftest.problem(Variant(op, **SIZES, gate=gate), False)
    parameters = [inputs[name] for name in selftest.PARAMETERS if gate]
    args = *(inputs[name] for name in ("q", "k", "v", "g", "beta")), 0.25, inputs["initial_state"], ids, *parameters
    reference = backends["reference"]
    for whole, cut in zip(reference(*args), selftest._in_pieces(reference)(*args), strict=True):
        np.testing.assert_allclose(whole, cut, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "shape", [s for s in shapes.SHAPES.values() if s.op in ("gdn", "kda") and s.T > 65], ids=lambda s: s.name
)
def test_every_kernel_of_a_shape_is_tested(shape, monkeypatch):
    """The kernels that a named shape launches, whole rows and rows in segments, are among those of its self-test."""
    monkeypatch.undo()
    said = []
    monkeypatch.setattr(selftest, "before_use", lambda *args: said.append(args))
    gate = f"bounded {shapes.BOUND:g}" if shape.gate == "bounded" else shape.gate
    variant = Variant(shape.op, shape.K, shape.V, shape.HV // shape.H, shape.dtype, shape.packed, gate)
    problems = [selftest.problem(variant, many) for many in (False, True)]
    for *_, ids in problems:
        assert not np.any(
            ids[:, :: selftest.PIECE] != ids[:, np.r_[0, selftest.PIECE - 1 : ids.shape[1] - 1 : selftest.PIECE]]
        )

    def both(inputs, cotangents, ids):
        tokens = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
        parameters = (inputs[name] for name in selftest.PARAMETERS if shape.gate)
        state, given = inputs["initial_state"], ids if shape.packed else None
        op = lambda *x: backends["triton"](*x[:5], 1.0, x[5], given, *x[6:])  # noqa: E731
        _, pull = jax.vjp(op, *tokens, state, *parameters)
        return pull((cotangents["o"], cotangents["final_state"]))

    def kinds(arch, fn, *args):
        with launch.recording(arch) as launches:
            jax.eval_shape(fn, *args)
        flags = ("MAP", "PACKED", "PARTS", "C", "BK", "BV", "BC", "PER_CHANNEL", "FORM", "BOUND")
        return {
            (x.kernel.__name__, x.pointers, x.tile, *(dict(x.constants).get(name) for name in flags)) for x in launches
        }

    fn, args = shapes.program(shape, "triton")
    for arch in ("gfx942", "gfx950", "sm_90"):
        launched = kinds(arch, fn, *args)
        ((announced, backends),) = said
        assert announced == variant
        said.clear()
        tested = set().union(*(kinds(arch, both, *problem) for problem in problems))
        assert any(True in kind[3:4] for kind in tested)
        assert launched <= tested


@pytest.mark.parametrize("fault", ["", "fault"])
@pytest.mark.torch
def test_inside_jit_and_shard_map_under_a_mesh(tmp_path, fault):
    """The real kernels, interpreted, in a process with two devices."""
    clean = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, __file__, fault], env=clean, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    if fault:
        assert lines[-1].startswith("stopped: config.kernels.backend: the triton kernels of gdn for K 16, V 16")
        assert not list(tmp_path.rglob("*.json"))
    else:
        assert lines[-1] == "agrees"
        assert sum("gdn self-test on cpu" in line for line in lines) == 1
        assert len(list(tmp_path.rglob("*.json"))) == 1


def main(fault):
    logging.basicConfig(stream=sys.stdout, level=logging.INFO)
    selftest.EXECUTORS, selftest.LENGTH, selftest.SHORT, selftest.MANY = ("interpreter",), 70, 20, 8
    if fault:
        kernel = gdn.BACKENDS["triton"]
        gdn.BACKENDS["triton"] = lambda *args: (lambda o, state: (0.9 * o, state))(*kernel(*args))
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal((2, 20, 2, 16), np.float32) for name in "qkv"}
    x |= {"g": -np.exp(rng.standard_normal((2, 20, 2), np.float32)), "beta": np.full((2, 20, 2), 0.5, np.float32)}
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x, backend):
        def body(total, _):  # and inside a scan and a checkpoint
            return total + jnp.sum(gdn.gdn(**x, backend=backend)[0] ** 2), None

        return jax.lax.scan(jax.checkpoint(body), 0.0, None, length=1)[0]

    with jax.set_mesh(mesh):
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        placed = jax.device_put(x, rows)
        try:
            found = jax.jit(jax.grad(lambda x: loss(x, "triton")))(placed)
        except UserError as error:
            print(f"stopped: {error}")
            return
        expected = jax.jit(jax.grad(lambda x: loss(x, "chunked")))(placed)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)
    print("agrees")


if __name__ == "__main__":
    main(*sys.argv[1:])
