"""The environment before jax: which platform, what is set, that the user wins, XLA takes the flags."""

import os
import subprocess
import sys

import pytest

from hybrid_jax import platform
from hybrid_jax.errors import UserError


def test_every_setting_has_a_reason_and_a_known_platform():
    for setting in platform.SETTINGS:
        assert len(setting.reason) > 10, setting.name
        assert setting.platform in ("cpu", "cuda", "rocm"), setting.name
    names = [(s.platform, s.name, s.architectures) for s in platform.SETTINGS]
    assert len(set(names)) == len(names)


def test_the_users_flags_and_variables_win():
    user = {
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_dump_to=/tmp/x",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5",
    }
    new = platform.environment("rocm", user)
    flags = new["XLA_FLAGS"].split()
    assert [flag for flag in flags if "autotune_level" in flag] == ["--xla_gpu_autotune_level=0"]
    assert "--xla_dump_to=/tmp/x" in flags
    assert "--xla_gpu_enable_command_buffer=" in flags  # HIP graphs stay off
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in new


def test_collectives_overlap_with_compute():
    cuda, rocm = (
        dict(flag.split("=", 1) for flag in platform.environment(name, {})["XLA_FLAGS"].split())
        for name in ("cuda", "rocm")
    )
    assert cuda["--xla_gpu_enable_latency_hiding_scheduler"] == "true"
    assert rocm["--xla_gpu_enable_latency_hiding_scheduler"] == "true"
    assert rocm["--xla_gpu_enable_pipelined_all_gather"] == "true"
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    assert {rocm[f"--xla_gpu_{kind}_combine_threshold_bytes"] for kind in kinds} == {str(256 * 2**20)}


