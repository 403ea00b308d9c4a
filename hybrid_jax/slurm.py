"""Writes a Slurm batch script that trains a config on several nodes.

    python -m hybrid_jax.slurm --config=configs/gdn_1b.py --nodes=4 --time=24:00:00 --out=gdn_1b.sbatch
    sbatch gdn_1b.sbatch

The script is plain bash, to be read and changed. Config, mesh and devices are checked when it is written. A job that
is preempted or reaches its time limit saves, is queued again and goes on from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid_jax import cluster, command, config_checks, config_file, output, platform
from hybrid_jax.config import Config
from hybrid_jax.data import stores
from hybrid_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
RUNTIMES = ("docker", "podman", "apptainer")
# Of a limit as sbatch takes it: minutes, with seconds; hours, minutes, seconds; days before either.
_TIME = re.compile(r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


@dataclasses.dataclass(frozen=True)
class Job:
    """What a script is made of. launch: the arguments of launch.py. processes and devices: of the whole run."""

    options: argparse.Namespace
    config: Config
    launch: tuple[str, ...]
    command: str  # that wrote it

    @property
    def processes(self) -> int:
        return self.options.nodes * self.options.tasks_per_node

    @property
    def devices(self) -> int:
        """A process on CPUs has one."""
        return self.processes if self.options.platform == "cpu" else self.options.nodes * self.options.gpus_per_node

    @property
    def requeues(self) -> bool:
        """Without checkpoints a job that is queued again would begin anew."""
        return bool(self.config.checkpoint.every_steps)

    @property
    def workdir(self) -> Path:
        return ROOT / Path(self.config.workdir).expanduser()


def parser() -> command.Parser:
    made = command.Parser("slurm", __doc__)
    made.add_argument("--config", required=True, help="the config file; --config.KEY=VALUE as for launch.py")
    made.add_argument("--nodes", type=int, required=True, help="hosts")
    made.add_argument("--gpus_per_node", type=int, default=8, help="of each host (8)")
    made.add_argument("--tasks_per_node", type=int, default=1, help="processes of a host: 1, or one a GPU (1)")
    made.add_argument("--platform", default="rocm", choices=("rocm", "cuda", "cpu"), help="of the devices (rocm)")
    made.add_argument("--time", default="24:00:00", help="limit of a job; longer runs are queued again (24:00:00)")
    made.add_argument("--grace_seconds", type=int, default=300, help="before the limit, to save in (300)")
    made.add_argument("--partition", default="", help="as sbatch has it")
    made.add_argument("--account", default="", help="as sbatch has it")
    made.add_argument("--job_name", default="", help="as sbatch has it (the run's folder's name)")
    made.add_argument("--sbatch", action="append", default=[], help="one more option of sbatch, as --sbatch=--qos=high")
    made.add_argument("--container", default="", help="image to run in (none: the --python of the nodes)")
    made.add_argument("--container_runtime", default="", choices=("", *RUNTIMES), help="what runs it (docker)")
    made.add_argument("--mount", action="append", default=[], help="one more folder to see in the container")
    made.add_argument(
        "--env", action="append", default=[], help="NAME=VALUE for every process, as NCCL_SOCKET_IFNAME=eth0"
    )
    made.add_argument("--python", default="", help="interpreter on the nodes (this one; in a container python3)")
    made.add_argument("--out", default="", help="file to write (standard output)")
    return made


def plan(arguments: Sequence[str]) -> Job:
    """The checked job of a command line. Raises UserError for what could not run."""
    plain, overrides = config_file.split_overrides(arguments)
    options = parser().parse_args(plain)
    for name in ("nodes", "gpus_per_node", "tasks_per_node", "grace_seconds"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name}: must be at least 1, not {getattr(options, name)}")
    if options.platform != "cpu" and options.gpus_per_node % options.tasks_per_node:
        raise UserError(
            f"--tasks_per_node: {options.tasks_per_node} processes cannot share {options.gpus_per_node} GPUs evenly; "
            f"use 1, or {options.gpus_per_node}"
        )
    if _seconds(options.time) <= options.grace_seconds:
        raise UserError(f"--grace_seconds: {options.grace_seconds} s is not less than --time={options.time}")
    _check_words(options)
    config = config_file.load(options.config, overrides)
    launch = [f"--config={options.config}", *(f"--config.{key}={value}" for key, value in overrides)]
    whose = "" if options.job_name else ", which is the folder's of config.workdir,"
    options.job_name = options.job_name or Path(config.workdir).name
    if not re.fullmatch(r"[\w.+-]+", options.job_name):
        raise UserError(
            f"--job_name: {options.job_name!r}{whose} is no name for a job; use letters, digits, '-', '_' and '.'"
        )
    job = Job(options, config, tuple(launch), shlex.join(["python", "-m", "hybrid_jax.slurm", *arguments]))
    _check_sbatch(job)
    try:
        config_checks.check_devices(config, job.devices, job.processes)
    except UserError as error:
        each = "1 device a process" if options.platform == "cpu" else f"{options.gpus_per_node} GPUs"
        raise UserError(f"{options.nodes} nodes x {each}: {error}") from None
    if config.data.source == "store" and not config.data.path.strip(", "):
        raise UserError(stores.missing(config.data))
    if not (ROOT / "launch.py").is_file():
        raise UserError(f"{ROOT} holds no launch.py; run this from a checkout that the nodes see")
    if not _seen_from_root(options.config):
        raise UserError(
            f"--config: {options.config} is another file seen from {ROOT}, where the job runs; give its path"
        )
    return job


def _seconds(limit: str) -> int:
    found = _TIME.fullmatch(limit)
    if not found:
        raise UserError(
            f"--time: {limit!r} is no limit as sbatch takes it, such as 90 (minutes), 24:00:00 or 2-12:00:00"
        )
    a, b, c = (int(found[name] or 0) for name in "abc")
    if found["d"]:
        return int(found["d"]) * 86400 + a * 3600 + b * 60 + c
    return a * 3600 + b * 60 + c if found["c"] else a * 60 + b


def _check_words(options: argparse.Namespace) -> None:
    for name in ("partition", "account", "container", "python"):
        if re.search(r"\s", getattr(options, name)):
            raise UserError(f"--{name}: {getattr(options, name)!r} has a blank in it")
    for text in options.env:
        if not re.fullmatch(r"[A-Za-z_]\w*=[^\n]*", text):
            raise UserError(f"--env: {text!r} is not NAME=VALUE")
    for text in options.mount:
        if not os.path.isabs(text) or re.search(r"[\s:]", text):
            raise UserError(f"--mount: {text!r} is no absolute path without blanks and colons")
    if (options.container_runtime or options.mount) and not options.container:
        raise UserError("--container_runtime and --mount are for a --container, which is not given")


_ALSO = ("--ntasks", "--no-requeue")  # of sbatch, that would contradict what a script sets


def _check_sbatch(job: Job) -> None:
    own = {line.partition("=")[0]: line for line in _directives(job)[: -len(job.options.sbatch) or None]}
    for text in job.options.sbatch:
        if not re.fullmatch(r"--[a-z][\w-]*(=[^\n]*)?", text):
            raise UserError(f"--sbatch: {text!r} is no option; write it as --sbatch=--qos=high")
        if re.search(r"[\"'\\]", text):
            raise UserError(f"--sbatch: {text!r} has a quote or backslash in it, which sbatch would take away")
        name = text.partition("=")[0]
        if name in own or name in _ALSO:
            says = f" ({own[name]})" if name in own else ""
            raise UserError(
                f"--sbatch: {name} is set by the script itself{says}; use the flags of hybrid_jax.slurm, or change the "
                "script"
            )


def _quoted(option: str) -> str:
    """As sbatch reads it in a script, where a blank ends a word and # the line."""
    name, equals, value = option.partition("=")
    return f'{name}="{value}"' if equals and not re.fullmatch(r"[\w.,:=@%/+-]*", value) else option


