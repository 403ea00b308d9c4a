"""Which backend runs an operation, and what the log says about it."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hybrid_jax import pattern
from hybrid_jax.errors import UserError
from hybrid_jax.kernels import attention, dispatch, gdn, kda, launch, mamba2, selftest, support
from tests.kernels import cases

ROOT = Path(__file__).parents[2]
ALL = ("reference", "chunked", "triton")


@pytest.fixture
def machine(monkeypatch, caplog):
    """machine(executor, reason): what launches are run by, or why they cannot be; the log is in caplog."""
    dispatch._say.cache_clear()
    caplog.set_level(logging.INFO, "hybrid_jax")

    def set_up(executor="gpu", reason=""):
        def found():
            if reason:
                raise UserError(f"triton cannot run here: {reason}")
            return executor

        monkeypatch.setattr(launch, "executor", found)
        monkeypatch.setattr(launch, "why_not", lambda: reason)

    yield set_up
    dispatch._say.cache_clear()


def test_auto_takes_triton_where_it_runs(machine, caplog):
    machine()
    assert [dispatch.resolve("gdn", "auto", ALL) for _ in range(2)] == ["triton"] * 2
    assert dispatch.resolve("ssd", "auto", ALL[:2]) == "chunked"
    assert caplog.messages == [
        "kernels: gdn runs on the 'triton' backend",
        "kernels: ssd runs on the 'chunked' backend",
    ]


@pytest.mark.parametrize(
    ("executor", "why_not", "unfit", "said"),
    [
        ("gpu", "", "heads of 14 key dims", "heads of 14 key dims"),
        ("", "it needs a GPU, and jax sees only cpu devices", "", "it needs a GPU, and jax sees only cpu devices"),
        ("interpreter", "", "", "its interpreter is for tests"),
    ],
)
def test_auto_says_once_why_it_does_not(machine, caplog, executor, why_not, unfit, said):
    machine(executor, why_not)
    assert [dispatch.resolve("gdn", "auto", ALL, unfit) for _ in range(2)] == ["chunked"] * 2
    assert caplog.messages == [f"kernels: gdn runs on the 'chunked' backend (not triton: {said})"]


def test_a_named_backend_runs_or_raises(machine, caplog):
    machine()
    for name in ALL:
        assert dispatch.resolve("gdn", name, ALL) == name
    assert caplog.messages == [f"kernels: gdn runs on the {name!r} backend" for name in ALL]
    with pytest.raises(UserError, match=r"config\.kernels\.backend: triton cannot run gdn here: too wide; choose auto"):
        dispatch.resolve("gdn", "triton", ALL, "too wide")
    with pytest.raises(UserError, match=r"config\.kernels\.backend: ssd has no 'triton' implementation"):
        dispatch.resolve("ssd", "triton", ALL[:2])
    with pytest.raises(UserError, match=r"config\.kernels\.attention: unknown backend 'fast'"):
        dispatch.resolve("attention", "fast", ALL[:2])
    machine(reason="no GPU")
    with pytest.raises(UserError, match="triton cannot run here: no GPU"):
        dispatch.resolve("gdn", "triton", ALL)
    with pytest.raises(UserError, match="triton cannot run here: no GPU"):
        dispatch.check("triton")
    dispatch.check("auto")


def test_the_table_of_triton_operations_is_what_they_have():
    """config_checks goes by it, without importing them."""
    backends = {"gdn": gdn.BACKENDS, "kda": kda.BACKENDS, "ssd": mamba2.BACKENDS, "attention": attention.BACKENDS}
    assert support.TRITON == tuple(op for op, found in backends.items() if "triton" in found)
    assert set(pattern.MIXERS.values()) == {"G", "K", "S"}


@pytest.mark.parametrize(
    ("T", "options", "runs"),
    [
        (1, {}, "reference"),
        (2, {}, "triton"),
        (1, {"backend": "triton"}, "triton"),
        (2, {"backend": "chunked"}, "chunked"),
    ],
)
def test_one_token_takes_the_recurrence_unless_a_backend_is_named(machine, monkeypatch, T, options, runs):
    machine()
    ran = []

    def spy(name, inner):
        def run(*args):
            ran.append((name, args[-1] is None))
            return inner(*args)

        return run

    reference = gdn.BACKENDS["reference"]
    monkeypatch.setattr(selftest, "before_use", lambda *args, **options: None)
    for name, fn in gdn.BACKENDS.items():
        inner = fn if name != "triton" else lambda *a: reference(*a[:-1], jnp.zeros(a[0].shape[:2], jnp.int32))
        monkeypatch.setitem(gdn.BACKENDS, name, spy(name, inner))
    inputs, _ = cases.draw(False, B=1, T=T)
    jax.eval_shape(lambda x: gdn.gdn(**x, **options), inputs)
    assert ran == [(runs, runs == "triton")]  # no ids: the kernels then run without masks


@pytest.mark.parametrize(
    "call",
    [
        "from hybrid_jax.kernels.gdn import gdn; gdn(x, x, x, -x[..., 0], x[..., 0])",
        "from hybrid_jax.kernels.kda import kda; kda(x, x, x, -x, x[..., 0])",
    ],
    ids=["gdn", "kda"],
)
def test_a_machine_without_gpu_imports_no_triton(call):
    code = f"import sys, jax.numpy as jnp; x = jnp.ones((1, 2, 1, 16)); {call};"
    code += "print('triton' in sys.modules, 'torch' in sys.modules)"
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["False", "False"], done.stderr[-2000:]
