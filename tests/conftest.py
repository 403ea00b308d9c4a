"""Sets the environment that launch.py would set, before any test imports jax, and skips what cannot run here."""

import importlib.util
import os
import re
import tempfile
from collections import Counter

import pytest

from hybrid_jax import platform


def pytest_configure(config):
    on_gpu = config.option.markexpr == "gpu"
    if not on_gpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Most of the time of most tests is LLVM's, which this takes less of. What XLA itself makes of a program stays.
        os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}".strip()
        # Triton reads it when it is imported. What needs its compiler, or no interpreter, runs in other processes.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    platform.prepare("gpu" if on_gpu else "cpu")
    # What tests open through Hugging Face's packages stays out of the user's cache.
    folder = tempfile.TemporaryDirectory(prefix="hybrid_jax-tests-")
    os.environ["HF_HOME"] = folder.name
    os.environ.setdefault("HF_HUB_OFFLINE", "0")  # or an evaluation sets it, for all tests that follow in this process
    config.add_cleanup(folder.cleanup)
    # Read when tqdm is imported, which another test may have done before an evaluation sets it.
    os.environ.setdefault("TQDM_DISABLE", "1")


@pytest.fixture(scope="session")
def compile_once(tmp_path_factory):
    """Variables for programs that train one small model in many tests: they compile fast, and what one has compiled the
    next one finds."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }


# What takes long, by the beginning of its name: `make test` leaves it to `make test-slow`. Each of these has quicker
# relatives that stay.
SLOW = (
    "tests/data/test_store_source.py::test_a_run_trains_from_a_store_and_resumes",
    "tests/evaluation/test_tasks.py::test_a_task_file_that_is_broken[task: x\\noutput_type: multiple_choice",
    "tests/evaluation/test_tasks.py::test_names_of_the_harness_without_network",
    "tests/interop/test_modeling_hybrid.py::test_logits_and_gradients_are_those_of_jax[options 1",
    "tests/kernels/test_aot.py::test_results_are_kept_until_the_source_changes",
    "tests/kernels/test_delta_triton.py::test_chunk_lengths[16",
    "tests/kernels/test_delta_triton.py::test_chunk_lengths[32",
    "tests/kernels/test_delta_triton.py::test_gate[-30.0]",
    "tests/kernels/test_delta_triton.py::test_gate[-5.0",
    "tests/kernels/test_delta_triton.py::test_has_causal_gradients[kda",
    "tests/kernels/test_delta_triton.py::test_ignores_later_tokens[kda]",
    "tests/kernels/test_delta_triton.py::test_keeps_documents_apart[kda]",
    "tests/kernels/test_delta_triton.py::test_matches_float64_recurrence[g = -20",
    "tests/kernels/test_delta_triton.py::test_matches_float64_recurrence[g = -5-",
    "tests/kernels/test_delta_triton.py::test_named_shapes[gdn_k256",
    "tests/kernels/test_delta_triton.py::test_named_shapes[kda_fp32_k64",
    "tests/kernels/test_delta_triton.py::test_named_shapes[kda_k128_small",
    "tests/kernels/test_delta_triton.py::test_named_shapes[kda_k256",
    "tests/kernels/test_delta_triton.py::test_named_shapes[kda_k60",
    "tests/kernels/test_delta_triton.py::test_named_shapes[kda_k64_small",
    "tests/kernels/test_delta_triton.py::test_named_shapes[kda_k64_v128",
    "tests/kernels/test_delta_triton.py::test_named_shapes[kda_k96",
    "tests/kernels/test_delta_triton.py::test_named_shapes[kda_t65",
    "tests/kernels/test_delta_triton.py::test_rows_in_segments[random-True",
    "tests/kernels/test_delta_triton.py::test_steep_tokens_are_in_zones[True]",
    "tests/kernels/test_selftest.py::test_inside_jit_and_shard_map_under_a_mesh[fault]",
    "tests/kernels/test_selftest.py::test_rounding_of_bfloat16_stays_far_below_its_limits[kda",
    "tests/test_chaos.py::test_five_kills_leave_no_trace",  # `make chaos-short` has thirty
    "tests/test_init_from.py::test_an_imported_model_is_trained_on",
    "tests/test_launch.py::test_swapping_the_mixer_of_the_tiny_hybrid_trains_another_model[kda",
    "tests/test_launch.py::test_swapping_the_mixer_of_the_tiny_hybrid_trains_another_model[mamba2",
    "tests/test_model.py::test_first_loss_of_gdn_300m",
    "tests/test_model.py::test_packed_equals_separate[*]",
    "tests/test_model.py::test_packed_equals_separate[A]",
    "tests/test_model.py::test_packed_equals_separate[K]",
    "tests/test_model.py::test_packed_equals_separate[S]",
    "tests/test_model.py::test_remat_changes_no_gradient[names-GG]",
    "tests/test_model.py::test_remat_of_more_periods_saves_more_memory[False",
    "tests/test_model.py::test_remat_saves_memory",
    "tests/test_rendezvous.py::test_a_launch_that_misses_one_names_it",
    "tests/test_slurm.py::test_two_processes_of_a_fake_slurm_train_to_the_end",
    "tests/test_train.py::test_z_loss_is_in_the_gradient_and_not_in_the_logged_loss",
)


def _missing():
    """Packages that are not installed, of those that a marker stands for."""
    return [name for name in ("torch", "lm_eval") if importlib.util.find_spec(name) is None]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker("slow")
    for name in _missing():
        skip = pytest.mark.skip(reason=f"{name} is not installed")
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(skip)


def _table_of_errors(terminalreporter):
    """What the tests of a GPU measured, from all processes, sorted."""
    reports = [x for outcome in ("passed", "failed") for x in terminalreporter.stats.get(outcome, [])]
    found = [pair for report in reports if report.when == "call" for pair in report.user_properties]
    if rows := sorted(value for name, value in found if name == "error"):
        terminalreporter.section(next(value for name, value in found if name == "device"))
        head = f"{'operation':<44} {'inputs':<9} {'error':>9}  {'limit':>7}  {'max abs':>9}  in"
        for line in (head, *rows):
            terminalreporter.write_line(line)


def pytest_terminal_summary(terminalreporter):
    _table_of_errors(terminalreporter)
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    packages = Counter(found[1] for reason in reasons if (found := re.search(r"([\w-]+) is not installed", reason)))
    for package, count in packages.items():
        terminalreporter.write_line(f"{count} tests were skipped: {package} is not installed")