def _seen_from_root(path: str) -> bool:
    file = config_file.split(path)[0]
    return (ROOT / file).resolve() == file.resolve()


# ---- the script --------------------------------------------------------------------------------------------------


def script(job: Job) -> str:
    """The batch script."""
    options = job.options
    kinds = f"{options.gpus_per_node} GPUs" if options.platform != "cpu" else "CPUs"
    data, fsdp, tensor = config_checks.mesh_shape(job.config.mesh, job.devices)
    parts = [
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in _directives(job)),
        f"# {options.nodes} nodes with {kinds}, {job.processes} processes; mesh data {data} x fsdp {fsdp} x tensor "
        f"{tensor}.",
        f"# Written by: {job.command}",
        "set -uo pipefail",
        f"cd {shlex.quote(str(ROOT))} || exit",
        "",
        "# Process 0 runs on the first node, where the others look for it.",
        'first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f'export JAX_COORDINATOR_ADDRESS="$first_node:$(({cluster.FIRST_PORT} + SLURM_JOB_ID % {cluster.PORTS}))"',
        f"export JAX_NUM_PROCESSES={job.processes}",
        *_environment(job),
        "",
        "# What each process runs.",
        "read -r -d '' task <<'TASK'",
        *_task(job),
        "TASK",
        "",
        *_run(job),
        *_clean_up(options),
        *_requeue(job),
        'exit "$code"',
    ]
    return "\n".join(parts) + "\n"


