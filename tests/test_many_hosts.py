"""Many hosts with platform, environment and devices faked: what is set and said; and the recipes of docs/."""

import os
import re
import types
from pathlib import Path

import pytest
import yaml

import launch
from hybrid_jax import cluster, distributed, platform
from hybrid_jax.errors import UserError

ROOT = Path(__file__).parents[1]
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "amd[1-2]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}


class _Device:
    platform = "gpu"

    def __init__(self, process, kind="AMD Instinct MI300X"):
        self.process_index, self.device_kind = process, kind


class Fake:
    """A host of AMD GPUs in a run of two processes: the driver's files, jax's plugin and devices, the other process."""

    def __init__(self, monkeypatch, folder, gfx="90402", gpus=8, seen=(8, 8), gpus_of_other=8, host_of_other="amd2"):
        import jax

        topology, dri = folder / "nodes", folder / "dri"
        dri.mkdir()
        for node in range(gpus + 1):  # the first is the CPU
            (topology / str(node)).mkdir(parents=True)
            text = f"gfx_target_version {gfx if node else 0}\ndrm_render_minor {127 + node if node else 0}\n"
            (topology / str(node) / "properties").write_text(text)
            (dri / f"renderD{127 + node}").touch()
        monkeypatch.setattr(platform, "amd_architecture", lambda real=platform.amd_architecture: real(topology))
        visible = platform.visible_gpus
        monkeypatch.setattr(platform, "visible_gpus", lambda name, env: visible(name, env, topology, dri, folder))
        monkeypatch.setattr(platform, "installed_plugins", lambda: {"rocm"})
        monkeypatch.setattr(platform, "visible_hardware", lambda: {"rocm"})
        for name in (
            "XLA_FLAGS",
            "JAX_PLATFORMS",
            "HSA_NO_SCRATCH_RECLAIM",
            "NCCL_IB_GID_INDEX",
            "ROCR_VISIBLE_DEVICES",
        ):
            monkeypatch.delenv(name, raising=False)
        devices = [_Device(process) for process, count in enumerate(seen) for _ in range(count)]
        self.joined, self.updates, self.devices = {}, {}, devices or [types.SimpleNamespace(
            platform="cpu", device_kind="cpu", process_index=0)]  # fmt: skip
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
        monkeypatch.setattr(jax.distributed, "initialize", self._join)
        monkeypatch.setattr(jax.config, "update", self.updates.__setitem__)
        monkeypatch.setattr(jax, "devices", lambda: self.devices)
        monkeypatch.setattr(jax, "device_count", lambda: len(self.devices))
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(distributed, "members", [])
        monkeypatch.setattr(distributed.socket, "gethostname", lambda: "amd1")
        self.other = {"host": host_of_other, "gpus": gpus_of_other}
        monkeypatch.setattr(distributed.rendezvous, "meet", self._meet)

    def _join(self, *arguments, **named):
        self.joined = {"address": arguments[0], "count": arguments[1], "index": arguments[2], **named}

    def _meet(self, group, host, said, seconds):
        import json

        other = {**json.loads(said), **self.other}
        return (said, json.dumps(other))[:: 1 - 2 * group.index]

    def start(self, *arguments):
        values = launch.parse(["--config=x", *arguments]).flags
        launch.start_devices(values, launch.find_group(values))


@pytest.fixture(autouse=True)
def no_environment_leaks():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_one_process_a_node_of_mi300x_under_slurm(monkeypatch, tmp_path):
    fake = Fake(monkeypatch, tmp_path)
    os.environ.update(SLURM)
    fake.start("--platform=rocm", "--expected_devices=16", "--heartbeat_seconds=20")
    assert (fake.joined["address"], fake.joined["count"], fake.joined["index"]) == (f"amd1:{61440 + 7}", 2, 1)
    assert fake.joined["heartbeat_timeout_seconds"] == 20
    assert fake.joined["cluster_detection_method"] == "deactivate"  # jax's would give this process one GPU of eight
    assert fake.updates == {}  # all eight
    assert os.environ["HSA_NO_SCRATCH_RECLAIM"] == "1" and os.environ["NCCL_IB_GID_INDEX"] == "3"
    assert "--xla_gpu_first_collective_call_terminate_timeout_seconds=1800" in os.environ["XLA_FLAGS"].split()
    rows = [line.split() for line in distributed.table().splitlines()[2:]]
    assert rows == [["amd2", "0", "8", "8", "AMD", "Instinct", "MI300X"], ["amd1", "1", "8", "8", *rows[0][4:]]]


def test_two_processes_of_one_node_share_its_gpus(monkeypatch, tmp_path):
    fake = Fake(monkeypatch, tmp_path, seen=(4, 4), host_of_other="amd1")
    os.environ.update(SLURM)
    fake.start("--platform=rocm", "--expected_devices=8")
    assert fake.updates == {"jax_rocm_visible_devices": "4,5,6,7"}
    fake.start("--platform=rocm", "--local_device_ids=1,3")
    assert fake.updates == {"jax_rocm_visible_devices": "1,3"}


