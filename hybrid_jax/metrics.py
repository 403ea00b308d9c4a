"""Where the numbers of a run go: metrics.jsonl, TensorBoard, Weights & Biases and the console.

A writer has `write(step, values)` and `close()`. Steps are counted from 1: the line of step k is about the
k-th update, and a checkpoint k holds the state after it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from hybrid_jax.errors import UserError
from hybrid_jax.rank_logs import RankLogs, level_name

if TYPE_CHECKING:
    from hybrid_jax.config import Config

Values = Mapping[str, Any]
_log = logging.getLogger(__name__)


class Writer(Protocol):
    def write(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """One JSON object a line. A value that is not finite becomes null, and its name is listed under "nonfinite".

    The file grows only: after a line with event "rollback" the steps begin again behind its "to_step"; see `course`.
    """

    def __init__(self, path: Path, keep_to: int = 0, rollbacks: Sequence[tuple[int, Values]] = ()):
        """Keeps the lines of steps <= `keep_to` of an older file: what a resumed run has not seen did not happen.

        `rollbacks`: (step, values) of those that did; what was written before the last of them is kept whole.
        """
        kept: list[Values] = []
        done = 0  # roll-backs, up to this line
        for line in read_jsonl(path):
            done += _ends_a_part(line)
            if done < len(rollbacks) or (done == len(rollbacks) and (line["step"] <= keep_to or _ends_a_part(line))):
                kept.append(line)
        kept += [{"step": step, **values} for step, values in rollbacks[done:]]
        scratch = path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(scratch, path)
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._full = False

    def write(self, step: int, values: Values) -> None:
        """While the disk is full, lines wait in memory: no reason to end a run before its checkpoints need room."""
        self._waiting += json.dumps({"step": step, **finite(values)}, allow_nan=False).encode() + b"\n"
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._full = False
        except OSError as error:
            if not _is_full(error):
                raise
            if not self._full:
                _log.warning("%s: %s; its lines wait for room", self._file.name, error.strerror)
            self._full = True

    def close(self) -> None:
        self._file.close()


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def _unless_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not _is_full(error):
            raise


def _ends_a_part(line: Values) -> bool:
    return line.get("event") == "rollback"


def finite(values: Values) -> dict[str, Any]:
    """`values` with null for each float that JSON has no word for, and their names under "nonfinite" if there
    are any."""
    bad = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    clean = {name: None if name in bad else value for name, value in values.items()}
    return {**clean, "nonfinite": bad} if bad else clean


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, without what a killed process left unfinished. Empty when there is no
    file."""
    lines = []
    if path.exists():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


