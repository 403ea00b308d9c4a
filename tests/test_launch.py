"""The command line: one line on stderr and exit code 2 for every mistake, help, dry runs, a short run."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from hybrid_jax import config as config_lib

ROOT = Path(__file__).parent.parent
TINY = f"--config={ROOT}/configs/tiny_hybrid.py"
SMALL = [
    TINY,
    "--config.model.pattern=A-",
    "--config.model.hidden_size=32",
    "--config.model.intermediate_size=64",
    "--config.train.sequence_length=64",
    "--config.train.global_batch_size=4",
]


@pytest.fixture(autouse=True)
def no_environment_leaks(monkeypatch):
    """launch sets variables for the process it is in; here that is the test's."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def command(*arguments, cwd=ROOT, **env):
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--config: missing; give a config file"),
        (["--dry_run"], "--config: missing"),
        (["--config=configs/gdn_30m.py"], "does not exist, did you mean configs/gdn_300m.py?"),
        (["--config=nowhere/x.py"], "--config: nowhere/x.py does not exist"),
        ([TINY + ":full"], "variant 'full' is not known"),
        ([TINY, "--config.model.pattern_=M-"], "config.model.pattern_: unknown key, did you mean 'pattern'?"),
        ([TINY, "--config.train.steps=x"], "config.train.steps: expected a whole number, got 'x'"),
        ([TINY, "--config.train.steps"], "config.train.steps: needs a value, as in --config.train."),
        ([TINY, "--config.model.mixer", "--dry_run"], "config.model.mixer: needs a value"),
        ([TINY, "--train.steps=3"], "--train.steps: unknown flag, did you mean --config.train.steps?"),
        ([TINY, "--steps=3"], "--steps: unknown flag, did you mean --config.train.steps?"),
        ([TINY, "--dryrun"], "--dryrun: unknown flag, did you mean --dry_run?"),
        ([TINY, "--zzz"], "--zzz: unknown flag; see --help"),
        ([TINY, "--dry_run=foo"], "--dry_run=foo: value should be one of <report|compile>"),
        ([TINY, "--num_processes=two"], "--num_processes: expected a whole number, got 'two'"),
        ([TINY, "train.steps=3"], "'train.steps=3': not a flag; config keys are set as --config.KEY=VALUE"),
        ([TINY, "--config.model.pattern=M-E-"], "'E' at position 3 is reserved for mixture of experts"),
        ([TINY, "--config.model.gdn.num_heads=3"], "gdn.num_v_heads: 4 is not a multiple of num_heads 3"),
        (
            [TINY, "--config.kernels.backend=triton", "--dry_run"],
            "Mamba2 has no 'triton' implementation; use auto, which",
        ),
        ([TINY, "--config.kernels.backend=triton", "--config.model.pattern=G-"], "triton cannot run here: it needs"),
        ([TINY, "--config.kernels.backend=triton", "--config.model.pattern=K-"], "triton cannot run here: it needs"),
        ([TINY, "--platform=rocm"], "--platform: rocm asked for, but the installed jax is without a plugin"),
        ([TINY, "--num_processes=2"], "given without"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments, words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(launch.platform, "installed_plugins", lambda: set())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert launch.main(arguments) == 2
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1, err
    assert errors[0].startswith("error: ")
    assert words in errors[0]
    assert out == ""


def test_a_mistake_as_a_process():
    done = command(TINY, "--config.optimizer.b1=2")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: config.optimizer.b1: 2.0 is not in [0, 1)\n"


def test_help_names_every_flag_and_key(capsys):
    assert launch.main(["--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("config", "dry_run", "platform", "coordinator_address", "num_processes", "process_id"):
        assert f"--{flag} " in text
    for path, field in config_lib.fields():
        if not path.startswith("model.gqa.rope."):
            assert f"  {path} " in text
            assert field.metadata["help"] in text
    assert len(text.splitlines()) < 160


def test_values_may_follow_after_a_space(capsys):
    arguments = [
        TINY,
        "--config.model.mixer",
        "kda",
        "--config.optimizer.min_learning_rate",
        "0",
        "--dry_run",
    ]
    assert launch.main(arguments) == 0
    assert "MLA MLP KDA MLP GDN" in capsys.readouterr().out


def test_a_dry_run_imports_no_jax_and_writes_nothing(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import launch; "
        "code = launch.main(sys.argv[2:]); print('jax' in sys.modules, code)"
    )
    arguments = [f"--config={ROOT}/configs/hybrid_mamba2_8b.py", "--dry_run"]
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.endswith("False 0\n"), done.stderr
    for words in ("7,898,996,224", "4.915e+10", "planned for data 1 x fsdp 8", "1,048,576 a step (128 x 8,192)"):
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_every_smoke_variant_builds(path, capsys):
    assert launch.main([f"--config={path}:smoke", "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "512 a step (8 x 64)" in out or "1,024 a step (16 x 64)" in out


def test_a_dry_run_plans_for_the_devices_that_are_expected(capsys):
    smoke = [f"--config={ROOT}/configs/hybrid_mamba2_8b.py:smoke", "--dry_run"]
    for devices, mesh in ((8, "data 1 x fsdp 8"), (4, "data 4 x fsdp 1")):
        assert launch.main([*smoke, f"--expected_devices={devices}"]) == 0
        out, err = capsys.readouterr()
        assert f"planned for {mesh} x tensor 1: " in out
        assert ("note: mesh.fsdp 8 x mesh.tensor 1 do not divide 4 devices" in err) == (devices == 4)
    assert launch.main([*smoke, "--expected_devices=4", "--config.mesh.fsdp=8"]) == 2
    assert "config.mesh.fsdp: 8 does not divide 4 devices" in capsys.readouterr().err
    assert launch.main([*smoke, "--expected_devices=-4"]) == 2
    assert "--expected_devices: must be at least 0, not -4" in capsys.readouterr().err


def test_an_axis_that_cuts_nothing_is_one_line_and_one_that_leaves_weights_whole_a_warning(capsys):
    mesh = [f"{TINY}:smoke", "--dry_run", "--config.model.pattern=*-*-", "--config.model.hidden_size=96"]
    mesh.append("--config.train.global_batch_size=40")
    assert launch.main([*mesh, "--config.mesh.fsdp=8"]) == 0
    assert "warning" not in capsys.readouterr().out
    assert launch.main([*mesh, "--config.mesh.fsdp=5"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: config.mesh.fsdp: 5 devices cannot cut any weight") and "such as 4" in err
    assert launch.main([*mesh, "--config.mesh.fsdp=20", "--config.model.mla.kv_lora_rank=40"]) == 0
    assert "warning: config.mesh.fsdp: 20 devices do not divide embed.weight, " in capsys.readouterr().out


def test_a_smoke_run_that_does_not_fit_says_how_many_bytes_it_needs(monkeypatch, capsys):
    from hybrid_jax import report

    monkeypatch.setattr(report, "host_memory", lambda: 24 * 10**9)
    assert launch.main([f"--config={ROOT}/configs/hybrid_mamba2_3b.py:smoke", "--platform=cpu"]) == 2
    err = capsys.readouterr().err
    assert "need 54,036,985,472 bytes, but this machine's memory is 24,000,000,000" in err


def test_compiling_is_not_refused_for_want_of_memory(monkeypatch, capsys):
    from hybrid_jax import report

    monkeypatch.setattr(report, "host_memory", lambda: 1000)
    small = [f"{TINY}:smoke", *SMALL[1:], "--platform=cpu"]
    assert launch.main([*small, "--dry_run=compile"]) == 0
    assert "compiled step, bytes a device" in capsys.readouterr().out
    assert launch.main(small) == 2
    assert "but this machine's memory is 1,000" in capsys.readouterr().err


def test_the_compiled_dry_run_reports_memory_and_collectives_of_several_devices():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = command(*SMALL, "--dry_run=compile", **flags)
    assert done.returncode == 0, done.stderr
    assert "upper bound" in done.stdout
    rows = re.findall(
        r"^(parameters|arguments|temporary|total)[^\d\n]* ([\d,]+)",
        done.stdout,
        re.M,
    )
    numbers = {name: int(text.replace(",", "")) for name, text in rows}
    parameters = 28_768
    assert numbers["arguments"] == pytest.approx(12 * parameters + 4 * 4 * 2 * 64, rel=0.02)  # moments too; 2 rows
    assert numbers["temporary"] > 4 * parameters
    assert numbers["total"] >= numbers["arguments"] + numbers["temporary"]
    sums = re.findall(r"^all-reduce +data +f32 +(-|[a-z]\S*(?: > \S+)*) +\d+ +[\d,]+ +([\d,]+)$", done.stdout, re.M)
    # Every gradient in fp32; the tied embedding's, a third of them here, comes in two parts.
    assert 4 * parameters <= sum(int(size.replace(",", "")) for _, size in sums) < 6 * parameters, done.stdout


def test_the_compiled_dry_run_of_more_devices_than_there_are():
    options = [
        "--dry_run=compile",
        "--virtual_devices=16",
        "--config.model.pattern=A-A-",
        "--config.mesh.fsdp=4",
        "--config.train.global_batch_size=16",
    ]
    done = command(*SMALL, *options, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert done.returncode == 0, done.stderr
    assert "Involuntary" not in done.stderr
    assert "planned for data 4 x fsdp 4 x tensor 1: " in done.stdout
    assert "compiled for data 4 x fsdp 4 x tensor 1\n" in done.stdout
    assert re.search(r"^all-gather +fsdp +f32 +layers +\d+ +\d+ +[\d,]+$", done.stdout, re.M), done.stdout
    assert re.search(r"^all-reduce +data +f32 +(-|layers) +\d+ +\d+ +[\d,]+$", done.stdout, re.M), done.stdout


@pytest.mark.parametrize("options", [[], ["--dry_run"], ["--dry_run=compile", "--platform=gpu"]])
def test_virtual_devices_are_for_compiling_alone(options, capsys):
    assert launch.main([*SMALL, "--virtual_devices=8", *options]) == 2
    assert "--virtual_devices: they can be compiled for and nothing else" in capsys.readouterr().err


def test_a_batch_that_does_not_divide_is_one_line():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_PLATFORMS": "cpu"}
    done = command(*SMALL, "--dry_run=compile", **flags)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines()[-1].startswith(
        "error: config.train.global_batch_size: 4 rows do not divide over 3 devices; use a multiple of 3"
    )


@pytest.mark.parametrize(("mixer", "name"), [("kda", "KDA"), ("mamba2", "Mamba2")])
def test_swapping_the_mixer_of_the_tiny_hybrid_trains_another_model(mixer, name, tmp_path):
    arguments = [
        TINY,
        "--platform=cpu",
        f"--config.model.mixer={mixer}",
        f"--config.workdir={tmp_path}",
        "--config.train.steps=8",
        "--config.train.global_batch_size=4",
        "--config.train.sequence_length=64",
        "--config.optimizer.warmup_steps=1",
        "--config.optimizer.learning_rate=4e-3",
        "--config.data.source=files",
        f"--config.data.path={ROOT / 'hybrid_jax'}",
        f"--config.data.cache_dir={tmp_path / 'cache'}",
        "--config.eval.batches=0",
        "--config.eval.sample_tokens=0",
        "--config.eval.ngram_order=0",
        "--config.checkpoint.every_steps=0",
    ]
    done = command(*arguments, XLA_FLAGS="--xla_backend_optimization_level=0")  # compiles faster
    assert done.returncode == 0, done.stderr
    assert f"embed > MLA MLP {name} MLP GDN MLP KDA MLP Mamba2 MLP GQA MLP > norm > head" in done.stdout
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 8
    assert losses[0] == pytest.approx(math.log(320), abs=0.3)  # nothing learnt yet
    assert losses[-1] < losses[0] - 1.0, losses


def test_a_short_run_writes_its_folder(tmp_path):
    overrides = ["--config.train.steps=3", "--config.eval.batches=0", "--config.eval.sample_tokens=0"]
    overrides += [
        "--config.eval.ngram_order=0",
        "--config.data.source=synthetic",
        "--config.checkpoint.every_steps=0",
    ]
    done = command(*SMALL, *overrides, "--platform=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "tiny_hybrid"
    saved = json.loads((folder / "config.json").read_text())
    assert saved["model"]["pattern"] == "A-"
    assert saved["workdir"] == "runs/tiny_hybrid"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines][-1] == 3
    assert {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second"} <= set(lines[-1])
    assert "embed > " in done.stdout
