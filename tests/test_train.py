"""The training run: accumulation, skipped updates, resuming, signals, and what lies in its folder
afterwards."""

import dataclasses
import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax import checkpoint, data, feed, manifest, metrics, optimizer, sharding, step, train
from hybrid_jax.config import MeshConfig
from hybrid_jax.data.store import StoreWriter
from hybrid_jax.errors import UserError
from hybrid_jax.kernels import dispatch
from tests.processes import free_port
from tests.tiny import EVERY_KIND, tiny_config

ROOT = Path(__file__).parents[1]


def lines_of(workdir):
    return metrics.read_jsonl(Path(workdir) / "metrics.jsonl")


def final_state(cfg):
    """(the newest checkpoint's state, its step)."""
    programs = step.Programs(cfg, sharding.make_mesh(cfg.mesh))
    with checkpoint.Checkpoints(Path(cfg.workdir) / "checkpoints", 9, {"pattern": ""}, print) as checkpoints:
        state, number, _ = checkpoints.restore(programs.state)
    return jax.device_get(state), number


def rms_error(a, b):
    a, b = (np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(t)]) for t in (a, b))
    return np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))


# ---- the step ----


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(MeshConfig(), jax.devices()[:1])


def uneven_batch(cfg, shape):
    """Rows with very different numbers of unmasked targets, [A, B, T]."""
    rng = np.random.default_rng(1)
    rows, length = cfg.train.global_batch_size, cfg.train.sequence_length
    tokens = rng.integers(0, cfg.model.vocab_size, (rows, length))
    targets = np.where(np.arange(length) < 4 ** (np.arange(rows) % 3)[:, None], np.roll(tokens, -1, 1), -1)
    targets[-1] = -1  # and one row without any
    arrays = {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": np.ones_like(tokens),
        "positions": np.broadcast_to(np.arange(length), tokens.shape),
    }
    return {name: jnp.asarray(a.reshape(shape), jnp.int32) for name, a in arrays.items()}


def test_accumulated_gradients_equal_one_large_batch_with_uneven_counts(mesh):
    results = []
    for micro in (0, 2):
        cfg = tiny_config("x", model__pattern="A-", train__micro_batch_size=micro)
        programs = step.Programs(cfg, mesh)
        shape = step.batch_shape(cfg, mesh)
        assert shape == ((1, 8, 32) if micro == 0 else (4, 2, 32))
        with jax.set_mesh(mesh):
            params = programs.model.init(jax.random.key(0))
            results.append(jax.jit(programs.gradients)(params, uneven_batch(cfg, shape)))
    (whole, grads), (parts, summed) = results
    counts = [int(c) for c in np.sum(np.asarray(uneven_batch(cfg, shape)["targets"]) >= 0, axis=(1, 2))]
    assert len(set(counts)) > 2  # else a mean of means would pass
    assert float(whole["count"]) == float(parts["count"]) == sum(counts)
    assert float(parts["loss"]) == pytest.approx(float(whole["loss"]), rel=1e-6)
    error = rms_error(summed, grads)
    assert error < 1e-6, error
    for path, leaf in optimizer.leaf_paths(grads):
        assert leaf.dtype == jnp.float32, path