def _directives(job: Job) -> list[str]:
    options = job.options
    lines = [
        f"--job-name={options.job_name}",
        f"--nodes={options.nodes}",
        f"--ntasks-per-node={options.tasks_per_node}",
        f"--time={options.time}",
        "--exclusive",
        "--output=%x-%j.log",
        "--open-mode=append",
    ]
    if options.platform != "cpu":
        lines.insert(3, f"--gpus-per-node={options.gpus_per_node}")
    lines += [f"--{name}={getattr(options, name)}" for name in ("partition", "account") if getattr(options, name)]
    if job.requeues:
        lines += ["--requeue", f"--signal=B:USR1@{options.grace_seconds}"]
    return lines + [_quoted(option) for option in options.sbatch]


def _environment(job: Job) -> list[str]:
    """Exports of the platform's settings and of --env, which is the last word."""
    asked = dict(text.split("=", 1) for text in job.options.env)
    settings = platform.environment(job.options.platform, asked, several=job.processes > 1)
    lines = []
    if settings:
        lines.append("# What launch.py sets by itself; a value of your own wins.")
        lines += [f'export {name}="${{{name}:-{value}}}"' for name, value in settings.items()]
    for name, value in asked.items():
        lines += [_LITERAL] * ("$" in value or "`" in value)
        lines.append(f"export {name}={shlex.quote(value)}")
    return lines


def _variables(job: Job) -> list[str]:
    """Names of what a container has to be given."""
    asked = dict(text.split("=", 1) for text in job.options.env)
    names = ["JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"]
    if job.options.tasks_per_node > 1:
        names.append(cluster.DEVICE_VARIABLE)
    settings = platform.environment(job.options.platform, asked, several=job.processes > 1)
    return list(dict.fromkeys([*names, *settings, *asked, "HOME"]))


def _task(job: Job) -> list[str]:
    options = job.options
    lines = ["export JAX_PROCESS_ID=$SLURM_PROCID"]
    if options.tasks_per_node > 1 and options.platform != "cpu":
        each = options.gpus_per_node // options.tasks_per_node
        first = f"SLURM_LOCALID * {each}"
        ids = "$SLURM_LOCALID" if each == 1 else f"$(seq -s , $(({first})) $(({first} + {each - 1})))"
        lines += [f"{cluster.DEVICE_VARIABLE}={ids}", f"export {cluster.DEVICE_VARIABLE}"]
    arguments = [
        "launch.py",
        *job.launch,
        f"--platform={options.platform}",
        f"--expected_devices={job.devices}",
    ]
    words = [*_container(job), *map(shlex.quote, [options.python or _python(options), *arguments])]
    if job.requeues and job.processes > 1:
        words.append('--requeue_file="$REQUEUE_FILE"')
    return [*lines, "exec " + " \\\n  ".join(words)]


def _python(options: argparse.Namespace) -> str:
    return "python3" if options.container else sys.executable