def test_virtual_devices_win_over_what_was_asked_for_before(monkeypatch):
    monkeypatch.setattr(
        os, "environ", {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cuda"}
    )
    assert platform.prepare("", virtual_devices=1024) == "cpu"
    flags = os.environ["XLA_FLAGS"].split()
    counts = [flag for flag in flags if flag.startswith("--xla_force_host_platform_device_count=")]
    assert counts[-1].endswith("=1024") and os.environ["JAX_PLATFORMS"] == "cpu"
    monkeypatch.setattr(os, "environ", {"XLA_FLAGS": "/etc/xla_flags"})
    with pytest.raises(UserError, match="--virtual_devices: XLA_FLAGS=/etc/xla_flags names a file"):
        platform.prepare("", virtual_devices=8)


def test_a_file_of_flags_is_left_alone():
    assert "XLA_FLAGS" not in platform.environment("rocm", {"XLA_FLAGS": "/etc/xla_flags"})


def test_the_cpu_loses_its_library_fusions():
    new = platform.environment("cpu", {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    assert set(new) == {"XLA_FLAGS"} and "--xla_cpu_experimental_ynn_fusion_type=" in new["XLA_FLAGS"].split()
    assert "--xla_force_host_platform_device_count=8" in new["XLA_FLAGS"].split()


def test_settings_by_architecture():
    assert platform.environment("rocm", {}, "gfx942")["HSA_NO_SCRATCH_RECLAIM"] == "1"
    assert "RCCL_WARP_SPEED_AUTO" not in platform.environment("rocm", {}, "gfx942")
    assert platform.environment("rocm", {}, "gfx950")["RCCL_WARP_SPEED_AUTO"] == "0"
    assert "RCCL_WARP_SPEED_AUTO" not in platform.environment("cuda", {}, "gfx950")


def test_settings_of_several_processes():
    alone, several = (platform.environment("rocm", {}, several=given) for given in (False, True))
    assert "NCCL_IB_GID_INDEX" not in alone and several["NCCL_IB_GID_INDEX"] == "3"
    added = set(several["XLA_FLAGS"].split()) - set(alone["XLA_FLAGS"].split())
    assert sorted(added) == [
        "--xla_gpu_first_collective_call_terminate_timeout_seconds=1800",
        "--xla_gpu_first_collective_call_warn_stuck_timeout_seconds=120",
    ]
    assert "NCCL_IB_GID_INDEX" not in platform.environment("rocm", {"NCCL_IB_GID_INDEX": "1"}, several=True)
    assert platform.environment("cpu", {}) == platform.environment("cpu", {}, several=True)


def test_gpus_that_a_process_sees(tmp_path):
    topology, dri, nvidia = tmp_path / "nodes", tmp_path / "dri", tmp_path / "nvidia"
    for node in range(9):
        (topology / str(node)).mkdir(parents=True)
        text = f"gfx_target_version {90402 if node else 0}\ndrm_render_minor {127 + node}\n"
        (topology / str(node) / "properties").write_text(text)

    def seen(name, **environment):
        return platform.visible_gpus(name, environment, topology, dri, nvidia)

    assert seen("rocm") == ("", 8) and seen("cpu", ROCR_VISIBLE_DEVICES="0") == ("", 0)
    assert seen("rocm", ROCR_VISIBLE_DEVICES="0,1,2,3") == ("ROCR_VISIBLE_DEVICES=0,1,2,3", 4)
    assert seen("rocm", ROCR_VISIBLE_DEVICES="4,5", HIP_VISIBLE_DEVICES="1")[1] == 1
    assert seen("rocm", HIP_VISIBLE_DEVICES="")[1] == 0 and seen("rocm", HIP_VISIBLE_DEVICES="-1")[1] == 0
    dri.mkdir()
    (dri / "renderD130").touch()  # a container that was given one
    assert seen("rocm")[1] == 1
    assert seen("cuda") == ("", 0) and seen("cuda", CUDA_VISIBLE_DEVICES="GPU-1,GPU-2")[1] == 2
    for name in "ab":
        (nvidia / name).mkdir(parents=True)
    assert seen("cuda")[1] == 2 and seen("cuda", CUDA_VISIBLE_DEVICES="1")[1] == 1


@pytest.mark.parametrize("name", ["rocm", "cuda", "cpu"])
def test_xla_accepts_the_flags(name):
    """An unknown flag aborts the process, on any platform."""
    env = {**os.environ, **platform.environment(name, {}, several=True), "JAX_PLATFORMS": "cpu"}
    code = "import jax; print(int(jax.jit(lambda x: x + 1)(41)))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "42\n", done.stderr
    bad = {**env, "XLA_FLAGS": env["XLA_FLAGS"] + " --xla_gpu_no_such_flag=1"}
    if name == "cuda":  # the check above can fail
        done = subprocess.run([sys.executable, "-c", code], env=bad, capture_output=True, text=True, timeout=120)
        assert done.returncode != 0


@pytest.mark.parametrize(
    ("request_", "plugins", "hardware", "expected"),
    [
        ("auto", [], [], "cpu"),
        ("auto", ["rocm"], ["rocm"], "rocm"),
        ("auto", ["cuda"], ["cuda"], "cuda"),
        ("auto", ["rocm"], [], "cpu"),
        ("auto", [], ["rocm"], "cpu"),
        ("auto", ["rocm", "cuda"], ["cuda"], "cuda"),
        ("gpu", ["cuda"], ["cuda"], "cuda"),
        ("gpu", ["rocm", "cuda"], ["cuda"], "cuda"),
        ("rocm", ["rocm"], [], "rocm"),
        ("cuda,cpu", ["cuda"], ["cuda"], "cuda"),
        ("cpu", ["rocm"], ["rocm"], "cpu"),
    ],
)
def test_the_platform_of_a_request(request_, plugins, hardware, expected):
    assert platform.choose(request_, plugins, hardware) == expected


@pytest.mark.parametrize(
    ("request_", "plugins", "words"),
    [
        ("rocm", [], "--platform: rocm asked for, but the installed jax is without a plugin for it; install"),
        ("cuda", ["rocm"], "install hybrid_jax[cuda]"),
        ("gpu", [], "install hybrid_jax[rocm] or hybrid_jax[cuda]"),
        ("tpu", [], "--platform: 'tpu' is not one of auto, cpu, gpu, cuda, rocm"),
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_be_used_is_an_error(request_, plugins, words):
    with pytest.raises(UserError) as error:
        platform.choose(request_, plugins, ["rocm", "cuda"])
    assert words in str(error.value)


def test_a_gpu_beside_a_cpu_only_jax_is_told():
    assert "install hybrid_jax[rocm]" in platform.unused_gpu("cpu", [], ["rocm"])
    assert platform.unused_gpu("cpu", ["rocm"], ["rocm"]) == ""
    assert platform.unused_gpu("rocm", ["rocm"], ["rocm"]) == ""
    assert platform.unused_gpu("cpu", [], []) == ""


def test_the_backend_must_be_the_one_asked_for():
    platform.check_backend("cpu")
    with pytest.raises(UserError, match="--platform: rocm asked for, but jax sees only cpu devices"):
        platform.check_backend("rocm")


def test_the_amd_architecture_is_read_from_the_driver(tmp_path):
    for node, version in [("0", 0), ("1", 90402), ("2", 90402)]:
        (tmp_path / node).mkdir()
        (tmp_path / node / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\n")
    assert platform.amd_architecture(tmp_path) == "gfx942"
    (tmp_path / "1" / "properties").write_text("gfx_target_version 90010\n")
    assert platform.amd_architecture(tmp_path) == "gfx90a"
    (tmp_path / "1" / "properties").write_text("gfx_target_version 90500\n")
    assert platform.amd_architecture(tmp_path) == "gfx950"
    (tmp_path / "1" / "properties").write_text("gfx_target_version 110000\n")
    assert platform.amd_architecture(tmp_path) == "gfx1100"
    assert platform.amd_architecture(tmp_path / "none") == ""


def test_prepare_sets_the_environment_and_jax_platforms(monkeypatch):
    monkeypatch.setattr(platform, "installed_plugins", lambda: {"rocm"})
    monkeypatch.setattr(platform, "visible_hardware", lambda: {"rocm"})
    monkeypatch.setattr(platform, "amd_architecture", lambda: "gfx950")
    before = dict(os.environ)
    try:
        for name in ("XLA_FLAGS", "JAX_PLATFORMS", "RCCL_WARP_SPEED_AUTO"):
            os.environ.pop(name, None)
        assert platform.prepare("") == "rocm"
        assert "JAX_PLATFORMS" not in os.environ  # jax chooses, as it would without us
        assert os.environ["RCCL_WARP_SPEED_AUTO"] == "0"
        assert "--xla_gpu_enable_command_buffer=" in os.environ["XLA_FLAGS"]
        assert platform.prepare("gpu") == "rocm"
        assert os.environ["JAX_PLATFORMS"] == "rocm"
        os.environ["JAX_PLATFORMS"] = "cpu"
        assert platform.prepare("") == "cpu"
    finally:
        os.environ.clear()
        os.environ.update(before)