def test_z_loss_is_in_the_gradient_and_not_in_the_logged_loss(mesh):
    """Against the formula written out over the logits: mean of nll + 0.5 log(Z)^2; also when accumulated."""
    plain = tiny_config("x", model__pattern="A-")
    params = step.Programs(plain, mesh).model.init(jax.random.key(0))
    params["embed"]["weight"] *= 20.0  # so that log(Z) varies

    def written_out(params, weight):
        batch = uneven_batch(plain, (8, 32))
        keep = batch["targets"] >= 0
        logits = step.Programs(plain, mesh).model.logits(
            params, batch["tokens"], batch["segment_ids"], batch["positions"]
        )
        log_z = jax.nn.logsumexp(logits, axis=-1)
        nll = log_z - jnp.take_along_axis(logits, jnp.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
        mean = [jnp.sum(jnp.where(keep, x, 0.0)) / jnp.sum(keep) for x in (nll, log_z**2)]
        return mean[0] + weight * mean[1], mean[0]

    wanted = jax.jit(jax.value_and_grad(written_out, has_aux=True))
    (objective, loss), gradient = wanted(params, 0.5)
    assert rms_error(wanted(params, 0.0)[1], gradient) > 0.1  # the z-loss is a good part of it
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(gradient)))
    for micro in (0, 2):
        cfg = tiny_config("x", model__pattern="A-", model__z_loss=0.5, train__micro_batch_size=micro)
        programs = step.Programs(cfg, mesh)
        batch = uneven_batch(cfg, step.batch_shape(cfg, mesh))
        with jax.set_mesh(mesh):
            values, grads = jax.jit(programs.gradients)(params, batch)
            assert float(values["objective"]) == pytest.approx(float(objective), rel=1e-5)
            error = rms_error(grads, gradient)
            assert error < 1e-5, error
            state = {**programs.init(0), "params": params}
            state = jax.tree.map(lambda x, s: jax.device_put(jnp.copy(x), s.sharding), state, programs.state)
            _, numbers = programs.compile_step()(state, batch, programs.stop_flags(0))
        assert float(numbers["loss"]) == pytest.approx(float(loss), rel=1e-5)
        assert float(numbers["grad_norm"]) == pytest.approx(norm, rel=1e-5)


def test_a_step_that_is_not_finite_changes_nothing_and_says_where(mesh):
    programs = step.Programs(tiny_config("x", model__pattern="A-A-"), mesh)
    batch = uneven_batch(programs.cfg, (1, 8, 32))
    compiled, stop = programs.compile_step(), programs.stop_flags(0)
    with jax.set_mesh(mesh):
        state = programs.init(0)
        for _ in range(2):  # the first update has learning rate 0
            state, numbers = compiled(state, batch, stop)
        assert np.all(numbers["finite"]) and int(numbers["skipped"]) == 0
        good = jax.device_get(state)
        weight = state["params"]["layers"]["1"]["mlp"]["gate_proj"]["weight"]
        state["params"]["layers"]["1"]["mlp"]["gate_proj"]["weight"] = weight.at[1, 0, 0].set(jnp.nan)
        poisoned = jax.device_get(state)
        for count in (1, 2):
            state, numbers = compiled(state, batch, stop)
            assert not np.isfinite(numbers["loss"])
            assert int(numbers["bad_steps"]) == int(state["bad_steps"]) == count
        after = jax.device_get(state)
        for name in ("params", "opt_state"):
            for got, want in zip(jax.tree.leaves(after[name]), jax.tree.leaves(poisoned[name]), strict=True):
                np.testing.assert_array_equal(got, want)
        assert int(after["step"]) == 4 and int(after["skipped"]) == 2
        finite, _ = programs.inspect(state["params"])
        assert [programs.describe_group(int(i)) for i in np.flatnonzero(~finite)] == [
            "layers.1.mlp.gate_proj.weight[1] (sublayer 3, '-')"
        ]
        # Back to what was good: training goes on, the count in a row starts again.
        state["params"] = jax.device_put(good["params"], jax.tree.map(lambda x: x.sharding, programs.state["params"]))
        state, numbers = compiled(state, batch, stop)
        assert int(numbers["bad_steps"]) == 0 and int(numbers["skipped"]) == 2
        assert int(state["opt_state"]["count"]) == 3  # skipped updates do not advance the schedule
        assert not np.array_equal(state["params"]["norm"]["weight"], good["params"]["norm"]["weight"])


