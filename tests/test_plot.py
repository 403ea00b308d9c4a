"""loss.png."""

import math

import pytest

from hybrid_jax import metrics, plot


def test_smoothing_is_a_weighted_mean_without_a_pull_to_zero():
    assert plot.smooth([5.0] * 10, 4) == pytest.approx([5.0] * 10)
    assert plot.smooth([1.0, 2.0, 3.0], 1.0) == [1.0, 2.0, 3.0]
    assert plot.smooth([0.0, 3.0], 2.0) == pytest.approx([0.0, 3.0 / 1.5])


def test_plot_is_drawn_from_the_file_also_with_gaps(tmp_path):
    assert plot.plot(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "empty") is False
    writer = metrics.JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 121):
        values = {"loss": 6 * step**-0.3, "learning_rate": 1e-3 * min(step / 10, 1.0)}
        if step == 30:
            values["loss"] = math.nan
        if step % 40 == 0:
            values |= {"validation_loss": 6.1 * step**-0.3, "ngram_loss": 1.8}
        writer.write(step, values)
        if step == 100:
            writer.write(step, {"event": "rollback", "to_step": 90})
    writer.close()
    assert plot.plot(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "a run") is True
    image = (tmp_path / "loss.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 20_000
    assert not list(tmp_path.glob("*.tmp"))
