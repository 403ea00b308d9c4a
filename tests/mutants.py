"""Seventeen faults, planted one at a time: each must make its test fail (`make mutants`).

A fault replaces one exact piece of source text in a copy of the tree; then its test runs there. The same
tests must pass in a copy without a fault. The command fails when a fault no longer applies, or when its test
passes all the same.

    python tests/mutants.py [NAME ...]      # all, or those whose name contains one of the words
"""

import concurrent.futures
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
COPIED = ("hybrid_jax", "configs", "tests", "conftest.py", "launch.py", "pyproject.toml")
LIMIT_S = 240.0  # of one test run; a test that hangs has not found the fault


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old`, which occurs once in `file`, becomes `new`; the test `test` must then fail."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def plant(self, root: pathlib.Path) -> None:
        """Changes the file below `root`. Raises ValueError where `old` is not there exactly once."""
        path = root / self.file
        source = path.read_text()
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file} holds the text to replace {source.count(self.old)} times")
        path.write_text(source.replace(self.old, self.new))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "decay after the error term",
        "hybrid_jax/kernels/gdn/chunked.py",
        """    T = unit_lower_inverse(jnp.tril(beta[..., None] * kk * D, -1))
    # Scaling the columns of T instead of the rows of K lets the heads of a group share K.
    w = dot("nbhrij,nbhjk->nbhrik", dtype, T * (beta * gamma)[..., None, :], k)
""",
        """    late = beta * jnp.exp(-g)  # the error sees the state before the token's own decay
    T = unit_lower_inverse(jnp.tril(late[..., None] * kk * D, -1))
    w = dot("nbhrij,nbhjk->nbhrik", dtype, T * (late * gamma)[..., None, :], k)
""",
        "tests/kernels/test_gdn.py::test_golden[gdn_ragged_gva]",
    ),
    Mutant(
        "q scale missing",
        "hybrid_jax/kernels/delta_rule.py",
        "scale = K**-0.5 if scale is None",
        "scale = 1.0 if scale is None",
        "tests/kernels/test_gdn.py::test_golden[gdn_ragged_gva]",
    ),
    Mutant(
        "beta not doubled",
        "hybrid_jax/layers/delta.py",
        "beta = 2.0 * beta",
        "beta = 1.0 * beta",
        "tests/test_model.py::test_beta_is_a_sigmoid_and_twice_that_with_negative_eigenvalues",
    ),
    Mutant(
        "segment id ignored in the convolution",
        "hybrid_jax/layers/conv.py",
        "if documents is not None and j < W - 1:",
        "if documents is not None and j < 0:",
        "tests/layers/test_conv.py::test_documents_do_not_touch",
    ),
    Mutant(
        "rope halves swapped",
        "hybrid_jax/layers/rotary.py",
        "a, b = turned[..., : R // 2], turned[..., R // 2 :]",
        "b, a = turned[..., : R // 2], turned[..., R // 2 :]",
        "tests/layers/test_rotary.py::test_rotation[0-half]",
    ),
    Mutant(
        "gate before norm",
        "hybrid_jax/layers/norm.py",
        """    h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps) * weight
    return (h * _ACTIVATIONS[activation](upcast(gate))).astype(x.dtype)""",
        """    h = h * _ACTIVATIONS[activation](upcast(gate))
    return (h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps) * weight).astype(x.dtype)""",
        "tests/layers/test_norm.py::test_golden[gnorm_silu]",
    ),
    Mutant(
        "last-chunk tail unmasked",
        "hybrid_jax/kernels/mamba2/chunked.py",
        "((0, 0),) * (z.ndim - 2)) for z in (x, dt, B, C))",
        '((0, 0),) * (z.ndim - 2), mode="edge") for z in (x, dt, B, C))',
        "tests/kernels/test_ssd.py::test_golden[ragged_groups]",
    ),
    Mutant(
        "gradient averaged by the wrong count",
        "hybrid_jax/step.py",
        "params, micro, total",
        """params, micro, jnp.maximum(jnp.sum(micro["targets"] >= 0), 1.0) * batch["targets"].shape[0]""",
        "tests/test_train.py::test_accumulated_gradients_equal_one_large_batch_with_uneven_counts",
    ),
    Mutant(
        "A_log decayed",
        "hybrid_jax/optimizer.py",
        """    rank -= parts[0] == STACKED
    if rank <= 1 or parts[-1] in UNDECAYED_NAMES:
""",
        """    if rank <= 1 or parts[-1] in ("dt_bias", "D"):  # the rank of the stack, where A_log looks like a matrix
""",
        "tests/test_optimizer.py::test_decay_sets_of_a_stacked_model",
    ),
    Mutant(
        "schedule off by one",
        "hybrid_jax/optimizer.py",
        "k = jnp.asarray(count, jnp.float32)",
        "k = jnp.asarray(count, jnp.float32) + 1",
        "tests/test_optimizer.py::test_learning_rate_is_exact",
    ),
    Mutant(
        "kernel: a segment forgets the ones before the last",
        "hybrid_jax/kernels/delta/plan.py",
        "                if here != order[0]:",
        "                if False:",
        "tests/kernels/test_delta_triton.py::test_rows_in_segments[correlated keys, slow decay-False-gdn]",
    ),
    Mutant(
        "kernel: the diagonal in the gates' gradient",
        "hybrid_jax/kernels/gdn/chunks.py",
        "D = tl.where(at[:, None] > at[None, :], _pair_decays(",
        "D = tl.where(at[:, None] >= at[None, :], _pair_decays(",
        "tests/kernels/test_delta_triton.py::test_matches_float64_recurrence[g = -20-gdn]",
    ),
    Mutant(
        "kernel: gates of other documents in a sum",
        "hybrid_jax/kernels/device.py",
        "return tl.where(document == other, x, 0.0) + y, other",
        "return x + y, other",
        "tests/kernels/test_delta_triton.py::test_keeps_documents_apart[gdn]",
    ),
    Mutant(
        "kernel: gates of other documents in the sums of channels",
        "hybrid_jax/kernels/kda/decays.py",
        "        keep = keep & (document[:, None] == document[None, :])",
        "        keep = keep",
        "tests/kernels/test_delta_triton.py::test_keeps_documents_apart[kda]",
    ),
    Mutant(
        "kernel: no zones for steep tokens",
        "hybrid_jax/kernels/kda/blocks.py",
        "        if lowest_sum < STEEPEST + 1:",
        "        if lowest_sum < -1e30:",
        "tests/kernels/test_delta_triton.py::test_steep_tokens_are_in_zones[False]",
    ),
    Mutant(
        "kernel: no gradients of later zones",
        "hybrid_jax/kernels/kda/channels.py",
        "tl.range(1, tl.max(zone).to(tl.int32) + 1, disable_licm=True)",
        "tl.range(1, 2, disable_licm=True)",
        "tests/kernels/test_delta_triton.py::test_steep_tokens_are_in_zones[True]",
    ),
    Mutant(
        "kernel: gates of a block that tokens of the other reach across",
        "hybrid_jax/kernels/kda/channels.py",
        "            carried += crossed * tl.load(carries + place, mask=key < K, other=0.0)\n",
        "",
        "tests/kernels/test_delta_triton.py::test_chunk_lengths[kda-32]",
    ),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    passed: int
    failed: int  # by an assertion or an exception in the test itself
    other: int  # skipped, or broken outside the test
    seconds: float
    message: str  # of the first failure, or the end of the output where no test ran


def run_tests(mutant: Mutant | None, tests: list[str]) -> Outcome:
    """Runs `tests` (pytest node ids) in a fresh copy of the tree with `mutant` planted."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = pathlib.Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, root / name)
        if mutant is not None:
            mutant.plant(root)
        # The copy comes before any installed hybrid_jax on the path.
        env = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", f"--rootdir={root}"]
        try:
            run = subprocess.run(
                [*pytest, f"--junitxml={root / 'result.xml'}", *tests],
                cwd=root, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(0, 0, 0, time.monotonic() - start, f"no result in {LIMIT_S:.0f} s")
        seconds = time.monotonic() - start
        try:
            cases = list(xml.etree.ElementTree.parse(root / "result.xml").iter("testcase"))
        except (OSError, xml.etree.ElementTree.ParseError):
            cases = []
    failures = [case.find("failure") for case in cases if case.find("failure") is not None]
    broken = [case for case in cases if case.find("error") is not None or case.find("skipped") is not None]
    message = failures[0].get("message", "") if failures else ""
    if not cases:
        message = (run.stdout + run.stderr).strip()
        message = message.splitlines()[-1] if message else f"pytest ended with {run.returncode}"
    passed = len(cases) - len(failures) - len(broken)
    return Outcome(passed, len(failures), len(broken), seconds, " ".join(message.split()))


def check(mutant: Mutant) -> tuple[bool, str, Outcome | None]:
    """(the fault was found, the verdict in one word, what the tests gave)."""
    try:
        outcome = run_tests(mutant, [mutant.test])
    except (OSError, ValueError) as e:
        return False, f"NOT APPLIED: {e}", None
    if outcome.failed:  # a crash would say little: the test has to see a wrong result
        asserted = outcome.message.startswith(("AssertionError", "assert ", "Failed: "))
        return asserted, "found" if asserted else "CRASHED", outcome
    return False, "SURVIVED" if outcome.passed else "NO TEST RAN", outcome


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    if not chosen:
        print(f"error: no fault is called {' or '.join(words)}; there are: {', '.join(m.name for m in MUTANTS)}")
        return 2
    start = time.monotonic()
    tests = sorted({m.test for m in chosen})
    width = max(len(m.name) for m in chosen)
    found = 0
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        clean = pool.submit(run_tests, None, tests)
        checks = [pool.submit(check, m) for m in chosen]
        for mutant, future in zip(chosen, checks, strict=True):
            ok, verdict, outcome = future.result()
            found += ok
            took = f"{outcome.seconds:4.0f} s" if outcome else " " * 6
            print(f"{mutant.name:<{width}}  {verdict:<11}  {took}  {mutant.test}", flush=True)
            if outcome and outcome.message:
                print(f"{'':<{width}}  {outcome.message[:100]}", flush=True)
        outcome = clean.result()
    healthy = outcome.passed > 0 and not outcome.failed and not outcome.other
    verdict = "passed" if healthy else "DID NOT PASS"
    print(f"{'no fault':<{width}}  {verdict:<11}  {outcome.seconds:4.0f} s  the {len(tests)} tests above")
    if not healthy:
        counts = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.other} other"
        print(f"{'':<{width}}  {counts}: {outcome.message}")
    print(f"{found} of {len(chosen)} faults found in {time.monotonic() - start:.0f} s")
    return 0 if healthy and found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