def test_backward_order_puts_the_deepest_sublayer_first(mesh):
    programs = step.Programs(tiny_config("x", model__pattern="GA-GA-G"), mesh)
    ordered = [programs.describe_group(i) for i in programs.backward_order(range(len(programs.groups)))]
    assert ordered[0].startswith("norm.weight")
    assert ordered[-1] == "embed.weight"
    numbers = [int(text.split("sublayer ")[1].split(",")[0]) for text in ordered if "sublayer" in text]
    assert numbers == sorted(numbers, reverse=True) and set(numbers) == set(range(7))
    assert "tail.0" in ordered[1] and "layers.2" in next(t for t in ordered if "sublayer 5" in t)


# ---- data ----


def test_rows_of_a_step_do_not_depend_on_accumulation(mesh):
    seen = []
    for micro in (0, 2):
        cfg = tiny_config("x", train__micro_batch_size=micro)
        dataset = data.open(cfg.data, sequence_length=32, vocab_size=64, seed=3)
        placement = feed.Placement(step.batch_shape(cfg, mesh), sharding.batch_sharding(mesh))
        batch = placement.place(dataset.batch(5, placement.rows, placement.global_batch_size))
        seen.append(np.asarray(batch["tokens"]).reshape(8, 32))
    np.testing.assert_array_equal(*seen)


@pytest.mark.parametrize(("name", "value"), [("tokens", 64), ("tokens", -1), ("targets", 64), ("targets", -2)])
def test_an_id_outside_the_vocabulary_stops_the_run(name, value):
    batch = {"tokens": np.zeros((2, 4), np.int32), "targets": np.full((2, 4), -1, np.int32)}
    feed.check_ids(batch, 64, 7)
    batch[name][1, 2] = value
    with pytest.raises(UserError, match=rf"config\.model\.vocab_size: step 7 has the id {value} in its {name}"):
        feed.check_ids(batch, 64, 7)


# ---- whole runs ----


@pytest.mark.parametrize("pattern", ["GA-", pytest.param(EVERY_KIND, marks=pytest.mark.slow)])
def test_forty_steps_equal_a_stopped_and_resumed_run_bit_for_bit(pattern, tmp_path, monkeypatch, capsys):
    straight, cut = (
        tiny_config(tmp_path / name, train__steps=40, model__pattern=pattern) for name in ("straight", "cut")
    )
    # The two runs that begin share a program, for the sake of time; the resumed one compiles its own.
    compiled = step.Programs(straight, sharding.make_mesh(straight.mesh)).compile_step()
    with monkeypatch.context() as patch:
        patch.setattr(step.Programs, "compile_step", lambda self: compiled)
        train.run(straight)
    expected = lines_of(straight.workdir)
    assert [line["step"] for line in expected] == list(range(1, 41))

    write = metrics.JsonlWriter.write

    def write_and_stop(self, number, values):
        write(self, number, values)
        if number == 19:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(step.Programs, "compile_step", lambda self: compiled)
        patch.setattr(metrics.JsonlWriter, "write", write_and_stop)
        with pytest.raises(SystemExit) as stopped:
            train.run(cut)
    assert stopped.value.code == cut.train.requeue_exit_code == 75
    number = final_state(cut)[1]
    assert number == 20  # step 20 was under way when the signal came: it is finished, and the last one
    assert "stopped after step 20 of 40; checkpoint 20 is whole; run the same command" in capsys.readouterr().out
    assert (tmp_path / "cut" / "loss.png").exists()
    assert len(lines_of(cut.workdir)) == 20
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:  # as if it had run on before it was killed
        file.write(json.dumps({"step": 21, "loss": 0.0}) + "\n")

    train.run(cut)
    assert "restored checkpoint 20" in capsys.readouterr().out
    got = lines_of(cut.workdir)
    timing = ("tokens_per_second", "tflops_per_second")
    assert [line["step"] for line in got if "checkpoint_seconds" in line] == [20, 40]
    for line in (*got, *expected):
        for name in timing:
            assert line.pop(name) > 0
        assert 0 < line.pop("checkpoint_seconds", 1) < 5
    assert got == expected
    assert len({line["loss"] for line in got}) == 40 and got[-1]["loss"] < got[0]["loss"]
    (a, last_a), (b, last_b) = final_state(cut), final_state(straight)
    assert last_a == last_b == 40
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)

    # Done already: said, and nothing is trained or written twice.
    train.run(cut)
    assert "step 40 of 40 is done already" in capsys.readouterr().out
    assert [line["step"] for line in lines_of(cut.workdir)] == list(range(1, 41))

    with pytest.raises(UserError, match=r"params\.embed\.weight is float32\[64, 16\] but this config needs"):
        train.run(tiny_config(tmp_path / "cut", train__steps=41, model__pattern=EVERY_KIND, model__vocab_size=66))


