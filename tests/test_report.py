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
    sizes = {
        name: int(size.replace(",", ""))
        for name, size in re.findall(r"^(parameters|gradients|optimizer|total) +([\d,]+) +[\d.]+$", text, re.MULTILINE)
    }
    assert sizes == {
        "parameters": 4 * 307_767_232,
        "gradients": 4 * 307_767_232,
        "optimizer": 8 * 307_767_232,
        "total": 16 * 307_767_232,
    }
    assert "1.853e+09" in text


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
    report.check_fits(100, 1, 1600, "this machine's memory")
    report.check_fits(10**12, 1, 0, "unknown")
    with pytest.raises(
        UserError, match=r"100 parameters x 16 bytes need 1,600 bytes, but this machine's memory is 1,599;"
    ):
        report.check_fits(100, 1, 1599, "this machine's memory")
    with pytest.raises(UserError, match="x 16 bytes on each of 8 devices need 12,800 bytes"):
        report.check_fits(100, 8, 1600, "this machine's memory")


def test_the_memory_of_this_machine():
    assert 2**28 < report.host_memory() < 2**46
    report.check_memory(config_of("tiny_hybrid"))
    huge = config_of("hybrid_mamba2_8b", ("model.vocab_size", str(2**40)))
    with pytest.raises(UserError, match=r"config\.model: .* but this machine's memory is"):
        report.check_memory(huge)


def test_compiling_checks_the_devices_first():
    config = config_of("tiny_hybrid")
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=64))
    with pytest.raises(UserError, match=r"config\.mesh\.data: 64"):
        report.compiled(config)
