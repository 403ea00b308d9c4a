"""The benchmark: what it selects, its floor, how it times, and what it prints and writes."""

import json
import os
import signal
import time

import jax
import jax.numpy as jnp
import pytest

from hybrid_jax import bench
from hybrid_jax.errors import UserError
from hybrid_jax.kernels import launch, timing
from hybrid_jax.kernels.shapes import OPS, SHAPES

PEAKS = timing.Peaks(4.3e12, 790e12)


@pytest.fixture
def quick(monkeypatch):
    """Known peaks instead of measured ones."""
    monkeypatch.setattr(timing, "measure_peaks", lambda: PEAKS)


def test_a_run_prints_a_table_and_writes_json_and_chart(quick, tmp_path, capsys):
    out, image = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["--shapes", "mla_300m_small,gqa_packed_small", "--backends", "reference,chunked", "--repeats", "4"]
    assert bench.main([*arguments, "--json", str(out), "--chart", str(image)]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert "4,300 GB/s, 790.0 TFLOP/s" in lines[0]
    assert len(lines) == 3 + 8
    assert all(line.startswith(("mla_300m_small ", "gqa_packed_small ")) for line in lines[3:])
    assert len([line for line in printed.err.splitlines() if " ms" in line]) == 8  # said while it works
    assert image.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.png"]
    written = json.loads(out.read_text())
    assert written["device"]["platform"] == "cpu"
    assert written["command"].startswith("python -m hybrid_jax.bench --shapes mla_300m_small,")
    assert {"jax", "jaxlib", "python", "hybrid_jax"} <= written["versions"].keys()
    assert written["peaks"] == {"bytes_per_second": 4.3e12, "flops_per_second": 790e12}
    assert len(written["rows"]) == 8
    for row in written["rows"]:
        assert 0 < row["floor"] < row["p10"] <= row["median"] <= row["p90"]
        assert row["samples"] == 4 and row["compile_seconds"] > 0 and row["temporary_bytes"] >= 0 and not row["error"]


def test_the_floor_of_shapes():
    """Milliseconds of forward and backward: bytes by hand at 4.3 TB/s, attention's FLOPs at 790 TFLOP/s."""
    expected_ms = {"gdn_300m": 0.128, "kda_300m_decays": 0.173, "mamba2_300m": 0.412, "qwen3_next": 0.253}
    expected_ms |= {"kda_300m": 0.150}  # raw gates are bf16
    for name, expected in expected_ms.items():
        seconds, by = timing.floor(SHAPES[name], True, PEAKS)
        assert (round(seconds * 1e3, 3), by) == (expected, "memory")
    assert timing.floor(SHAPES["qwen3_next"], True, timing.Peaks(4.3e15, 1e12))[1] == "compute"
    seconds, by = timing.floor(SHAPES["mla_300m"], True, PEAKS)
    assert by == "compute"
    assert seconds == pytest.approx(3 * 2 * 32 * 2048 * 1024.5 * 16 * 128 / 790e12)
    assert timing.flops(SHAPES["gdn_t1"]) == 2 * 4 * 6 * 64 * 64
    # Documents of 2 and 1 tokens, and of 3: 3 + 1 + 6 pairs of 16 heads.
    assert timing.flops(SHAPES["gqa_packed"], jnp.array([[0, 0, 1], [0, 0, 0]])) == 2 * 16 * 256 * 10


def test_each_input_is_read_once_a_pass_and_each_output_written_once():
    shape = SHAPES["gdn_t65"]  # B2 T65 H2/4 K64 V64 with states
    tokens = 2 * 65
    inputs = 2 * tokens * (2 * 2 * 64 + 4 * 64) + 4 * tokens * 8 + 4 * 2 * 4 * 64 * 64
    results = 2 * tokens * 4 * 64 + 4 * 2 * 4 * 64 * 64
    assert timing.traffic(shape, False) == inputs + results
    assert timing.traffic(shape, True) == 3 * inputs + 2 * results


def test_measured_peaks_are_those_of_a_machine():
    peaks = timing.Peaks(timing._bandwidth(2**18), timing._matmul_speed(128, True))
    assert 1e8 < peaks.bytes_per_second < 1e14
    assert 1e8 < peaks.flops_per_second < 1e16


def test_a_gpu_sample_is_many_launches_between_two_waits(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    waits, calls = [], []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waits.append(x))

    def launch(i):
        calls.append(i)
        time.sleep(0.002)
        return i

    taken = timing.time_program(launch, 5)
    assert len(taken.seconds) == 5
    assert 5 <= taken.launches <= 10
    assert len(calls) > 3 * len(waits)
    assert all(0.0015 < s < 0.02 for s in taken.seconds)
    row = timing.Row("", "", "", "", "", "", median=taken.percentile(50), launches=taken.launches, host=taken.host)
    assert row.host_bound  # this one only ever slept on the host
    assert timing.time_program(launch, 3, most=2).launches == 2


def test_a_slow_program_gets_fewer_samples(monkeypatch):
    monkeypatch.setattr(timing, "PROGRAM_SECONDS", 0.0)
    assert len(timing.time_program(lambda i: i, 20).seconds) == 3


def test_selection():
    assert [s.name for s in bench.select([], [], False)] == list(bench.DEFAULT_SHAPES)
    assert {s.op for s in bench.select([], [], False)} == set(OPS)
    assert all(s.name.endswith("_small") for s in bench.select([], [], True))
    assert [s.name for s in bench.select(["ssd"], ["all"], False)] == ["mamba2_300m", "mamba2_packed"]
    assert [s.name for s in bench.select(["kda"], [], False)] == ["kda_300m"]
    assert bench.select([], ["gdn_300m"], True) == [SHAPES["gdn_300m"]]
    small = bench.select([], ["all"], True)
    assert len({(s.op, str(s)) for s in small}) == len(small) < len(SHAPES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "gdm"], "did you mean 'gdn'"),
        (["--shapes", "gdn_300"], "did you mean 'gdn_300m'"),
        (["--backends", "pallas"], "unknown name 'pallas'"),
        (["--ops", "kda", "--shapes", "gdn_300m"], "gdn_300m is a shape of gdn, not of --ops kda"),
        (["--ops", "gdn", "--shapes", "gdn_t1,kda_300m"], "kda_300m is a shape of kda, not of --ops gdn"),
        (["--shapes", ""], "--shapes: '' names nothing"),
        (["--shapes", "zzz"], "choose one of gdn_300m, gdn_1b, "),
        (["--shapes", "zzz"], ", ... (see --list)"),
        (["--ops", "ssd", "--backends", "chunked,triton"], "ssd has no 'triton' implementation"),
        (["--backends", "triton"], "error: --backends: triton cannot run here: it needs a GPU"),
        (
            ["--backends", "triton", "--shapes", "mamba2_300m_small"],
            "error: --backends: ssd has no 'triton' implementation; choose one of reference, chunked",
        ),
        (["--repeats", "x"], "error: --repeats: invalid int value: 'x'"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["--json", ""], "--json: '' is no file name"),
        (["--json", "/"], "--json: '/' is a folder"),
        (["--json", "/proc/bench.json"], "--json: cannot write /proc/bench.json: "),
        (["--chart", f"{__file__}/x.png"], "x.png: Not a directory"),
        (["--chart", "chart"], "--chart: chart must end in .png, .svg or .pdf"),
        (["--chart", "chart.jpeg"], "--chart: chart.jpeg must end in .png, .svg or .pdf"),
        (["--chart", "chart.png", "--json", "./chart.png"], "--chart: this is the file of --json"),
        (["--repeats", "0"], "--repeats: 0 is not positive"),
        (["--json", "no/such/folder/x.json"], "--json: cannot write no/such/folder/x.json: No such file or directory"),
    ],
)
def test_a_mistake_ends_in_one_line_and_code_2_before_anything_is_timed(
    arguments, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(timing, "measure_peaks", lambda: pytest.fail("measured"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.chdir(tmp_path)
    assert bench.main(arguments) == 2
    assert not list(tmp_path.iterdir())
    printed = capsys.readouterr()
    assert printed.out == ""
    errors = [line for line in printed.err.splitlines() if not line.startswith("bench: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert message in errors[0]


@pytest.mark.parametrize("during", [0, 2, 3])
def test_ctrl_c_shows_and_writes_what_was_measured(during, quick, tmp_path, capsys, monkeypatch):
    """Pressed while the program of that number compiles; in the last case its compiler's process dies of it too."""
    compile_program, seen = timing._compile, []

    def interrupted(*args):
        seen.append(args)
        if len(seen) == during + 1:
            os.kill(os.getpid(), signal.SIGINT)
            if during == 3:
                raise RuntimeError("ptxas exited with 2")
        return compile_program(*args)

    monkeypatch.setattr(timing, "_compile", interrupted)
    out, image = tmp_path / "x.json", tmp_path / "x.svg"
    arguments = ["--shapes", "gdn_t1_small,gdn_t65_small", "--backends", "reference,chunked", "--repeats", "3"]
    before = signal.getsignal(signal.SIGINT)
    assert bench.main([*arguments, "--json", str(out), "--chart", str(image)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    printed = capsys.readouterr()
    timed = {0: 1, 2: 3, 3: 3}[during]
    assert printed.err.splitlines()[-1] == f"stopped: {timed} of 8 programs timed"
    assert f"bench: wrote {out}" in printed.err and f"bench: wrote {image}" in printed.err
    assert len(printed.out.splitlines()) == 3 + timed
    written = json.loads(out.read_text())
    assert len(written["rows"]) == timed and written["stopped"]
    assert b"<svg" in image.read_bytes()


def test_a_second_ctrl_c_ends_at_once(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with bench.Stop().listen():
        os.kill(os.getpid(), signal.SIGINT)
        assert not codes
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 10
        while not codes and time.monotonic() < deadline:  # a thread ends it, as the main one may be compiling
            time.sleep(0.01)
    assert codes == [130]


def test_the_interpreter_is_not_timed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match=r"interpreter.*unset TRITON_INTERPRET"):
        bench.plan([SHAPES["gdn_t1"]], ["triton"], True, print)


def test_backends_that_an_unnamed_operation_lacks_are_left_out_aloud(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(launch, "why_not", lambda: "")
    said = []
    shapes = [SHAPES["mla_300m"], SHAPES["mamba2_300m"]]
    assert bench.plan(shapes, [], False, said.append) == [(shape, "chunked") for shape in shapes]
    assert said == ["attention has no 'triton' implementation", "ssd has no 'triton' implementation"]
    with pytest.raises(UserError, match="no operation here has a 'triton'"):
        bench.plan(shapes, ["triton"], False, said.append)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (("triton", False, 0, 3), ""),
        (("triton", True, 3, 8), ""),
        (("triton", False, 0, 0), "no Triton kernel in the program"),
        (("triton", True, 3, 3), "no Triton kernel in the backward pass"),
        (("chunked", False, 0, 0), ""),
        (("chunked", True, 0, 2), "2 Triton kernels in a chunked program"),
    ],
)
def test_falling_back_is_seen_in_the_program(case, reason):
    found = timing.fell_back(*case)
    assert found.endswith(reason) and bool(found) == bool(reason)


def test_a_failing_program_is_a_line_and_a_code_and_loses_no_other(quick, tmp_path, capsys, monkeypatch):
    compile_program = timing._compile

    def broken(row, shape, backward):
        if backward:
            raise RuntimeError("out of\nregisters")
        return compile_program(row, shape, backward)

    monkeypatch.setattr(timing, "_compile", broken)
    out = tmp_path / "bench.json"
    assert bench.main(["--shapes", "gdn_t1_small", "--backends", "chunked", "--json", str(out)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("gdn_t1_small")
    assert lines[-1] == "FAILED gdn_t1_small chunked forward+backward: RuntimeError: out of registers"
    assert [bool(row["error"]) for row in json.loads(out.read_text())["rows"]] == [False, True]


def test_what_is_too_much_for_the_machine_is_left_out_unless_named(monkeypatch):
    shape, said = SHAPES["gdn_t1"].small(), []

    def compile_nothing(row, shape, backward):
        row.total_bytes = 2000
        return (lambda *args: args), 0

    monkeypatch.setattr(timing, "_compile", compile_nothing)

    def rows(named):
        return timing.time_shape(shape, "chunked", PEAKS, 1, named, said.append)

    monkeypatch.setattr(timing, "SLOW_SECONDS", 0.0)
    assert rows(False) == []
    assert all("left out, one run takes" in line for line in said)
    assert len(said) == 2 and len(rows(True)) == 2
    said.clear()
    monkeypatch.setattr(timing, "memory_limit", lambda: 1000)
    assert rows(False) == []
    assert all("left out, it needs" in line for line in said)
    assert len(said) == 2 and len(rows(True)) == 2
    assert any("trying all the same" in line for line in said)


def test_the_list_has_every_shape(capsys):
    assert bench.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == list(SHAPES)
    assert {line.split()[0] for line in lines if line.endswith(" yes")} == set(bench.DEFAULT_SHAPES)


def test_the_list_and_help_say_what_is_there(capsys):
    assert bench.main(["--ops", "ssd", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:-1]] == ["mamba2_300m", "mamba2_packed"]
    with pytest.raises(SystemExit, match="0"):
        bench.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert ", ".join(bench.DEFAULT_SHAPES) in shown


def test_milliseconds_have_three_digits():
    values = {3.428e-3: "3.43", 0.625: "625", 1.2345e-5: "0.0123", 12.0: "12000", 0.0: "0"}
    assert {value: bench.milliseconds(value) for value in values} == values