def test_the_line_of_a_checkpoint_is_written_again_if_a_kill_lost_it(tmp_path):
    cfg = tiny_config(
        tmp_path, train__steps=4, model__pattern="A-", eval__batches=1, eval__every_steps=2, checkpoint__every_steps=4
    )
    train.run(cfg)
    path = tmp_path / "metrics.jsonl"
    first, last = path.read_text().splitlines(keepends=True)[:3], lines_of(tmp_path)[-1]
    no_validation = json.dumps({k: v for k, v in last.items() if "validation" not in k}) + "\n"
    # Killed before the line; ended before its validation; killed before the line, and then to go on.
    for left, steps in (("", 4), (no_validation, 4), ("", 6)):
        path.write_text("".join(first) + left)
        train.run(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=steps)))
        got = lines_of(tmp_path)
        assert [line["step"] for line in got] == list(range(1, steps + 1))
        for name in ("loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second"):
            assert got[3][name] == last[name]
        assert got[3].get("validation_loss") == (last["validation_loss"] if steps == 4 else None)
        assert got[-1]["validation_loss"] > 0


def test_a_run_on_text_leaves_everything_in_its_folder(tmp_path, capsys):
    cfg = tiny_config(
        tmp_path / "run",
        model__pattern="A-",
        model__vocab_size=257,
        data__source="files",
        data__path=str(ROOT / "hybrid_jax"),
        data__validation_fraction=0.2,
        eval__batches=2,
        eval__every_steps=2,
        eval__ngram_order=2,
        eval__sample_tokens=5,
        eval__sample_prompt="import ",
        train__profile_steps="3:9",  # of 4 steps
        log__every_steps=3,
        checkpoint__every_steps=2,
    )
    train.run(cfg)
    out = capsys.readouterr().out
    folder = tmp_path / "run"
    lines = {line["step"]: line for line in lines_of(folder)}
    assert sorted(lines) == [1, 2, 3, 4]  # the first, each third, each with a validation, the last
    for line in lines.values():
        assert {"loss", "grad_norm", "learning_rate", "tokens_per_second"} <= set(line)
    assert lines[1]["learning_rate"] == 0.0 and lines[2]["learning_rate"] == pytest.approx(5e-3)
    assert lines[4]["tokens"] == 4 * 8 * 32
    assert 4 < lines[2]["validation_loss"] < 7 and "validation_loss" not in lines[3]
    assert lines[4]["validation_loss_per_byte"] == pytest.approx(lines[4]["validation_loss"])  # a byte a token
    assert 1 < lines[4]["ngram_loss"] < 4 and "ngram_loss" not in lines[2]
    assert (folder / "sample.txt").read_text().startswith("import ")
    assert (folder / "sample.txt").read_text().strip() in out
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "profile").rglob("*.xplane.pb")) and "profile written to" in out
    assert json.loads((folder / "config.json").read_text())["model"]["pattern"] == "A-"
    assert sorted(p.name for p in (folder / "checkpoints").iterdir() if p.name.isdigit()) == ["2", "4"]
    for word in ("devices", "stack", "parameters", "compiling the training step", "2-gram model", "left"):
        assert word in out
    assert (folder / "train.log").read_text() == out
    assert not list(folder.glob("*.tmp"))


