"""A training run, top to bottom: devices, data, state, compile, loop, last words.

Its folder (config.workdir) gets config.json, metrics.jsonl, train.log, logs/, checkpoints/, loss.png and sample.txt.
A run that finds checkpoints there goes on from the newest one. Steps are counted from 1: step k is the k-th
update.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from hybrid_jax import (
    checkpoint,
    cluster,
    data,
    distributed,
    divergence,
    feed,
    flops,
    gemm_cache,
    init_from,
    metrics,
    output,
    provenance,
    report,
    rollback,
    sharding,
    validation,
)
from hybrid_jax import config as config_lib
from hybrid_jax.config import Config
from hybrid_jax.data import ngram, run_tokenizer
from hybrid_jax.data.interface import Dataset
from hybrid_jax.errors import UserError
from hybrid_jax.plot import plot
from hybrid_jax.profiling import Profile
from hybrid_jax.rank_logs import RankLogs
from hybrid_jax.run_folder import RunFolder
from hybrid_jax.sample import on_one_device, prompt_ids, sample
from hybrid_jax.signals import StopRequest, exit_code
from hybrid_jax.step import Programs, batch_shape

_COMPILE_SECONDS = 3600  # that one process may take longer than another


def run(cfg: Config) -> None:
    """Trains as `cfg` says. Raises UserError for what the user can mend, SystemExit(130 or 143) after a
    signal."""
    distributed.initialize(cluster.find())
    check_alike(cfg)
    main = distributed.is_main()
    workdir = Path(cfg.workdir).expanduser()
    folder = RunFolder(workdir, jax.process_index())
    try:
        problem = folder.claim() if main else ""
        if not distributed.everywhere(not problem):
            raise UserError(problem or "config.workdir: process 0 cannot use it; its own output says why")
        _see(folder)
        _logged(cfg, workdir, main)
    except UserError:
        folder.unmake()
        raise
    except OSError as error:
        place = error.filename2 or error.filename or workdir  # what was to be replaced, and not what by
        raise UserError(f"{place}: {error.strerror or error}; the run's folder is {workdir}") from error
    finally:
        folder.release()


def check_alike(cfg: Config) -> None:
    """Raises UserError in every process of the run unless all have the same config, but for the folders of a host."""
    remedy = "start all processes with the same config"
    distributed.check_alike(provenance.of_every_process(cfg), "comparing the configs", remedy)


def _see(folder: RunFolder) -> None:
    """Raises UserError in every process unless all of them see the folder that process 0 writes to."""
    if jax.process_count() == 1:
        return
    doing = "looking for config.workdir"
    with folder.mark() if distributed.is_main() else contextlib.nullcontext("") as mark:
        shown = distributed.agree(mark and json.dumps([mark, str(folder.folder.absolute())]), doing)
        mark, path = json.loads(shown[0])
        blind = distributed.agree("" if folder.sees(mark) else "no", doing)
    if blind:
        raise UserError(
            f"config.workdir: {path} of {distributed.named([0])} is not what {distributed.named(list(blind))} "
            f"see{'s' * (len(blind) == 1)} there; checkpoints are written by all processes together, so set it to a "
            "folder on a file system that all hosts share"
        )


def _logged(cfg: Config, workdir: Path, main: bool) -> None:
    logs = RankLogs(workdir / "logs", jax.process_index())
    console = metrics.Console(workdir / "train.log", quiet=not main, logs=logs)
    handler, logger = console.handler(), logging.getLogger("hybrid_jax")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # else a root handler, as absl's, says it again
    try:
        with logs.listening(show=main):
            _run(cfg, workdir, console)
    except KeyboardInterrupt:  # outside the loop, which has its own answer to it
        console.text("interrupted; run the same command to go on from the newest checkpoint, if there is one")
        raise SystemExit(130) from None
    except UserError as error:
        console.record(f"error: {error}", "ERROR")
        raise
    except Exception:
        logs.write("ERROR", traceback.format_exc().rstrip())
        raise
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)  # a thread may still have something to say: see orbax_log.py
        logger.propagate = True
        console.close()
        logs.close()


def _run(cfg: Config, workdir: Path, console: metrics.Console) -> None:
    main = distributed.is_main()

    # ---- devices -----------------------------------------------------------------
    config_lib.check_devices(cfg, jax.device_count(), jax.process_count())
    mesh = sharding.make_mesh(cfg.mesh)
    programs = Programs(cfg, mesh)

    # ---- data --------------------------------------------------------------------
    console.phase("opening the data")
    train_data, valid_data = data.open_splits(cfg)
    if main:
        console.text(report.banner(cfg, jax.devices(), workdir))
        if hosts := distributed.table():
            console.text(f"\n{hosts}\n")
        console.text(f"data        {train_data.description}")
    held_out = valid_data.identity if valid_data is not None else {}
    distributed.check_alike(
        {**train_data.identity, **{f"validation: {part}": value for part, value in held_out.items()}},
        "comparing the data",
        "give all processes the same data, in whatever folder it is",
    )
    prompt = prompt_ids(cfg.eval, train_data.tokenizer)  # now and not after the run, as it may fail

    # ---- state: restored, or fresh -----------------------------------------------
    meta = provenance.describe(cfg, train_data.identity)
    checkpoints, history = None, rollback.History()
    if not cfg.checkpoint.every_steps and any((workdir / "checkpoints").glob("[0-9]*")):
        raise UserError(
            f"config.checkpoint.every_steps: 0, but {workdir}/checkpoints holds those of a run that this one would "
            "not go on with; set another config.workdir, or a number of steps"
        )
    if cfg.checkpoint.every_steps:
        keeping = cfg.checkpoint
        checkpoints = checkpoint.Checkpoints(
            workdir / "checkpoints", keeping.keep, meta, console.phase,
            every=keeping.every_steps, keep_every=keeping.keep_every,
            max_failures=keeping.max_failures, timeout_seconds=keeping.timeout_seconds,
            warn=lambda line: console.phase(line, "WARNING"),
        )  # fmt: skip
        history = rollback.read(checkpoints)
    training = Training(cfg, workdir, console, programs, checkpoints, history, valid_data, prompt)
    training.restore()

    # ---- training and last words -------------------------------------------------
    if main:
        events = [(r.at, r.event) for r in history.rollbacks]
        run_tokenizer.write(workdir, train_data.tokenizer)
        if not training.done and not events and metrics.set_aside(workdir / "metrics.jsonl"):
            console.text("note: the metrics.jsonl of an earlier run is kept as metrics.jsonl.old")
        training.open_writers(events)
        output.write(workdir / "config.json", json.dumps(config_lib.to_dict(cfg), indent=2) + "\n")
    with training.request:
        try:
            training.loop(train_data)
            training.finish(train_data)
        finally:
            training.write_line()
            if checkpoints:
                checkpoints.close()
            training.write_failures()
            for writer in training.writers:
                writer.close()


class Training:
    """The state of a run and what is done with it step by step; the numbers of step k are looked at during k
    + 1."""

    def __init__(
        self,
        cfg: Config,
        workdir: Path,
        console: metrics.Console,
        programs: Programs,
        checkpoints: checkpoint.Checkpoints | None,
        history: rollback.History,
        valid_data: Dataset | None,
        prompt: list[int],
    ):
        self.prompt = prompt
        self.cfg, self.workdir, self.console, self.programs = cfg, workdir, console, programs
        self.checkpoints, self.history, self.valid_data = checkpoints, history, valid_data
        self.writers: list[metrics.Writer] = []
        self.detector = divergence.Detector(cfg)
        self.placement = feed.Placement(batch_shape(cfg, programs.mesh), sharding.batch_sharding(programs.mesh))
        self.tokens_per_step = cfg.train.global_batch_size * cfg.train.sequence_length
        self.clock = metrics.Clock(self.tokens_per_step)
        # FLOP/s of a device = tokens/s * this
        self.device_flops = flops.flops_per_token(cfg.model, cfg.train.sequence_length) / jax.device_count()
        self.state: Any = None
        self.done = 0  # steps
        self.bad_steps = 0  # in a row, as of the last step looked at
        self.request = StopRequest(cfg.train.requeue_exit_code)
        self.stop_signal = 0  # as agreed by all processes
        self._pending: tuple[int, dict[str, jax.Array]] | None = None  # a step's numbers, perhaps still being computed
        self._line: tuple[int, dict[str, Any]] | None = None  # a step's numbers, looked at but not written yet
        self._saved_line: dict[str, Any] = {}  # that of the restored step, out of its checkpoint
        self.validation = validation.Validation(programs, valid_data) if valid_data is not None else None
        self._origin: dict[str, Any] = {}  # of the initial parameters; {} for random ones

    # ---- the state ---------------------------------------------------------------

    def restore(self) -> None:
        """Takes the newest checkpoint's state, or the initial one where there is none."""
        self.state = None  # its memory is needed
        saved, changes = None, []
        if self.checkpoints and (found := self.checkpoints.restore(self.programs.state)):
            self.state, self.done, saved = found
            self._origin = saved.get("init_from", {})
            changes = provenance.changes(saved, self.checkpoints.meta)
            for line in changes:
                self.console.text(f"note: {line}", "WARNING")
        else:
            self.state, self.done = self._initial(), 0
        self._saved_line = (saved or {}).get("line", {})
        # Losses of another model or other data say nothing about those to come.
        self.detector.resume(saved.get("detector", {}) if saved and not changes else {})
        self.bad_steps = 0
        if not self.history.resume(saved):
            self.console.text(f"note: the roll-backs in {self.history.path} were of a run that is gone")

    def _initial(self) -> Any:
        """The state before the first step: random parameters, or those of config.checkpoint.init_from."""
        if not self.cfg.checkpoint.init_from:
            self.console.phase("drawing the initial parameters")
            with jax.set_mesh(self.programs.mesh):
                return self.programs.init(self.cfg.train.seed)
        params, self._origin = init_from.read(self.cfg, self.programs.state["params"], self.console.text)
        with jax.set_mesh(self.programs.mesh):
            return self.programs.begin(params)

    def open_writers(self, rollbacks: Sequence[tuple[int, metrics.Values]]) -> None:
        """In process 0. A run may end between a checkpoint and that step's line, or before the last line is complete:
        then the line comes out of the checkpoint."""
        lines, _ = metrics.course(metrics.read_jsonl(self.workdir / "metrics.jsonl"))
        keep_to, last = self.done, self.done >= self.cfg.train.steps
        if self._saved_line and (last or self.done not in [line["step"] for line in lines]):
            self._line, keep_to = (self.done, self._saved_line), self.done - last
        self.writers = metrics.open_writers(self.cfg, self.workdir, keep_to, rollbacks)

    # ---- the loop ----------------------------------------------------------------

    def loop(self, train_data: Dataset) -> None:
        """Runs the steps from `done` + 1 to train.steps."""
        cfg, steps, start = self.cfg, self.cfg.train.steps, self.done
        if start >= steps:
            self.console.phase(f"step {start} of {steps} is done already; raise config.train.steps to go on")
            return
        if note := gemm_cache.note():
            self.console.phase(f"gemm cache: {note}")
        self.console.phase("compiling the training step")
        step_fn = self.programs.compile_step()
        # Collectives of CPUs wait half a minute for each other, and compiling may take one process longer than that.
        distributed.agree("", "compiling the training step", _COMPILE_SECONDS)
        self._keep_choices()
        if self.checkpoints:
            self.programs.inspect(self.state["params"])  # compiles what the first checkpoint would wait for
            self.checkpoints.prepare(self.state)
        profile = Profile(cfg.train.profile_steps, steps, self.workdir / "profile")
        self.console.phase(f"training: steps {start + 1} to {steps}")
        request = self.request.listen()
        with profile:
            while self.done < steps:
                stream = rollback.Stream(train_data, self.history.rollbacks)
                rows, size = self.placement.rows, cfg.train.global_batch_size
                try:
                    with data.prefetch(stream, self.done, rows, size) as batches:
                        self._steps(step_fn, batches, request, profile)
                except divergence.Diverged as diverged:
                    self._roll_back(diverged)

    def _keep_choices(self) -> None:
        if distributed.is_main() and (note := gemm_cache.publish()):
            self.console.phase(f"gemm cache: {note}")

    def _steps(
        self, step_fn: Callable[..., Any], batches: data.prefetch, request: StopRequest, profile: Profile
    ) -> None:
        cfg, steps = self.cfg, self.cfg.train.steps
        several = jax.process_count() > 1
        flags = {0: self.programs.stop_flags(0)}
        self.clock.start()
        for step in range(self.done + 1, steps + 1):
            if profile.begins(step):
                self._look()
                profile.start()
            signal = request.signal if several else 0
            if signal not in flags:
                flags[signal] = self.programs.stop_flags(signal)
            self.state, numbers = step_fn(self.state, self._place(next(batches), step), flags[signal])
            self._look()  # at the step before, while this one runs
            self._pending, self.done = (step, numbers), step
            if not several:
                self.stop_signal = request.signal
            self._look_at_checkpoint()

            validates = _due(step, cfg.eval.every_steps) and step < steps
            saves = _due(step, cfg.checkpoint.every_steps) or step == steps or self.stop_signal
            if validates or saves or profile.ends(step):
                self._look(hold=True)
                if profile.ends(step):
                    profile.stop()
                    self.console.phase(f"profile written to {profile.folder}")
                assert self._line
                if validates:
                    self._line[1].update(self._validate())
                if saves:
                    self._save()
                if step < steps:  # the last line waits for `finish`
                    self.write_line()
                self.clock.start()
            if self.stop_signal:
                self._stop()

    def _place(self, batch: dict[str, np.ndarray], step: int) -> dict[str, jax.Array]:
        feed.check_ids(batch, self.cfg.model.vocab_size, step)
        return self.placement.place(batch)

    def _look(self, hold: bool = False) -> None:
        """Waits for the pending step's numbers and writes them; with `hold` the line stays open for more
        values.

        Raises Diverged when they are one too many that are not good.
        """
        self.write_line()
        if self._pending is None:
            return
        (step, arrays), self._pending = self._pending, None
        got = jax.device_get(arrays)
        self.clock.mark(drained=hold)
        self.bad_steps = int(got["bad_steps"])
        if jax.process_count() > 1:
            self.stop_signal = int(got["stop"])
        logged = step == 1 or step == self.cfg.train.steps or _due(step, self.cfg.log.every_steps)
        verdict = self.detector.observe(step, float(got["loss"]), self.bad_steps)
        if logged or hold or self.detector.off:
            rate = self.clock.take()
            values = {name: float(got[name]) for name in ("loss", "grad_norm", "learning_rate")}
            values |= {"tokens_per_second": rate, "tflops_per_second": rate * self.device_flops / 1e12}
            peak = report.peak_flops(jax.devices()[0].device_kind)
            if peak:
                values["mfu"] = rate * self.device_flops / peak
            values |= {"tokens": step * self.tokens_per_step, "skipped": int(got["skipped"])}
            if self.detector.off and math.isfinite(self.detector.limit):
                values |= {"off_band": self.detector.off, "band": self.detector.limit}
            self._line = (step, values)
            left = self.clock.seconds_per_step * (self.cfg.train.steps - step)
            self.console.progress(step, self.cfg.train.steps, values, left)
        if self.bad_steps:
            what = f"{self.programs.describe_numbers(got)} not finite"
            self.console.text(f"step {step}: {what}; update skipped ({self.bad_steps} in a row)", "WARNING")
            if verdict:
                verdict.reason += f", the last of them step {step}: {what}"
                verdict.about = self.programs.describe_parameters(self.state["params"])
        if verdict:
            raise verdict
        if not hold:
            self.write_line()

    def write_line(self, **more: Any) -> None:
        """Writes the numbers of the last step looked at, once, together with `more`."""
        if self._line is not None:
            (step, values), self._line = self._line, None
            for writer in self.writers:
                writer.write(step, {**values, **more})

    def _event(self, step: int, **values: Any) -> None:
        for writer in self.writers:
            writer.write(step, values)

    def _roll_back(self, found: divergence.Diverged) -> None:
        """Goes back to the last good checkpoint. Raises UserError where that is off, or was done as often as it may
        be."""
        self.write_line()
        history, checkpoints, most = self.history, self.checkpoints, self.cfg.divergence.max_rollbacks
        if checkpoints is None or not most:
            self._give_up(found, "")
        checkpoints.settle()
        to = rollback.target(checkpoints.steps(), found.first, self.cfg.checkpoint.every_steps)
        count = len(history.rollbacks)
        if count >= most:
            checkpoints.delete_after(to)  # else the next start would go on from what led here
            self._give_up(found, f"rolled back {count} times already (config.divergence.max_rollbacks); ")
        done = history.add(found.step, to, found.reason, checkpoints)
        self._event(done.at, **done.event)
        self.console.text(
            f"step {done.at}: {done.reason}: back to {f'checkpoint {to}' if to else 'the initial state'}; batches "
            f"{done.first_batch} to {done.next_batch - 1} of the data are skipped (roll-back {count + 1} of {most})",
            "WARNING",
        )
        self.restore()

    def _give_up(self, found: divergence.Diverged, past: str) -> NoReturn:
        self._event(found.step, event="stopped", reason=found.reason)
        self._plot()
        newest = self.checkpoints.steps() if self.checkpoints else []
        kept = f"checkpoint {newest[-1]} is kept" if newest else "no checkpoint was written"
        about = f"{found.about}; " if found.about else ""
        raise UserError(f"{found.where}: {found.reason}; {about}{kept}; {past}{found.advice}") from None

    def _why_not_saved(self) -> str:
        """What led here may be in the state: good checkpoints are not to be pushed out."""
        if self.bad_steps:
            return "it was not finite"
        first = self.done + 1 - self.detector.off
        last_words = self.stop_signal or self.done == self.cfg.train.steps
        assert self.checkpoints
        if first <= self.done and not last_words:
            lost = self.checkpoints.pushes_out(self.done)
            if rollback.loses_all(self.checkpoints.steps(), lost, first):
                return f"the loss left its band at step {first} and no checkpoint from before that would be left"
        return ""

    def _save(self) -> None:
        """Starts a checkpoint of the state; for how long that held training up goes into the step's line."""
        if not self.checkpoints:
            return
        began = time.perf_counter()
        if why := self._why_not_saved():
            self.console.text(f"step {self.done}: not saved, as {why}", "WARNING")
            self._event(self.done, event="not_saved", reason=why)
            return
        finite, _ = self.programs.inspect(self.state["params"])
        if not finite.all():
            bad = self.programs.describe_group(int(np.argmin(finite)))
            raise divergence.Diverged(
                f"step {self.done}", self.done, self.done + 1 - self.detector.off,
                f"the parameters of {bad} are not finite and were not saved", "lower config.optimizer.learning_rate",
            )  # fmt: skip
        line = metrics.finite(self._line[1]) if self._line else {}
        record = {"detector": self.detector.record, "rollbacks": self.history.record, "line": line}
        record |= {"init_from": self._origin} if self._origin else {}
        self.checkpoints.save(self.done, self.state, record)
        self.write_failures()
        if self._line is not None:
            self._line[1]["checkpoint_seconds"] = time.perf_counter() - began

    def _look_at_checkpoint(self) -> None:
        """Says at once when a checkpoint could not be written; raises UserError when it was one too many."""
        if self.checkpoints:
            try:
                self.checkpoints.poll()
            finally:
                self.write_failures()

    def write_failures(self) -> None:
        """Writes a line for each checkpoint that could not be written: at the step when that was known."""
        for step, reason in self.checkpoints.failures() if self.checkpoints else []:
            self._event(self.done, event="checkpoint_failed", checkpoint=step, reason=reason)

    def _end_checkpoints(self) -> None:
        """Waits for the last checkpoint; one that could not be written is tried once more. UserError if in vain."""
        if not self.checkpoints:
            return
        try:
            self.checkpoints.wait()
        except cluster.MissingProcesses:
            raise
        except UserError:
            self.console.phase(f"trying once more to write checkpoint {self.done}")
            self._save()
            self.checkpoints.wait()

    def _stop(self) -> None:
        """Last words after a signal. Raises SystemExit."""
        self.write_line()
        self._plot()
        if self.checkpoints:
            self._end_checkpoints()
            newest = self.checkpoints.steps()
            kept = f"checkpoint {newest[-1]} is whole; run the same command to go on from there" if newest else ""
        else:
            kept = "no checkpoint was written (config.checkpoint.every_steps is 0)"
        self.console.text(f"stopped after step {self.done} of {self.cfg.train.steps}; {kept}")
        raise SystemExit(exit_code(self.stop_signal, self.cfg.train.requeue_exit_code))

    # ---- validation and the end --------------------------------------------------

    def _validate(self) -> dict[str, float]:
        """Validation loss, over the same eval.batches batches every time."""
        if self.validation is None:
            return {}
        began = time.perf_counter()
        loss = self.validation.loss(self.state["params"], self.cfg.eval.batches)
        self.console.text(
            f"validation after step {self.done}: {loss} ({loss.tokens:,} tokens, {time.perf_counter() - began:.1f} s)"
        )
        return loss.values("validation_loss")

    def finish(self, train_data: Dataset) -> None:
        """Final validation (and the n-gram model beside it), sample.txt and loss.png."""
        cfg = self.cfg
        if jax.process_count() == 1:  # of several, none may leave the others waiting
            self.request.no_more_steps()
        self._end_checkpoints()
        results = self._validate()
        self._keep_choices()  # its program's too
        if self.valid_data is not None and cfg.eval.ngram_order and distributed.is_main():
            windows = cfg.eval.batches * self.placement.global_batch_size
            nats = ngram.nats_per_token(train_data, self.valid_data, cfg.eval.ngram_order, windows)
            loss = validation.Loss(nats, 0, self.valid_data.tokenizer.bytes_per_token)
            results |= loss.values("ngram_loss")
            self.console.text(
                f"beside it, a Witten-Bell {cfg.eval.ngram_order}-gram model of the same training text: {loss}"
            )
        self.write_line(**results)
        self._plot()
        if cfg.eval.sample_tokens:
            self._sample(train_data)
        stats = jax.local_devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            self.console.phase(f"peak memory of a device: {stats['peak_bytes_in_use'] / 2**30:.2f} GiB")
        self.console.phase(f"done: {self.workdir}")

    def _sample(self, train_data: Dataset) -> None:
        params = on_one_device(self.state["params"])
        if not distributed.is_main():
            return
        seed = self.cfg.train.seed
        text = sample(self.cfg.eval, self.programs.model, params, self.prompt, train_data.tokenizer, seed)
        output.write(self.workdir / "sample.txt", text + "\n")
        if text.strip():
            self.console.text(f"---- sample ----\n{text}\n----------------")
        else:
            self.console.text(
                "no sample: the ids drawn spell no text, as the vocabulary is larger than the tokenizer's"
            )

    def _plot(self) -> None:
        if not self.writers:
            return
        title = f"{self.workdir.name}: {self.cfg.model.layout}"
        try:
            plot(self.workdir / "metrics.jsonl", self.workdir / "loss.png", title)
        except ImportError:
            self.console.text("loss.png not drawn: matplotlib is not installed; run: pip install matplotlib")
        except OSError as error:  # no reason to end otherwise than without the picture
            self.console.text(f"loss.png not drawn: {error.strerror or error}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