def test_one_gpu_seen_of_eight_is_told_with_its_process(monkeypatch, tmp_path):
    fake = Fake(monkeypatch, tmp_path, seen=(8, 1))
    os.environ.update(SLURM)
    with pytest.raises(UserError) as caught:
        fake.start("--platform=rocm", "--expected_devices=16")
    assert str(caught.value) == (
        "--expected_devices: 16 expected, but there are 9: process 0 (amd2): 8 x AMD Instinct MI300X; "
        "process 1 (amd1): 1 x AMD Instinct MI300X"
    )


def test_no_gpu_seen_though_asked_for(monkeypatch, tmp_path):
    fake = Fake(monkeypatch, tmp_path, gpus=0, seen=())
    with pytest.raises(UserError, match="--platform: rocm asked for, but jax sees only cpu devices; check the driver"):
        fake.start("--platform=rocm")


def test_a_consumer_gpu_gets_no_setting_of_the_instincts(monkeypatch, tmp_path):
    fake = Fake(monkeypatch, tmp_path, gfx="110000", gpus=1)
    fake.start("--platform=rocm")
    assert platform.amd_architecture() == "gfx1100"
    assert "HSA_NO_SCRATCH_RECLAIM" not in os.environ and "NCCL_IB_GID_INDEX" not in os.environ
    assert "--xla_gpu_enable_command_buffer=" in os.environ["XLA_FLAGS"].split()
    assert "first_collective" not in os.environ["XLA_FLAGS"] and not fake.joined


def test_a_port_that_jax_cannot_have_is_one_line(monkeypatch, tmp_path):
    import jax

    def taken(*unused, **named):
        raise RuntimeError("UNKNOWN: Failed to start RPC server\nmore lines")

    fake = Fake(monkeypatch, tmp_path)
    monkeypatch.setattr(jax.distributed, "initialize", taken)
    os.environ.update(SLURM)
    with pytest.raises(
        UserError, match=r"UNKNOWN: Failed to start RPC server; see that nothing else has that port, or"
    ):
        fake.start("--platform=rocm")


def test_proxies_are_passed_by(monkeypatch, tmp_path):
    fake = Fake(monkeypatch, tmp_path)
    os.environ.update(SLURM, https_proxy="http://proxy:3128", no_proxy="localhost")
    fake.start("--platform=rocm")
    assert os.environ["no_grpc_proxy"] == "localhost,amd1" and fake.updates == {"jax_check_proxy_envs": False}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--heartbeat_seconds=1"], "--heartbeat_seconds: must be at least 5, not 1"),
        (["--expected_devices=-1"], "--expected_devices: must be at least 0, not -1"),
        (["--num_processes=4"], "--num_processes is 4, but Slurm says 2"),
    ],
)
def test_settings_that_cannot_be(arguments, said, monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        launch.find_group(launch.parse(["--config=x", *arguments]).flags)


# ---- recipes ----


def test_the_jobset_starts_the_run_that_it_says():
    jobset = yaml.safe_load((ROOT / "docs" / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"] and group["replicas"] == 1
    (container,) = job["template"]["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    env["JAX_PROCESS_ID"] = "1"
    found = cluster.find(environment=env)
    name, subdomain = jobset["metadata"]["name"], jobset["spec"]["network"]["subdomain"]
    assert found.address == f"{name}-{group['name']}-0-0.{subdomain}:{container['ports'][0]['containerPort']}"
    assert found.count == job["completions"] and found.index == 1
    options = launch.parse(container["args"])
    gpus = container["resources"]["limits"]["amd.com/gpu"]
    assert options.flags.expected_devices == gpus * found.count and (ROOT / options.flags.config).exists()
    volumes = {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}


def test_the_image_keeps_its_jax_and_copies_what_is_there():
    text = (ROOT / "docker" / "rocm.Dockerfile").read_text()
    assert re.search(r"pip install .*-c constraints/jax-0\.10\.txt", text)
    for line in re.findall(r"^COPY (.*) \S+$", text, re.M):
        assert all((ROOT / name).exists() for name in line.split()), line
    for words in (
        "--device=/dev/kfd",
        "--device=/dev/dri",
        "--group-add=video",
        "--ipc=host",
        "--shm-size",
        "--security-opt",
    ):
        assert words in text


def test_the_documents_name_what_exists():
    text = (ROOT / "docs" / "many_hosts.md").read_text() + (ROOT / "README.md").read_text()
    flags = launch.parse(["--config=x"]).flags
    for flag in re.findall(r"`(--(?:coord|num_pro|process_id|local_dev|expected|heart|join)\w*)", text):
        assert flag[2:] in flags, flag
    for path in re.findall(r"`((?:docs|docker)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