def test_too_many_bad_steps_end_the_run_and_name_the_parameter_group(tmp_path, monkeypatch, capsys):
    cfg = tiny_config(
        tmp_path / "run",
        model__pattern="A-A-",
        train__max_bad_steps=3,
        divergence__max_rollbacks=0,
        checkpoint__every_steps=1,
        train__steps=9,
    )
    init = step.Programs.init

    def poisoned(self, seed):
        state = init(self, seed)
        weight = state["params"]["layers"]["0"]["mixer"]["o_proj"]["weight"]
        state["params"]["layers"]["0"]["mixer"]["o_proj"]["weight"] = weight * jnp.nan
        return jax.device_put(state, jax.tree.map(lambda x: x.sharding, self.state))

    monkeypatch.setattr(step.Programs, "init", poisoned)
    with pytest.raises(UserError) as caught:
        train.run(cfg)
    text = str(caught.value)
    assert "config.train.max_bad_steps: 3 steps in a row were not finite" in text
    assert "the parameters of layers.0.mixer.o_proj.weight[0] (sublayer 0, 'A') are not finite" in text
    assert "no checkpoint was written" in text and "\n" not in text
    lines, _ = metrics.course(lines_of(tmp_path / "run"))
    assert [line["step"] for line in lines] == [1, 2, 3]
    events = [(line["step"], line["event"]) for line in lines_of(tmp_path / "run") if "event" in line]
    assert events == [(1, "not_saved"), (2, "not_saved"), (3, "stopped")]
    assert lines[2]["loss"] is None and lines[2]["skipped"] == 3
    assert not [p for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()]
    assert "step 1: the loss and the gradient of" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"config\.workdir: cannot write to"):
        train.run(tiny_config(tmp_path / "file" / "run"))


def test_a_finished_runs_folder_is_not_touched_by_what_may_not_go_on_with_it(tmp_path):
    train.run(tiny_config(tmp_path, train__steps=2, model__pattern="A-"))
    kept = {name: (tmp_path / name).read_text() for name in ("config.json", "metrics.jsonl")}
    refused = {
        "is of another model": {"model__pattern": "AA-"},
        "config.checkpoint.every_steps: 0, but": {"model__pattern": "A-", "checkpoint__every_steps": 0},
        "config.eval.sample_prompt": {"model__pattern": "A-", "eval__sample_tokens": 3, "eval__sample_prompt": "def"},
    }
    for message, changed in refused.items():
        with pytest.raises(UserError, match=message):
            train.run(tiny_config(tmp_path, train__steps=3, **changed))
    with (tmp_path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=rf"another run \(process {os.getpid()} on "):
            train.run(tiny_config(tmp_path, train__steps=3, model__pattern="A-"))
    assert kept == {name: (tmp_path / name).read_text() for name in kept}
    assert "error: " in (tmp_path / "train.log").read_text()


def test_metrics_without_a_checkpoint_are_set_aside(tmp_path, capsys):
    dispatch._say.cache_clear()  # said once a process
    cfg = tiny_config(tmp_path, train__steps=1, model__pattern="A-", checkpoint__every_steps=0)
    train.run(cfg)
    first = (tmp_path / "metrics.jsonl").read_text()
    train.run(cfg)
    assert (tmp_path / "metrics.jsonl.old").read_text() == first
    assert [line["step"] for line in lines_of(tmp_path)] == [1]
    out = capsys.readouterr().out
    assert "kept as metrics.jsonl.old" in out and "attention runs on the 'chunked' backend" in out


