"""That eight devices give what one gives, each its own rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_eight_devices_equal_one():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",  # compiles faster
        "PYTHONPATH": str(ROOT),
    }
    worker = [sys.executable, str(Path(__file__).with_name("mesh_worker.py"))]
    done = subprocess.run(worker, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    one, eight = found["one"], found["eight"]
    assert found["devices"] == 8 and len(one["scores"]) == 24
    for a, b in zip(eight["scores"], one["scores"], strict=True):
        assert a[0] == pytest.approx(b[0], abs=2e-5) and a[1] == b[1]
    assert len({score for score, _ in one["scores"]}) == 24
    assert all(shape[0] % 8 == 0 for shape in eight["sizes"])
    assert eight["loss"][0] == pytest.approx(one["loss"][0], abs=1e-6)
    assert eight["loss"][1] == one["loss"][1] > 12 * 24  # 13 windows, on neither number of devices a whole batch
    # What goes between devices is the results, of 24 rows.
    assert {kind for kind, _ in found["collectives"]} == {"all-gather"}
    assert sum(size for _, size in found["collectives"]) <= 2 * 24 * 64 * 4, found["collectives"]