def _container(job: Job) -> list[str]:
    """The words before the interpreter, a line each; already quoted."""
    options = job.options
    if not options.container:
        return []
    runtime = options.container_runtime or "docker"
    mounts = list(dict.fromkeys([str(ROOT), *_folders(job), *options.mount]))
    image = shlex.quote(options.container)
    if runtime == "apptainer":
        gpu = {"rocm": ["--rocm"], "cuda": ["--nv"], "cpu": []}[options.platform]
        return ["apptainer exec", *gpu, *(f"--bind={shlex.quote(path)}" for path in mounts),
                f"--pwd={shlex.quote(str(ROOT))}", image]  # fmt: skip
    gpu = {
        "rocm": ["--device=/dev/kfd --device=/dev/dri --group-add=video", "--security-opt=seccomp=unconfined"],
        "cuda": ["--gpus=all" if runtime == "docker" else "--device=nvidia.com/gpu=all"],
        "cpu": [],
    }[options.platform]
    return [
        f'{runtime} run --rm --name="{_NAME}-$SLURM_PROCID"',
        *gpu,
        "--network=host --ipc=host --shm-size=64g --ulimit=memlock=-1",
        '--user="$(id -u):$(id -g)"' if runtime == "docker" else "--userns=keep-id",
        '--volume="$HOME:$HOME"',
        *(f"--volume={shlex.quote(f'{path}:{path}')}" for path in mounts),
        f"--workdir={shlex.quote(str(ROOT))}",
        *(f"--env={name}" for name in _variables(job)),
        *(["--env=REQUEUE_FILE"] if job.requeues and job.processes > 1 else []),
        image,
    ]


_LITERAL = "# shellcheck disable=SC2016  # not expanded here"
_NAME = "hybrid_jax-$SLURM_JOB_ID"


def _folders(job: Job) -> list[str]:
    """Folders outside the checkout that the config writes to or reads."""
    data, found = job.config.data, [str(job.workdir)]
    for path in (data.path, data.validation_path):
        found += [part.split("*")[0].rpartition("/")[0] for part in path.split(",")]
    found.append(data.cache_dir)
    return [path for path in found if os.path.isabs(path) and ROOT not in (Path(path), *Path(path).parents)]


def _run(job: Job) -> list[str]:
    start = 'srun --kill-on-bad-exit=1 bash -c "$task"'
    if not job.requeues:
        return [start, "code=$?"]
    code, mark = job.config.train.requeue_exit_code, []
    if job.processes > 1:
        mark = [
            "# They make this file too: the first to end makes srun kill the others, and srun's code is then of those.",
            f'export REQUEUE_FILE={shlex.quote(str(job.workdir))}/requeue."$SLURM_JOB_ID"',
            'mkdir -p "${REQUEUE_FILE%/*}" && rm -f "$REQUEUE_FILE"',
        ]
    return [
        f"# On USR1, which comes before the time limit, and on TERM the processes save and end with {code}.",
        *mark,
        f"{start} &",
        "srun=$!",
        "trap 'kill -USR1 \"$srun\"' USR1",
        "trap 'kill -TERM \"$srun\"' TERM",
        'while kill -0 "$srun" 2>/dev/null; do wait "$srun"; done  # which a trap interrupts',
        'wait "$srun"',
        "code=$?",
    ]


def _requeue(job: Job) -> list[str]:
    if not job.requeues:
        return []
    asked, remove = f'[ "$code" -eq {job.config.train.requeue_exit_code} ]', []
    if job.processes > 1:
        asked, remove = f'{asked} || [ -e "$REQUEUE_FILE" ]', ['rm -f "$REQUEUE_FILE"']
    return [
        f"if {asked}; then again=yes; else again=no; fi",
        *remove,
        "# A job that was cancelled is no longer running, and stays away.",
        'if [ "$again" = yes ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]


def _clean_up(options: argparse.Namespace) -> list[str]:
    """A container whose client was killed would stay."""
    runtime = options.container_runtime or "docker"
    if not options.container or runtime == "apptainer":
        return []
    left = f'{runtime} ps -q --filter "name={_NAME}" | xargs -r {runtime} kill'
    return [_LITERAL, f'[ "$code" -eq 0 ] || srun --ntasks-per-node=1 bash -c {shlex.quote(left)}']


def run(arguments: Sequence[str]) -> int:
    job = plan(arguments)
    text = script(job)
    if not job.options.out:
        print(text, end="")
        return 0
    output.check("--out", job.options.out)
    output.write(job.options.out, text)
    print(
        f"{job.options.out}: {job.processes} processes on {job.options.nodes} nodes, {job.devices} devices; "
        f"submit it with: sbatch {shlex.quote(job.options.out)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(command.main(run, sys.argv[1:], "nothing was written"))
