"""Checkpoints: what is kept, what is found again, and what a wrong or damaged one leads to."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax import checkpoint, manifest, schema, sharding, signals
from hybrid_jax.config import MeshConfig
from hybrid_jax.errors import UserError
from tests.processes import free_port

ROOT = Path(__file__).parents[1]
META = {
    "schema": schema.SCHEMA,
    "pattern": "G-",
    "config": {"train": {"seed": 1}},
    "packages": {},
    "data": "abc",
}


def _state(value, width=4):
    params = {
        "layers": {"0": {"mixer": {"A_log": jnp.full((2, width), value)}}},
        "norm": {"weight": jnp.full((3,), value)},
    }
    return {"params": params, "step": jnp.asarray(int(value), jnp.int32)}


def _wanted(width=4):
    shapes = jax.eval_shape(lambda: _state(0.0, width))
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    return sharding.abstract(shapes, sharding.shardings(shapes, mesh))


def _open(folder, log=None, keep=3, meta=META, **more):
    return checkpoint.Checkpoints(folder, keep, meta, log.append if log is not None else print, **more)


def _written(folder, steps=(1, 2, 3, 4)):
    with _open(folder) as checkpoints:
        for step in steps:
            checkpoints.save(step, _state(float(step)))
        checkpoints.wait()
        return checkpoints.steps()


def _equal(state, value):
    assert jax.tree.structure(state) == jax.tree.structure(_state(value))
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(_state(value)), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype


def test_an_empty_folder_has_nothing_to_restore(tmp_path):
    with _open(tmp_path / "new") as checkpoints:
        assert checkpoints.restore(_wanted()) is None


def test_the_newest_are_kept_and_found_again(tmp_path):
    assert _written(tmp_path) == [2, 3, 4]
    with _open(tmp_path) as checkpoints:
        state, step, meta = checkpoints.restore(_wanted())
    assert step == 4 and meta == META
    _equal(state, 4.0)


def test_a_state_may_be_donated_right_after_save(tmp_path):
    """save returns before the write is done; the next step then reuses the state's memory."""
    state = {"w": jnp.arange(3_000_000.0)}
    bump = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with _open(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        for _ in range(20):
            state = bump(state)
        jax.block_until_ready(state)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    wanted = {"w": jax.ShapeDtypeStruct((3_000_000,), jnp.float32, sharding=sharding.replicated(mesh))}
    with _open(tmp_path) as checkpoints:
        restored, _, _ = checkpoints.restore(wanted)
    np.testing.assert_array_equal(restored["w"], np.arange(3_000_000.0, dtype=np.float32))
    assert float(state["w"][0]) == 20.0


@pytest.mark.parametrize(("peak", "copies"), [(0, 1), (9_000_000, 0)])
def test_a_state_is_copied_on_its_devices_where_they_have_room(tmp_path, monkeypatch, peak, copies):
    stats = {"bytes_limit": 20_000_000, "peak_bytes_in_use": peak}
    room = checkpoint._fits_twice

    class Device:
        def memory_stats(self):
            return stats

    class Shard:
        data, device = jnp.zeros(3_000_000), Device()

    class Array:
        addressable_shards = (Shard,)

    assert room([Array()]) == bool(copies)
    monkeypatch.setattr(checkpoint, "_fits_twice", lambda state: room([Array()]))
    state, made = {"w": jnp.arange(4.0)}, []
    with _open(tmp_path) as checkpoints:
        checkpoints.prepare(state)
        copy = checkpoints._copy
        monkeypatch.setattr(checkpoints, "_copy", lambda state: made.append(1) or copy(state))
        checkpoints.save(1, state)
        state["w"].delete()  # as a step that it is donated to does
        checkpoints.wait()
        assert len(made) == copies and checkpoints.steps() == [1]


def test_a_half_written_checkpoint_is_ignored(tmp_path):
    _written(tmp_path)
    whole = (tmp_path / "4").rename(tmp_path / "5.orbax-checkpoint-tmp-1234")  # as a killed process leaves it
    (tmp_path / "6").mkdir()  # and one that a copy did not finish
    log = []
    with _open(tmp_path, log) as checkpoints:
        assert log == [f"{whole} was not written to its end and is deleted"]
        state, step, _ = checkpoints.restore(_wanted())
        assert step == 3 and "checkpoint 6 cannot be read and is passed over (_CHECKPOINT_METADATA is missing)" in log
        _equal(state, 3.0)
        checkpoints.save(6, _state(6.0))  # and its step can be saved again
        checkpoints.wait()
    assert not whole.exists()
    with _open(tmp_path) as checkpoints:
        assert checkpoints.restore(_wanted())[1] == 6


def _truncate(folder):
    for path, _, files in os.walk(folder):
        for name in files:
            if re.fullmatch(r"[0-9a-f]{32}", name):
                os.truncate(os.path.join(path, name), 10)


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(tmp_path):
    _written(tmp_path)
    _truncate(tmp_path / "4")
    log = []
    with _open(tmp_path, log) as checkpoints:
        state, step, _ = checkpoints.restore(_wanted())
        assert step == 3
        _equal(state, 3.0)
        assert any("checkpoint 4 cannot be read and is passed over" in line for line in log)
        assert checkpoints.steps() == [2, 3] and (tmp_path / "4.damaged").is_dir()
        checkpoints.save(4, _state(40.0))
        checkpoints.wait()
        assert not (tmp_path / "4.damaged").exists()  # the run has come past it
    with _open(tmp_path) as checkpoints:
        state, step, _ = checkpoints.restore(_wanted())
    assert step == 4 and float(state["params"]["norm"]["weight"][0]) == 40.0


def test_a_checkpoint_with_values_that_are_not_finite_is_passed_over(tmp_path):
    _written(tmp_path, steps=(1,))
    with _open(tmp_path) as checkpoints:
        state = _state(2.0)
        state["params"]["norm"]["weight"] = state["params"]["norm"]["weight"].at[1].set(jnp.nan)
        checkpoints.save(2, state)
        checkpoints.wait()
    log = []
    with _open(tmp_path, log) as checkpoints:
        state, step, _ = checkpoints.restore(_wanted())
    assert step == 1 and any("checkpoint 2 cannot be read" in line and "not finite" in line for line in log)
    _equal(state, 1.0)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with checkpoints 1 and 2, to be copied."""
    folder = tmp_path_factory.mktemp("written")
    _written(folder, steps=(1, 2))
    return folder


def _array_file(folder):
    """The file that holds the arrays."""
    return max((folder / "state" / "ocdbt.process_0" / "d").iterdir(), key=lambda path: path.stat().st_size)


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _forget_meta(folder):
    path = folder / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps({**json.loads(path.read_text()), "custom_metadata": {"schema": 1}}))


DAMAGES = {
    "missing": (lambda f: _array_file(f).unlink(), r"state/\S+ is missing"),
    "truncated": (lambda f: os.truncate(_array_file(f), 10), r"state/\S+ has 10 bytes and not [\d,]+"),
    "one bit": (lambda f: _flip(_array_file(f)), r"state/\S+ was changed: its checksum is another one"),
    "index": (lambda f: _flip(f / "state" / "manifest.ocdbt"), r"state/manifest\.ocdbt was changed"),
    "shapes": (lambda f: (f / "state" / "_METADATA").unlink(), r"state/_METADATA is missing"),
    "list": (
        lambda f: (f / manifest.NAME).write_text('{"files": ['),
        r"its list of files, files\.json, cannot be read",
    ),
    "record": (_forget_meta, r"its record of the run, in _CHECKPOINT_METADATA, was changed"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_of_every_kind_is_found_and_named(name, written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "copy")
    damage, said = DAMAGES[name]
    assert manifest.damage(folder / "2") == ""
    damage(folder / "2")
    log = []
    with _open(folder, log) as checkpoints:
        state, step, _ = checkpoints.restore(_wanted())
    assert step == 1
    _equal(state, 1.0)
    assert [line for line in log if re.search(rf"checkpoint 2 cannot be read and is passed over \({said}.*\)", line)], (
        log
    )


def test_a_checkpoint_without_a_list_of_files_is_read_all_the_same(written, tmp_path, caplog):
    folder = shutil.copytree(written, tmp_path / "copy")
    for step in ("1", "2"):  # as an older version wrote them
        (folder / step / manifest.NAME).unlink()
    _truncate(folder / "2")
    log = []
    with _open(folder, log) as checkpoints:
        assert checkpoints.restore(_wanted())[1] == 1
    assert [
        line for line in log if "checkpoint 2 cannot be read and is passed over (its " in line and "damaged)" in line
    ]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_each_process_reads_its_part_of_the_files(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "copy") / "2"
    _flip(_array_file(folder))
    assert sorted(bool(manifest.damage(folder, part, 3)) for part in range(3)) == [False, False, True]
    _array_file(folder).unlink()  # what is cheap, each sees
    assert all(manifest.damage(folder, part, 3) for part in range(3))


def test_a_damaged_newest_does_not_count_among_those_kept(tmp_path):
    _written(tmp_path, steps=(1, 9))
    _truncate(tmp_path / "9")
    with _open(tmp_path, keep=1) as checkpoints:
        assert checkpoints.restore(_wanted())[1] == 1
        checkpoints.save(2, _state(2.0))
        checkpoints.wait()
        assert checkpoints.steps() == [2]
    with _open(tmp_path) as checkpoints:
        assert checkpoints.restore(_wanted())[1] == 2


def test_a_deletion_that_a_kill_cut_short_is_finished(tmp_path):
    """A checkpoint in the order of the kept ones that has lost files would be found by whoever reads it later."""
    _written(tmp_path, steps=(1, 2, 3))
    (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink()
    log = []
    with _open(tmp_path, log, keep=2) as checkpoints:
        assert checkpoints.restore(_wanted())[1] == 3
        assert checkpoints.steps() == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_every_kth_is_kept_for_good(tmp_path):
    with _open(tmp_path, keep=2, keep_every=4) as checkpoints:
        for step in range(2, 15, 2):
            checkpoints.save(step, _state(float(step)))
        checkpoints.wait()
        assert checkpoints.steps() == [4, 8, 12, 14]
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [4, 8, 12, 14]


def test_at_most_one_copy_of_the_state_is_being_written(tmp_path, monkeypatch):
    """The second save waits for the first, so no third copy of a state is ever held."""
    write, running, most, gate = manifest.write, [], [], threading.Event()

    def slow(folder, record):
        running.append(folder)
        most.append(len(running))
        assert gate.wait(20)
        write(folder, record)
        running.pop()

    monkeypatch.setattr(manifest, "write", slow)
    with _open(tmp_path) as checkpoints:
        began = time.perf_counter()
        checkpoints.save(1, _state(1.0))  # returns at once: it is written behind the caller's back
        threading.Timer(0.5, gate.set).start()
        assert time.perf_counter() - began < 0.4
        assert checkpoints.steps() == []  # not whole yet
        checkpoints.save(2, _state(2.0))
        assert time.perf_counter() - began > 0.4
        assert checkpoints.steps()[0] == 1
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2] and most == [1, 1]


def _temporary(folder):
    return [path.name for path in folder.iterdir() if "tmp" in path.name]


def test_writes_that_fail_are_told_and_tolerated_up_to_a_number(tmp_path, monkeypatch):
    write, log, broken = manifest.write, [], [True]

    def full(folder, record):  # called in Orbax's thread, when all is written and nothing committed
        if broken[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        write(folder, record)

    monkeypatch.setattr(manifest, "write", full)
    with _open(tmp_path, log, max_failures=3, keep=1) as checkpoints:
        broken[0] = False
        checkpoints.save(1, _state(1.0))
        checkpoints.wait()
        broken[0] = True
        for step in (2, 3):
            checkpoints.save(step, _state(float(step)))
            deadline = time.monotonic() + 20
            while not (told := checkpoints.failures()) and time.monotonic() < deadline:
                checkpoints.poll()  # as training does at each step
            assert told == [(step, "No space left on device")]
            assert "checkpoint 1 is kept" in log[-1] and f"failure {step - 1} in a row" in log[-1]
            assert not _temporary(tmp_path) and checkpoints.steps() == [1]  # a full disk does not stay full
        with pytest.raises(UserError, match="checkpoint 3 could not be written: No space left on device; checkpoint 1"):
            checkpoints.wait()  # the newest is not there
        broken[0] = False
        checkpoints.save(4, _state(4.0))  # and the count begins anew
        checkpoints.wait()
        assert checkpoints.steps() == [4]
        broken[0] = True
        for step in (5, 6):
            checkpoints.save(step, _state(float(step)))
        checkpoints.save(7, _state(7.0))
        with pytest.raises(UserError, match=r"checkpoint 7 could not be written: .*; checkpoint 4 is kept") as caught:
            checkpoints.wait()
        assert "\n" not in str(caught.value) and [step for step, _ in checkpoints.failures()] == [5, 6, 7]
    with _open(tmp_path) as checkpoints:
        assert checkpoints.restore(_wanted())[1] == 4


_FAILING = """
import logging, resource, sys
import jax
from hybrid_jax import checkpoint
from tests.test_checkpoint import META
details, log = [], logging.getLogger("hybrid_jax.orbax_log")
log.setLevel(logging.DEBUG)
log.addFilter(lambda record: details.append(record.getMessage()))
state = {f"w{i}": jax.random.normal(jax.random.key(i), (12_000,)) for i in range(8)}
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
with checkpoint.Checkpoints(sys.argv[1], 2, META, print, max_failures=99) as checkpoints:
    checkpoints.save(1, state)
    checkpoints.wait()
    for step in range(2, 14):
        resource.setrlimit(resource.RLIMIT_FSIZE, (40 * 2**step, hard))
        checkpoints.save(step, state)
        checkpoints.settle()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(sum("Traceback" in text for text in details))
"""


def test_of_a_write_that_fails_nothing_is_seen_but_its_line(tmp_path):
    """Threads of Orbax and tensorstore print tracebacks of their own about what they could not write."""
    command = [sys.executable, "-c", _FAILING, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, details = done.stdout.splitlines()
    assert len(lines) == 12 and int(details) >= 12, lines
    for step, line in enumerate(lines, 2):
        said = rf"checkpoint {step} could not be written: File too large; checkpoint 1 is kept \(failure {step - 1} in"
        assert re.match(said, line)


def test_a_folder_that_vanishes_while_it_is_written_is_said_to(tmp_path, monkeypatch):
    def vanish(folder, record):
        while folder.exists():  # Orbax may write a file meanwhile
            shutil.rmtree(folder, ignore_errors=True)
        raise ValueError("too few values")

    monkeypatch.setattr(manifest, "write", vanish)
    with _open(tmp_path, max_failures=2) as checkpoints:
        checkpoints.save(1, _state(1.0))
        checkpoints.settle()
        assert checkpoints.failures() == [(1, "its folder vanished while it was written")]


def test_a_folder_that_vanishes_or_cannot_be_written_is_told_at_once(tmp_path):
    folder, log = tmp_path / "run" / "checkpoints", []
    _written(folder, steps=(1,))
    with _open(folder, log, max_failures=9) as checkpoints:
        shutil.rmtree(folder)
        checkpoints.save(2, _state(2.0))  # the run's own folder is there still
        checkpoints.wait()
        assert checkpoints.steps() == [2] and "was gone, with what was in it" in log[-1]
        shutil.rmtree(folder.parent)
        checkpoints.save(3, _state(3.0))
        assert checkpoints.failures() == [(3, f"No such file or directory: {folder}")]
        assert not folder.parent.exists()  # perhaps a file system that is not mounted: nothing is made in its place
        folder.parent.mkdir()
        folder.write_text("a file")
        checkpoints.save(4, _state(4.0))
        assert checkpoints.failures() == [(4, f"File exists: {folder}")] and checkpoints.steps() == []
        folder.unlink()
        checkpoints.save(5, _state(5.0))
        checkpoints.wait()
        assert checkpoints.steps() == [5]


def test_a_full_and_a_read_only_file_system(tmp_path):
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", tmp_path], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("may not mount a file system here")
    try:
        log, filler = [], tmp_path / "filler"
        noise = jax.random.normal(jax.random.key(0), (150_000,))  # 0.6 MB, and not compressible
        with _open(tmp_path / "checkpoints", log, max_failures=9) as checkpoints:
            checkpoints.save(1, {"w": noise})
            checkpoints.wait()
            filler.write_bytes(bytes(shutil.disk_usage(tmp_path).free - 300_000))
            free = shutil.disk_usage(tmp_path).free
            checkpoints.save(2, {"w": noise})
            with pytest.raises(UserError, match="checkpoint 2 could not be written: No space left on device; "):
                checkpoints.wait()
            assert shutil.disk_usage(tmp_path).free == free and not _temporary(tmp_path / "checkpoints")
            filler.unlink()
            subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
            checkpoints.save(3, {"w": noise})
            assert "checkpoint 3 could not be written: Read-only file system" in log[-1]
            subprocess.run(["mount", "-o", "remount,rw", tmp_path], check=True)
            checkpoints.save(4, {"w": noise})
            checkpoints.wait()
            assert checkpoints.steps() == [1, 4] and [step for step, _ in checkpoints.failures()] == [2, 3]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_write_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(manifest, "write", lambda folder, record: gate.wait(20))
    with _open(tmp_path, timeout_seconds=1) as checkpoints:
        checkpoints.save(1, _state(1.0))
        began = time.perf_counter()
        with pytest.raises(UserError, match=r"not written within 1 s \(config\.checkpoint\.timeout_seconds\)"):
            checkpoints.wait()
        assert time.perf_counter() - began < 5
        gate.set()


def test_when_none_can_be_read_the_run_does_not_start_anew_in_silence(tmp_path):
    _written(tmp_path, steps=(1, 2))
    for step in ("1", "2"):
        _truncate(tmp_path / step)
    with (
        _open(tmp_path) as checkpoints,
        pytest.raises(UserError, match="none of the 2 checkpoints can be read") as caught,
    ):
        checkpoints.restore(_wanted())
    text = str(caught.value)
    assert "\n" not in text and re.search(r"\(2: state/\S+ has 10 bytes.*; 1: state/\S+ has 10 bytes", text)


def test_another_shape_is_one_line_naming_the_path(tmp_path):
    _written(tmp_path)
    meta = {**META, "pattern": "K-"}
    with _open(tmp_path, meta=meta) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore(_wanted(width=5))
    text = str(caught.value)
    assert "params.layers.0.mixer.A_log is float32[2, 4] but this config needs float32[2, 5]" in text
    assert "pattern G- there, K- here" in text and "config.workdir" in text and "\n" not in text


def test_another_tree_is_one_line_naming_the_paths(tmp_path):
    _written(tmp_path)
    wanted = _wanted(width=5)
    wanted["params"]["tail"] = {"0": wanted["params"].pop("norm")}
    log = []
    with _open(tmp_path, log) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore(wanted)
    assert "float32[2, 5]; params.tail.0.weight is missing (and 1 more)" in str(caught.value)
    for line in ("A_log is float32[2, 4] but", "params.tail.0.weight is missing", "params.norm.weight is not in this"):
        assert sum(line in said for said in log) == 1  # the log has them all


def test_a_newer_schema_is_refused(tmp_path):
    with _open(tmp_path, meta={**META, "schema": schema.SCHEMA + 1}) as checkpoints:
        checkpoints.save(1, _state(1.0))
    with _open(tmp_path) as checkpoints, pytest.raises(UserError, match="written by a newer hybrid_jax"):
        checkpoints.restore(_wanted())


def test_an_older_schema_is_refused_unless_there_is_a_way_from_it(tmp_path, monkeypatch):
    old = {"weights": jnp.full((3,), 7.0), "step": jnp.asarray(7, jnp.int32)}
    meta = {**META, "schema": schema.SCHEMA - 1, "packages": {"hybrid_jax": "0.0.9"}}
    with _open(tmp_path, meta=meta) as checkpoints:
        checkpoints.save(7, old)
    with (
        _open(tmp_path) as checkpoints,
        pytest.raises(UserError, match=r"an older hybrid_jax 0\.0\.9 \(schema 0; this"),
    ):
        checkpoints.restore(_wanted())

    def migrate(state):
        params = {"layers": {"0": {"mixer": {"A_log": jnp.full((2, 4), state["weights"][0])}}}}
        return {"params": params | {"norm": {"weight": state["weights"]}}, "step": state["step"]}

    monkeypatch.setitem(schema.MIGRATIONS, schema.SCHEMA - 1, migrate)
    with _open(tmp_path) as checkpoints:
        state, step, _ = checkpoints.restore(_wanted())
        assert (
            step == 7 and state["params"]["norm"]["weight"].sharding == _wanted()["params"]["norm"]["weight"].sharding
        )
        _equal(state, 7.0)
        with pytest.raises(UserError, match=r"A_log is float32\[2, 4\] but this config needs float32\[2, 5\]"):
            checkpoints.restore(_wanted(width=5))


def test_a_record_of_the_moment_is_found_again_and_newer_ones_can_be_deleted(tmp_path):
    with _open(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, _state(float(step)), {"moment": step})
        checkpoints.delete_after(1)
        assert checkpoints.steps() == [1]
        checkpoints.save(2, _state(20.0))
        checkpoints.wait()
        assert checkpoints.restore(_wanted())[2] == META
        checkpoints.delete_after(1)
        assert checkpoints.restore(_wanted())[2] == {**META, "moment": 1}


def test_what_a_signal_saves_costs_no_scheduled_checkpoint(tmp_path):
    with _open(tmp_path, keep=2, every=4) as checkpoints:
        for step in (4, 8, 9, 10):
            checkpoints.save(step, _state(float(step)))
        checkpoints.wait()
        assert checkpoints.steps() == [4, 8, 10]
        assert checkpoints.pushes_out(12) == [4, 10]
        checkpoints.save(12, _state(12.0))
        checkpoints.wait()
        assert checkpoints.steps() == [8, 12]
    assert checkpoint.kept([3, 4, 6, 8, 9], keep=1, every=4, for_good=3) == [True, False, True, True, True]


# ---- several processes ----

_PROCESS = """
import os, sys
import jax
from hybrid_jax import checkpoint, cluster, distributed, sharding
from hybrid_jax.config import MeshConfig
from hybrid_jax.errors import UserError
from orbax.checkpoint._src.checkpointers import async_checkpointer
from tests.test_checkpoint import META, _state
folder, port, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
distributed.initialize(cluster.Group(f"127.0.0.1:{port}", 2, index))
whole = sharding.replicated(sharding.make_mesh(MeshConfig()))
made = [jax.jit(lambda value=value: _state(value), out_shardings=whole)() for value in (1.0, 2.0)]
checkpoints = checkpoint.Checkpoints(folder, 3, META, print, timeout_seconds=3, max_failures=3)
checkpoints.save(1, made[0])
checkpoints.wait()
if index == 1:  # dies when its part is being written, before it has said that it is
    async_checkpointer._background_wait_for_commit_futures = lambda *unused, **named: os._exit(9)
checkpoints.save(2, made[1])
try:
    checkpoints.wait()
except UserError as error:
    print("error:", error)
    checkpoints.close()
    try:
        distributed.agree("", "one more meeting", 1)
    except UserError as error:
        print("error:", error, flush=True)
        os._exit(error.exit_code)
"""


def test_a_process_that_dies_in_a_save_is_named_and_the_older_checkpoint_stays(tmp_path):
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(tmp_path), port, str(index)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        out = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [signals.PEER_LOST_EXIT_CODE, 9], out
    assert time.monotonic() - began < 80
    errors = [line for line in out[0][0].splitlines() if line.startswith("error: ")]
    assert len(errors) == 2, out
    who = f"process 1 of 2 ({socket.gethostname()}) did not arrive"
    assert f"the end of checkpoint 2: {who} within 3 s (config.checkpoint.timeout_s" in errors[0]
    assert f"one more meeting: {who} within 1 s; look at what it printed last" in errors[1]
    log = []
    with _open(tmp_path, log) as checkpoints:
        state, step, _ = checkpoints.restore(_wanted())
        assert step == 1
        _equal(state, 1.0)
        checkpoints.save(2, _state(2.0))
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2] and not _temporary(tmp_path)
    assert [line for line in log if re.search(r"/2\.\S+ was not written to its end", line)]


def test_a_layer_lies_by_itself_and_a_large_array_in_parts(tmp_path):
    """What reading one of them costs; tiny ones stay together."""
    import tensorstore

    layers = {"0": {"w": jnp.zeros((3, 512, 513)), "norm": jnp.zeros((3, 8))}}
    with _open(tmp_path) as checkpoints:
        checkpoints.save(
            1, {"params": {"layers": layers, "embed": jnp.zeros((2**13, 513)), "tail": jnp.zeros((3, 600))}}
        )
        checkpoints.wait()
    chunks = {}
    for path in ("layers.0.w", "layers.0.norm", "embed", "tail"):
        kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path}/1/state/", "path": f"params.{path}/"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
        chunks[path] = array.chunk_layout.read_chunk.shape
    assert chunks == {"layers.0.w": (1, 512, 513), "layers.0.norm": (3, 8), "embed": (2**11, 513), "tail": (3, 600)}
