"""Banner, dry run, collectives in a program's text, memory."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_jax import config_file, report
from hybrid_jax.errors import UserError

CONFIGS = Path(__file__).parent.parent / "configs"


def config_of(name, *overrides):
    return config_file.load(f"{CONFIGS / name}.py", overrides)


def devices(count, kind="AMD Instinct MI300X", processes=1):
    return [
        SimpleNamespace(device_kind=kind, platform="gpu", process_index=i * processes // count) for i in range(count)
    ]


def test_the_banner_says_what_will_run_where():
    text = report.banner(config_of("hybrid_gdn_300m"), devices(8), "runs/x")
    for words in [
        "8 x AMD Instinct MI300X (gpu)\n",
        "data 8 x fsdp 1 x tensor 1",
        "embed > 3 x [MLA MLP GDN MLP GDN MLP GDN MLP] > norm > head",
        "309,280,624 (177,946,480 without embedding and head)",
        "1.898 GFLOP a token, forward and backward, in bfloat16",
        "2,097,152 a step (1,024 x 2,048), 9,999,220,736 in 4,768 steps",
        "output      runs/x",
    ]:
        assert words in text, text
    assert ", 2 processes" in report.banner(config_of("gdn_300m"), devices(8, processes=2), "")


def test_the_dry_run_table_adds_up():
    text = report.dry_run(config_of("gdn_300m"))
    parts = re.findall(r"^(embedding|GDN|MLP|final norm|head \(tied\)) +\d+ +([\d,]+)", text, re.MULTILINE)
    assert len(parts) == 5
    assert sum(int(number.replace(",", "")) for _, number in parts) == 307_767_232
    assert "1.853e+09" in text


def memory(name, *overrides):
    """(lines above, {part: GiB by moment}, {device: its row}) of the dry run's tables of memory."""
    above, parts, devices = "\n".join(report.memory(config_of(name, *overrides))).split("\n\n")
    columns = parts.splitlines()[0].split()[-3:]
    ends = [parts.splitlines()[0].index(name) + len(name) for name in columns]
    found = {}
    for line in parts.splitlines()[2:]:
        cells = [re.search(r"  ([\d.]+)$", line.ljust(end)[:end]) for end in ends]
        found[line.split("  ")[0]] = {c: float(v[1]) for c, v in zip(columns, cells, strict=True) if v}
    return above, found, {line.split()[0]: line for line in devices.splitlines()[2:]}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("gdn_300m", {}), ("hybrid_mamba2_8b", {"fsdp": 8, "tensor": 4, "data": 4}), ("gdn_1b", {"fsdp": 128, "zero": 1})],
)
def test_the_dry_run_predicts_the_memory_of_any_mesh(name, mesh):
    above, parts, devices = memory(name, *((f"mesh.{axis}", str(size)) for axis, size in mesh.items()))
    total = parts.pop("total")
    for moment, size in total.items():
        assert sum(part.get(moment, 0) for part in parts.values()) == pytest.approx(size, abs=0.06)
    assert total["backward"] > total["update"] > parts["parameters"]["update"] + parts["moments"]["update"]
    assert f"fsdp {mesh.get('fsdp', 1)} x tensor {mesh.get('tensor', 1)}" in above
    assert list(devices) == ["MI300X", "MI325X", "MI355X", "H200"]


def test_the_dry_run_says_what_fits_where():
    above, parts, devices = memory("gdn_300m", ("checkpoint.every_steps", "10"))
    assert "mesh.data is -1" in above and "128 rows at once" in above
    assert parts["parameters"]["loss"] == round(4 * 307_767_232 / 2**30, 2)
    assert f"copy of the state takes {12 * 307_767_232 / 2**30:.2f} GiB" in above
    assert re.search(r"MI300X +192 +172\.8 +\d+\.\d +yes +128 +none$", devices["MI300X"])
    assert re.search(r" no +64 +dots, \d+ periods$", devices["H200"])  # and half as many rows need no remat
    assert "copy" not in memory("gdn_300m", ("checkpoint.every_steps", "0"))[0]


def test_a_batch_that_does_not_fit_the_planned_mesh_is_one_line():
    with pytest.raises(UserError, match=r"^config\.train\.global_batch_size: 1024 rows do not divide over 7 devices; "):
        report.dry_run(config_of("gdn_300m", ("mesh.data", "7")))
    with pytest.raises(UserError, match=r"^config\.train\.micro_batch_size: 5 does not divide the 128 rows"):
        report.dry_run(config_of("gdn_300m", ("mesh.data", "8"), ("train.micro_batch_size", "5")))
    assert "not predicted" in report.dry_run(config_of("gdn_300m", ("kernels.backend", "reference")))


def test_tables_are_aligned():
    lines = report.aligned([("a", "bb"), ("long", "1"), ("x", "1,000")])
    assert lines == ["a        bb", "-----------", "long      1", "x     1,000"]


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("AMD Instinct MI300X", 1307),
        ("AMD Instinct MI325X", 1307),
        ("AMD Instinct MI355X", 2516),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("cpu", 0),
        ("NVIDIA GeForce RTX 4090", 0),
    ],
)
def test_peak_flops(kind, tflops):
    assert report.peak_flops(kind) == tflops * 1e12


def test_a_state_that_does_not_fit_is_one_line_with_the_bytes():
    report.check_fits(100, 1600, 1, 1600, "this machine's memory")
    report.check_fits(10**12, 16 * 10**12, 1, 0, "unknown")
    report.check_fits(100, 200, 1, 1599, "this machine's memory")
    with pytest.raises(
        UserError, match=r"100 parameters x 16 bytes need 1,600 bytes, but this machine's memory is 1,599;"
    ):
        report.check_fits(100, 1600, 1, 1599, "this machine's memory")
    with pytest.raises(UserError, match="x 16 bytes on each of 8 devices need 12,800 bytes"):
        report.check_fits(100, 1600, 8, 1600, "this machine's memory")
    with pytest.raises(UserError, match=r"x 16 bytes, of which a device holds 12\.5%, need 200 bytes, but"):
        report.check_fits(100, 200, 1, 199, "this machine's memory")


def test_the_memory_of_this_machine():
    assert 2**28 < report.host_memory() < 2**46
    report.check_memory(config_of("tiny_hybrid"))
    huge = config_of("hybrid_mamba2_8b", ("model.vocab_size", str(2**40)), ("mesh.fsdp", "1"))
    with pytest.raises(UserError, match=r"config\.model: .* but this machine's memory is"):
        report.check_memory(huge)


def test_compiling_checks_the_devices_first():
    config = config_of("tiny_hybrid")
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=64))
    with pytest.raises(UserError, match=r"config\.mesh\.data: 64"):
        report.compiled(config)