def test_parameters_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    real = step.Programs.inspect

    def one_bad(self, params):
        finite, largest = real(self, params)
        return finite & (np.arange(len(finite)) != 1), largest

    monkeypatch.setattr(step.Programs, "inspect", one_bad)
    with pytest.raises(UserError, match=r"step 1: the parameters of .* are not finite and were not saved"):
        train.run(tiny_config(tmp_path, train__steps=1, model__pattern="A-"))
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


def test_checkpoints_that_cannot_be_written_do_not_end_the_run_until_they_are_too_many(tmp_path, monkeypatch, capsys):
    write, failing = manifest.write, {2, 3, 6}

    def full(folder, record):
        if int(folder.name.split(".")[0]) in failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        write(folder, record)

    monkeypatch.setattr(manifest, "write", full)
    compiled = []  # all runs share a program
    compile_step = step.Programs.compile_step
    monkeypatch.setattr(
        step.Programs,
        "compile_step",
        lambda self: compiled[0] if compiled else compiled.append(compile_step(self)) or compiled[0],
    )
    keys = {"model__pattern": "A-", "checkpoint__every_steps": 1, "checkpoint__keep": 9, "train__steps": 6}
    with pytest.raises(UserError, match=r"checkpoint 6 could not be written: No space left on device; checkpoint 5 is"):
        train.run(tiny_config(tmp_path, **keys))  # the last one, also when it is tried again
    out = capsys.readouterr().out
    assert "checkpoint 2 could not be written: No space left on device; checkpoint 1 is kept (failure 1 in a row" in out
    assert "checkpoint 3 could not be written: No space left on device; checkpoint 1 is kept (failure 2 in a row" in out
    assert "trying once more to write checkpoint 6" in out
    told = [line for line in lines_of(tmp_path) if line.get("event") == "checkpoint_failed"]
    assert [line["checkpoint"] for line in told] == [2, 3, 6, 6]
    assert all(line["reason"] == "No space left on device" for line in told)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["1", "4", "5"]
    # What Orbax prints of them is kept; after the run a thread that is late has nowhere to say it.
    assert "Traceback" in (tmp_path / "train.log").read_text() and "Traceback" not in out
    assert not logging.getLogger("hybrid_jax").isEnabledFor(logging.DEBUG)
    logs = {level: (tmp_path / "logs" / "rank-0" / f"{level}.log").read_text() for level in ("warning", "error")}
    assert logs["warning"].count("could not be written: No space left") == 5 and "Traceback" not in logs["warning"]
    assert logs["error"].count("\n") == 1 and " ERROR   error: " in logs["error"]

    failing.clear()
    train.run(tiny_config(tmp_path, **keys))  # the same command goes on
    assert final_state(tiny_config(tmp_path, **keys))[1] == 6
    failing.update(range(8, 20))
    with pytest.raises(UserError, match=r"checkpoint 9 could not be written: .*; checkpoint 7 is kept; "):
        train.run(tiny_config(tmp_path, **{**keys, "train__steps": 15, "checkpoint__max_failures": 2}))
    assert lines_of(tmp_path)[-1]["step"] < 12


# ---- signals and processes ----

_PROCESS = """
import sys, time
from hybrid_jax import metrics, train
from tests.test_train import small_run
folder, stop_at = sys.argv[1], int(sys.argv[2])
write = metrics.JsonlWriter.write
def slowly(self, step, values):  # so that the test can send its signal in the middle
    write(self, step, values)
    if step > stop_at: time.sleep(0.5)
metrics.JsonlWriter.write = slowly
train.run(small_run(folder, mesh__fsdp=2))  # checkpoints are written beside the collectives of steps
"""


def small_run(folder, weight=0.7, **more):
    """Of one process or two: a mixture of stores over several epochs, a validation, checkpoints, a sample."""
    sample = {"eval__sample_tokens": 3, "eval__sample_prompt": "1 2"}
    stores = Path(folder).parent
    mixture = {"data__source": "store", "data__path": f"{stores}/a:{weight},{stores}/b:0.3", **more}
    saves = {"checkpoint__every_steps": 3, "checkpoint__keep_every": 3}
    return tiny_config(folder, train__steps=20, model__pattern="A-", eval__batches=1, **sample, **saves, **mixture)


