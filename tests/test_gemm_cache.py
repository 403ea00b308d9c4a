"""Kept choices of GEMM algorithms: which flags XLA gets, what is written, and that nothing foreign is read.

The GPU, its driver and what XLA writes are faked here.
"""

import os
import subprocess
import sys
import tempfile

import pytest

from hybrid_jax import gemm_cache, platform
from hybrid_jax.errors import UserError

HERE = {"device": "gfx942", "jaxlib": "0.10.2", "plugin": "jax-rocm7-plugin 0.10.2", "library": "7.2.0", "flags": ""}
CHOICES = b'version: 3\nresults { device: "gfx942" hlo: "dot" result { gemm { algorithm: 17 } } }\n'


def start(folder, found=HERE, flags="", name="rocm", knows=lambda flag: True):
    environment = {"XLA_FLAGS": flags} if flags else {}
    prepared = gemm_cache.prepare(str(folder), name, environment, found, knows)
    return prepared, environment.get("XLA_FLAGS", "").split()


@pytest.fixture(autouse=True)
def nothing_prepared(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(gemm_cache, "_prepared", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("machine")))


def compiled(prepared, choices=CHOICES):
    """What XLA does when it has compiled a program."""
    prepared.written.write_bytes(choices)


def test_choices_are_kept_by_a_first_start_and_read_by_the_next(tmp_path):
    folder = tmp_path / "new" / "folder"
    prepared, flags = start(folder, flags="--xla_gpu_autotune_level=4")
    assert flags == [f"{gemm_cache.DUMP}={prepared.written}", "--xla_gpu_autotune_level=4"]
    assert not prepared.written.exists() and folder not in prepared.written.parents  # rank 0 alone writes there
    compiled(prepared)
    assert gemm_cache.publish() == f"kept in {folder}/gfx942-jaxlib-0.10.2.textproto"
    assert gemm_cache.publish() == ""  # nothing new
    text = prepared.file.read_bytes()
    assert text.endswith(CHOICES) and text.startswith(b"# ") and text.count(b"\n#") == 0
    assert [path.name for path in folder.iterdir()] == [prepared.file.name]

    again, flags = start(folder)
    assert flags == [f"{gemm_cache.LOAD}={prepared.file}", f"{gemm_cache.DUMP}={again.written}"]
    assert gemm_cache.note() == f"read from {prepared.file}"
    compiled(again)  # nothing was timed, so XLA writes what it read
    assert gemm_cache.publish() == "" and prepared.file.read_bytes() == text
    compiled(again, CHOICES + b"more\n")
    assert gemm_cache.publish().startswith("kept in ")
    assert prepared.file.read_bytes().endswith(CHOICES + b"more\n")
    third, _ = start(folder)
    assert third.loaded == CHOICES + b"more\n"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "plugin",
            "jax-rocm7-plugin 0.10.3",
            "it is of plugin jax-rocm7-plugin 0.10.2, and this is jax-rocm7-plugin 0",
        ),
        ("library", "7.3.0", "it is of library 7.2.0, and this is 7.3.0"),
        ("flags", "--xla_gpu_enable_triton_gemm=false", "it is of flags unknown, and this is --xla_gpu_enable_triton"),
    ],
)
def test_what_is_stale_is_not_read_and_then_replaced(tmp_path, key, value, words):
    prepared, _ = start(tmp_path)
    compiled(prepared)
    gemm_cache.publish()
    later, flags = start(tmp_path, {**HERE, key: value})
    assert [flag.split("=")[0] for flag in flags] == [gemm_cache.DUMP]
    assert words in later.note and "timed anew" in later.note and "\n" not in later.note
    compiled(later, b"newer\n")
    assert gemm_cache.publish().startswith("kept in")
    assert start(tmp_path, {**HERE, key: value})[0].loaded == b"newer\n"


@pytest.mark.parametrize(("key", "value"), [("device", "gfx950"), ("jaxlib", "0.11.0")])
def test_each_gpu_and_jaxlib_has_its_own_file_and_a_renamed_one_is_not_read(tmp_path, key, value):
    prepared, _ = start(tmp_path)
    compiled(prepared)
    gemm_cache.publish()
    other = {**HERE, key: value}
    found, _ = start(tmp_path, other)
    assert found.file != prepared.file and "none of this GPU" in found.note
    prepared.file.rename(found.file)
    found, flags = start(tmp_path, other)
    assert f"it is of {key} {HERE[key]}, and this is {value}" in found.note
    assert gemm_cache.LOAD not in " ".join(flags)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b.replace(b"17", b"18"), lambda b: CHOICES, lambda b: b""]
)
def test_a_damaged_file_is_not_read(tmp_path, damage):
    prepared, _ = start(tmp_path)
    compiled(prepared)
    gemm_cache.publish()
    prepared.file.write_bytes(damage(prepared.file.read_bytes()))
    again, flags = start(tmp_path)
    assert "is not read: it" in again.note and gemm_cache.LOAD not in " ".join(flags)


