"""loss.png: a run's losses and its learning rate, drawn from metrics.jsonl."""

import os
from pathlib import Path

from hybrid_jax.metrics import course, read_jsonl


def plot(metrics_path: Path, image_path: Path, title: str) -> bool:
    """Draws loss.png from a metrics file: training loss raw and smoothed, what was rolled back, validation points,
    learning rate.

    Returns whether there was anything to draw. Raises ImportError where matplotlib is missing.
    """
    lines, undone = course(read_jsonl(metrics_path))
    train = [(line["step"], line["loss"]) for line in lines if isinstance(line.get("loss"), (int, float))]
    valid = [(x["step"], x["validation_loss"]) for x in lines if isinstance(x.get("validation_loss"), (int, float))]
    rates = [(x["step"], x["learning_rate"]) for x in lines if isinstance(x.get("learning_rate"), (int, float))]
    if not train:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = zip(*train, strict=True)
    smoothed = smooth(losses, max(1.0, len(losses) / 50))
    dots = "." if len(steps) < 4 else None  # too few points for a line to be seen
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training loss", marker=dots)
    axes.plot(steps, smoothed, color="tab:blue", linewidth=1.8, label=f"smoothed ({smoothed[-1]:.3f})", marker=dots)
    for number, part in enumerate(undone):
        shown = [(x["step"], x["loss"]) for x in part if isinstance(x.get("loss"), (int, float))]
        label = "rolled back" if number == 0 else None
        axes.plot(
            [s for s, _ in shown],
            [v for _, v in shown],
            "x-",
            color="tab:orange",
            alpha=0.6,
            linewidth=0.8,
            markersize=3,
            label=label,
        )
    if valid:
        axes.plot(
            *zip(*valid, strict=True),
            "o-",
            color="tab:red",
            markersize=4,
            label=f"validation ({valid[-1][1]:.3f})",
        )
    baseline = next((x["ngram_loss"] for x in reversed(lines) if isinstance(x.get("ngram_loss"), (int, float))), None)
    if baseline is not None:
        axes.axhline(baseline, color="tab:gray", linestyle="--", linewidth=1, label=f"n-gram model ({baseline:.3f})")
    # The first steps stand far above the rest; let the rest fill the frame once there is enough of it.
    ordered = sorted(losses)
    if len(ordered) >= 50:
        low = min([ordered[0], *(v for _, v in valid)] + ([baseline] if baseline is not None else []))
        high = max(ordered[int(0.98 * len(ordered))], *(v for _, v in valid[:1]), baseline or 0.0)
        pad = 0.05 * max(high - low, 1e-3)
        axes.set_ylim(low - pad, high + pad)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    right = axes.twinx()
    right.plot(*zip(*rates, strict=True), color="tab:green", alpha=0.6, linewidth=1, label="learning rate")
    right.set_ylabel("learning rate", color="tab:green")
    right.set_ylim(bottom=0)
    handles = [artist for side in (axes, right) for artist in side.get_legend_handles_labels()[0]]
    right.legend(handles=handles, loc="upper right", framealpha=0.9)  # on the upper layer of the two
    scratch = image_path.with_name(image_path.name + ".tmp")
    figure.savefig(scratch, format="png")
    os.replace(scratch, image_path)
    return True


def smooth(values: tuple[float, ...] | list[float], span: float) -> list[float]:
    """Exponential moving average over about `span` values, without the pull of its start towards zero."""
    keep = 1.0 - 1.0 / max(span, 1.0)
    total = weight = 0.0
    result = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1.0
        result.append(total / weight)
    return result