def _write_stores(folder):
    rng = np.random.default_rng(0)
    for name, documents in (("a", 60), ("b", 20)):
        lengths = rng.integers(1, 60, documents)
        with StoreWriter(folder / name, vocab_size=64) as writer:
            writer.extend(rng.integers(0, 64, lengths.sum()), lengths)


def _start(folder, index, port, stop_at):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(index),
        "XLA_FLAGS": "",
    }
    arguments = [sys.executable, "-c", _PROCESS, str(folder), str(stop_at)]
    return subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_two_processes_go_on_from_one_equal_it_stop_together_and_resume_as_one(tmp_path):
    _write_stores(tmp_path)
    one = small_run(tmp_path / "one")
    train.run(one)
    (tmp_path / "two" / "checkpoints").mkdir(parents=True)  # the two go on from what one has written
    shutil.copytree(tmp_path / "one" / "checkpoints" / "3", tmp_path / "two" / "checkpoints" / "3")
    shutil.copy(tmp_path / "one" / "metrics.jsonl", tmp_path / "two")
    port = free_port()
    processes = [_start(tmp_path / "two", index, port, 5) for index in range(2)]
    try:
        deadline = time.monotonic() + 240
        while not 6 <= len(lines_of(tmp_path / "two")) < 20:  # at first there are those of the one
            assert time.monotonic() < deadline and all(p.poll() is None for p in processes), processes
            time.sleep(0.05)
        processes[1].send_signal(signal.SIGUSR1)  # only one of them hears of it
        out = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [75, 75], out
    assert "restored checkpoint 3" in out[0] and "stopped after step" in out[0] and "step  4/20" in out[0]
    assert "step  4/20" not in out[1]  # process 0 prints
    half = lines_of(tmp_path / "two")
    assert 6 <= len(half) < 20
    two = small_run(tmp_path / "two")
    assert final_state(two)[1] == len(half)
    train.run(two)  # written by two processes, read by one
    expected, got = lines_of(one.workdir), lines_of(two.workdir)
    assert [line["step"] for line in got] == [line["step"] for line in expected]
    for name in ("loss", "grad_norm", "learning_rate"):
        np.testing.assert_allclose([x[name] for x in got], [x[name] for x in expected], rtol=1e-5, err_msg=name)
    assert got[-1]["validation_loss"] == pytest.approx(expected[-1]["validation_loss"], rel=1e-5)
    assert (tmp_path / "one" / "sample.txt").read_text() == (tmp_path / "two" / "sample.txt").read_text()

    with pytest.raises(
        UserError, match=r"the weight of store 1 of data\.path was 7 of 10 windows and is 1 of 2 windows; the weight of"
    ):
        train.run(small_run(tmp_path / "two", weight=0.3))
    for name in ("a", "b"):  # the same content somewhere else is the same data
        for ending in (".bin", ".idx"):
            (tmp_path / f"moved_{name}{ending}").write_bytes((tmp_path / f"{name}{ending}").read_bytes())
    moved = {"data__path": f"{tmp_path}/moved_a:7,{tmp_path}/moved_b:3", "train__micro_batch_size": 2}
    train.run(small_run(tmp_path / "two", **moved))
    assert "note:" not in (tmp_path / "two" / "train.log").read_text()


def test_processes_meet_when_the_step_is_compiled(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(train.distributed, "agree", lambda said, doing, *rest: called.append(doing) or {})
    compile_step = train.Programs.compile_step
    monkeypatch.setattr(train.Programs, "compile_step", lambda self: called.append("compile") or compile_step(self))
    train.run(tiny_config(tmp_path, train__steps=1, model__pattern="-", checkpoint__every_steps=0))
    assert called[-2:] == ["compile", "compiling the training step"]