def course(lines: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """(the lines of the steps that the run is made of, one a step, in order; those that each roll-back undid).

    Lines of events are in neither.
    """
    by_step: dict[int, dict[str, Any]] = {}
    undone = []
    for line in lines:
        if _ends_a_part(line):
            undone.append([by_step.pop(step) for step in sorted(by_step) if step > line["to_step"]])
        elif "event" not in line:
            by_step[line["step"]] = line
    return [by_step[step] for step in sorted(by_step)], undone


def set_aside(path: Path) -> bool:
    """Renames a metrics file that has lines in it to NAME.old; whether there was one."""
    if not read_jsonl(path):
        return False
    os.replace(path, path.with_name(path.name + ".old"))
    return True


class TensorBoardWriter:
    def __init__(self, folder: Path, keep_to: int = 0):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise UserError(
                "config.log.tensorboard: tensorboardX is not installed; run: pip install -e '.[track]'"
            ) from None
        # purge_step hides what an earlier process wrote beyond the restored step.
        self._writer = SummaryWriter(str(folder), purge_step=keep_to + 1 if keep_to else None)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Weights & Biases; offline unless the config says otherwise."""

    def __init__(self, cfg: Config, folder: Path):
        try:
            import wandb
        except ImportError:
            raise UserError("config.log.wandb: wandb is not installed; run: pip install -e '.[track]'") from None
        from hybrid_jax import config as config_lib

        # One id per run folder, so that a resumed run goes on in the same curve.
        id_file = folder / "wandb_id"
        run_id = id_file.read_text().strip() if id_file.exists() else secrets.token_hex(4)
        id_file.write_text(run_id)
        self._run = wandb.init(
            project=cfg.log.wandb_project,
            mode=cfg.log.wandb_mode,
            dir=str(folder),
            id=run_id,
            name=folder.name,
            resume="allow",
            config=config_lib.to_dict(cfg),
        )
        # W&B's own step only goes up: it would drop, in silence, the steps that a resumed run does again.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Values) -> None:
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        self._run.log({"step": step, **numbers})

    def close(self) -> None:
        self._run.finish()


def open_writers(
    cfg: Config, folder: Path, restored_step: int, rollbacks: Sequence[tuple[int, Values]] = ()
) -> list[Writer]:
    """The writers that the config asks for, in process 0 (the others write nothing)."""
    writers: list[Writer] = []
    if cfg.log.tensorboard:  # may raise: before the run's own file is touched
        writers.append(TensorBoardWriter(folder / "tensorboard", restored_step))
    if cfg.log.wandb:
        writers.append(WandbWriter(cfg, folder))
    return [JsonlWriter(folder / "metrics.jsonl", restored_step, rollbacks), *writers]


class _Lines(logging.Handler):
    console: Console

    def emit(self, record: logging.LogRecord) -> None:
        level = level_name(record.levelno)
        if record.levelno < logging.INFO:
            self.console.record(self.format(record), level)
        else:
            self.console.phase(record.getMessage(), level)


class Console:
    """What a person sees: dated lines (also kept in train.log), and the progress of training. All of it goes into
    `logs` too, also where nothing is printed (`quiet`).

    On a terminal the progress is one bar that is redrawn; elsewhere it is a plain line for the first steps
    and then one at most every `every_seconds`.
    """

    def __init__(
        self,
        log_path: Path | None = None,
        stream: TextIO | None = None,
        quiet: bool = False,
        every_seconds: float = 10.0,
        logs: RankLogs | None = None,
    ):
        self.stream = stream or sys.stdout
        self.quiet = quiet
        self.every_seconds = every_seconds
        self.bar = not quiet and self.stream.isatty()
        self._log = log_path.open("a", encoding="utf-8") if log_path and not quiet else None
        self._logs = logs
        self._began = time.perf_counter()
        self._drawn = False
        self._last_line = -math.inf
        self._lines = 0

    def text(self, text: str, level: str = "INFO") -> None:
        """Prints `text` as it is, and keeps it in train.log."""
        if not self.quiet:
            self._clear()
            print(text, file=self.stream, flush=True)
        self.record(text, level)

    def record(self, text: str, level: str = "INFO") -> None:
        """Keeps `text` in train.log and the logs alone; what a full disk has no room for is left out."""
        if self._log:
            with _unless_full():
                print(text, file=self._log, flush=True)
        if self._logs:
            self._logs.write(level, text)

    def handler(self) -> logging.Handler:
        """For Python's logging: what the package logs from INFO on stands among the other lines, and what it logs at
        DEBUG in train.log alone."""
        handler = _Lines()
        handler.console = self
        return handler

    def phase(self, text: str, level: str = "INFO") -> None:
        """A line with the seconds since the start: which phase a slow or hanging run is in."""
        self.text(f"[{time.perf_counter() - self._began:7.1f} s] {text}", level)

    def progress(self, step: int, steps: int, values: Values, seconds_left: float) -> None:
        """Shows the step's values: loss, learning_rate, grad_norm, tokens_per_second, tflops_per_second,
        mfu."""
        line = progress_text(values, seconds_left)
        now = time.perf_counter()
        if self.bar:
            width = shutil.get_terminal_size((100, 24)).columns - 1
            share = min(max((width - len(line) - 24), 0), 30)
            filled = round(share * step / max(steps, 1))
            bar = f" {'█' * filled}{'░' * (share - filled)}" if share >= 5 else ""
            drawn = f"step {step:>{len(str(steps))}}/{steps}{bar} {line}"[:width]
            print(f"\r\x1b[2K{drawn}", end="", file=self.stream, flush=True)
            self._drawn = True
        if self._lines < 3 or step == steps or now - self._last_line >= self.every_seconds:
            text = f"step {step:>{len(str(steps))}}/{steps} {line}"
            if not (self.bar or self.quiet):
                print(text, file=self.stream, flush=True)
            self.record(text)
            self._last_line = now
            self._lines += 1

    def _clear(self) -> None:
        if self._drawn:  # leave the bar's last state above what follows
            print(file=self.stream, flush=True)
            self._drawn = False

    def close(self) -> None:
        self._clear()
        if self._log:
            with _unless_full():
                self._log.close()


def progress_text(values: Values, seconds_left: float) -> str:
    """The numbers of a step on one line; what is unknown (nan or absent, as the MFU of a CPU) is left out."""
    parts = [
        f"loss {values['loss']:.4f}",
        f"lr {values['learning_rate']:.2e}",
        f"|g| {values['grad_norm']:.3g}",
    ]
    rate = values.get("tokens_per_second", math.nan)
    if math.isfinite(rate):
        parts.append(f"{short(rate)} tok/s")
    flops = values.get("tflops_per_second", math.nan)
    if math.isfinite(flops):
        parts.append(f"{flops:.3g} TFLOP/s" if flops >= 1 else f"{1000 * flops:.3g} GFLOP/s")
    mfu = values.get("mfu", math.nan)
    if math.isfinite(mfu):
        parts.append(f"MFU {100 * mfu:.1f}%")
    if values.get("skipped", 0):
        parts.append(f"skipped {values['skipped']}")
    if math.isfinite(seconds_left):
        parts.append(f"left {duration(seconds_left)}")
    return " ".join(parts)


def short(number: float) -> str:
    """A count in three digits: 950, 12.3k, 4.56M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """As m:ss, h:mm:ss or Nd hh:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Clock:
    """Tokens per second between marks, without what is not training (compiling, validation, checkpoints).

    A mark is made when a step's numbers arrive, while the next step is already on its way. Between two such marks
    lies one step. Before the first mark lies the filling of that pipeline and before a drained one its emptying:
    these intervals are longer or shorter than a step, so both count only while there is nothing better, the emptying
    together with all since the start.
    """

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step = tokens_per_step
        self._smoothed = math.nan  # seconds per step over the last ~20 steps
        self._rough = math.nan  # the same where no interval was a step's
        self._at = self._started = time.perf_counter()
        self._marks = 0  # since it started
        self._seconds, self._steps = 0.0, 0

    @property
    def seconds_per_step(self) -> float:
        return self._rough if math.isnan(self._smoothed) else self._smoothed

    def start(self) -> None:
        """Begins to count here; what went by since the last mark is not training."""
        self._at = self._started = time.perf_counter()
        self._marks = 0

    def mark(self, drained: bool = False) -> None:
        """A step has ended; `drained`: with no other behind it."""
        now = time.perf_counter()
        seconds, self._at = now - self._at, now
        self._marks += 1
        if self._marks == 1 or drained:
            self._rough = (now - self._started) / self._marks
            return
        self._seconds += seconds
        self._steps += 1
        old = self._smoothed
        self._smoothed = seconds if math.isnan(old) else 0.9 * old + 0.1 * seconds

    def take(self) -> float:
        """Tokens per second over the steps since the last `take`; where none could be timed, as of late."""
        seconds = self._seconds / self._steps if self._steps else self.seconds_per_step
        self._seconds, self._steps = 0.0, 0
        return self.tokens_per_step / seconds if seconds > 0 else math.nan
