"""Sets the environment that launch.py would set, before any test imports jax, and skips what cannot run here."""

import importlib.util
import os
import re
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


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("torch") is None:
        skip = pytest.mark.skip(reason="torch is not installed")
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter):
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    packages = Counter(found[1] for reason in reasons if (found := re.search(r"([\w-]+) is not installed", reason)))
    for package, count in packages.items():
        terminalreporter.write_line(f"{count} tests were skipped: {package} is not installed")
