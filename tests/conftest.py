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
        # Triton reads it when it is imported. What needs its compiler, or no interpreter, runs in other processes.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    platform.prepare("gpu" if on_gpu else "cpu")
    # What tests open through Hugging Face's packages stays out of the user's cache.
    folder = tempfile.TemporaryDirectory(prefix="hybrid_jax-tests-")
    os.environ["HF_HOME"] = folder.name
    os.environ.setdefault("HF_HUB_OFFLINE", "0")  # or an evaluation sets it, for all tests that follow in this process
    config.add_cleanup(folder.cleanup)


def _missing():
    """Packages that are not installed, of those that a marker stands for."""
    return [name for name in ("torch", "lm_eval") if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items):
    for name in _missing():
        skip = pytest.mark.skip(reason=f"{name} is not installed")
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter):
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    packages = Counter(found[1] for reason in reasons if (found := re.search(r"([\w-]+) is not installed", reason)))
    for package, count in packages.items():
        terminalreporter.write_line(f"{count} tests were skipped: {package} is not installed")