def test_where_there_is_nothing_to_keep_nothing_changes(tmp_path):
    for folder, options, words in [
        ("", {}, ""),
        (tmp_path, {"name": "cpu"}, "only GPUs"),
        (tmp_path, {"found": {**HERE, "device": ""}}, "does not say which GPU"),
        (tmp_path, {"knows": lambda flag: "dump" not in flag}, "does not know --xla_gpu_dump_autotune_results_to;"),
    ]:
        prepared, flags = start(folder, **options)
        assert words in prepared.note and flags == [] and prepared.file is None
        assert gemm_cache.publish() == ""
    own = f"{gemm_cache.LOAD}=/mine"
    prepared, flags = start(tmp_path, flags=own)
    assert flags == [own] and "those count" in prepared.note
    prepared, flags = start(tmp_path, flags="/etc/xla_flags")
    assert flags == ["/etc/xla_flags"] and "names a file of flags" in prepared.note
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"config\.tune\.gemm_cache: .*/file is a file; give a folder"):
        start(tmp_path / "file")


def test_a_folder_that_cannot_be_written_and_an_xla_that_writes_nothing_are_lines(tmp_path):
    (tmp_path / "file").write_text("")
    prepared, _ = start(tmp_path / "new")
    assert gemm_cache.publish() == "XLA told of no choice; nothing is kept"
    compiled(prepared)
    (tmp_path / "new").write_text("in the way")
    assert gemm_cache.publish().startswith(f"cannot write {prepared.file}: ")


def test_the_identity_of_a_machine_comes_from_its_driver_and_packages(monkeypatch):
    monkeypatch.setattr(platform, "amd_architecture", lambda: "gfx950")
    monkeypatch.setattr(platform, "rocm_version", lambda: "7.2.0-81")
    flags = platform.environment("rocm", {})["XLA_FLAGS"]
    found = gemm_cache.identity("rocm", f"--xla_dump_to=/x {flags}")
    assert (found["device"], found["library"]) == ("gfx950", "7.2.0-81")
    assert found["jaxlib"].startswith("0.1")
    assert "--xla_gpu_enable_cublaslt=true" in found["flags"] and "dump" not in found["flags"]
    assert "latency" not in found["flags"]


def test_the_model_of_an_nvidia_gpu_and_the_version_of_rocm(tmp_path):
    (tmp_path / "0000:01:00.0").mkdir()
    assert platform.nvidia_model(tmp_path) == ""
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   16\n")
    assert platform.nvidia_model(tmp_path) == "NVIDIA H200"
    assert platform.rocm_version(tmp_path / "none") == ""
    (tmp_path / "version").write_text("7.2.0-81\n")
    assert platform.rocm_version(tmp_path / "version") == "7.2.0-81"


def test_the_installed_xla_knows_the_flags_and_takes_them(tmp_path):
    assert platform.knows(gemm_cache.LOAD) and platform.knows(gemm_cache.DUMP)
    assert not platform.knows("--xla_gpu_no_such_flag")
    assert not platform.knows(gemm_cache.LOAD, [])
    old = tmp_path / "plugin.so"
    old.write_bytes(b"..xla_force_host_platform_device_count..")
    assert not platform.knows(gemm_cache.LOAD, [*platform.xla_libraries(), old])
    flags = f"{gemm_cache.LOAD}={tmp_path}/a.textproto {gemm_cache.DUMP}={tmp_path}/b.textproto"
    code = "import jax; print(int(jax.jit(lambda x: x + 1)(41)))"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "42\n", done.stderr


def test_a_run_says_what_becomes_of_the_folder(tmp_path, monkeypatch, capsys):
    """The lines of a run whose GPU is faked: what is read, and what is kept when the step is compiled."""
    from hybrid_jax import train
    from hybrid_jax.step import Programs
    from tests.tiny import tiny_config

    prepared, _ = start(tmp_path / "kept")
    compile_step = Programs.compile_step

    def compile_and_choose(programs):
        compiled(prepared)
        return compile_step(programs)

    monkeypatch.setattr(Programs, "compile_step", compile_and_choose)
    train.run(tiny_config(tmp_path / "run", model__pattern="-", train__steps=1, optimizer__warmup_steps=1))
    lines = [line for line in capsys.readouterr().out.splitlines() if "gemm cache" in line]
    assert len(lines) == 2 and "none of this GPU in" in lines[0] and f"kept in {prepared.file}" in lines[1]
    assert prepared.file.read_bytes().endswith(CHOICES)
