"""Which processes make a run and which of them this one is: from flags, from JAX_* variables, or from what started it.

Slurm (srun), Open MPI and PMI (MPICH, Intel MPI) tell their processes how many they are. No jax here.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import zlib
from collections.abc import Mapping, Sequence

from hybrid_jax import signals
from hybrid_jax.errors import UserError

ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
FLAGS = ("--coordinator_address", "--num_processes", "--process_id")
DEVICE_FLAG, DEVICE_VARIABLE = "--local_device_ids", "JAX_LOCAL_DEVICE_IDS"
PORT_VARIABLE = "JAX_COORDINATOR_PORT"
FIRST_PORT, PORTS = 61440, 4096  # above what Linux gives to outgoing connections (to 60999)


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes of one run, as one of them sees them.

    address: HOST:PORT at which process 0 listens. devices: numbers of this process's GPUs, "all" for every one it can
    see, "" where nobody said. hosts: of each process, by number, as the launcher has them; empty where it does not say.
    """

    address: str
    count: int
    index: int
    devices: str = ""
    hosts: tuple[str, ...] = ()


class MissingProcesses(UserError):
    """Some processes of the run did not arrive: nothing more can be done together with them."""

    exit_code = signals.PEER_LOST_EXIT_CODE


@dataclasses.dataclass(frozen=True)
class _Launcher:
    """What started the processes, and how it names their number and each one's own."""

    name: str
    count_variable: str
    index_variable: str
    count: int
    index: int


def find(
    coordinator_address: str = "",
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: str = "",
    environment: Mapping[str, str] | None = None,
) -> Group | None:
    """The run's processes by the arguments ("" or None = not given), else the JAX_* variables, else the launcher.

    None when there is but one. Raises UserError when only a part is given, when a value is impossible, and when
    arguments, variables and what started the processes contradict each other.
    """
    env = os.environ if environment is None else environment
    given = [coordinator_address, *("" if number is None else str(number) for number in (num_processes, process_id))]
    found = [env.get(name, "").strip() for name in ENVIRONMENT]
    names = [FLAGS[i] if given[i] else ENVIRONMENT[i] for i in range(3)]
    values = [given[i] or found[i] for i in range(3)]
    for flag, variable, value, other in zip(FLAGS, ENVIRONMENT, given, found, strict=True):
        if value and other and value != other:
            raise UserError(f"{flag} is {value}, but {variable} says {other}; leave out the one or unset the other")
    devices = _devices(local_device_ids, env)
    launcher = _launcher(env)
    if not any(values) and launcher is None:
        return None
    if launcher:
        for i, own, variable in (
            (1, launcher.count, launcher.count_variable),
            (2, launcher.index, launcher.index_variable),
        ):
            if values[i] and _integer(values[i], names[i]) != own:
                raise UserError(
                    f"{names[i]} is {values[i]}, but {launcher.name} says {own} ({variable}); leave out {names[i]}, or "
                    f"start the processes without {launcher.name}"
                )
            if not values[i]:
                values[i], names[i] = str(own), variable
        values[0] = values[0] or _address(launcher, env)
    for i, least in ((1, 1), (2, 0)):
        if values[i] and _integer(values[i], names[i]) < least:
            raise UserError(f"{names[i]}: must be at least {least}, not {values[i]}")
    _all_given(values, names)
    count, index = int(values[1]), int(values[2])
    if not 0 <= index < count:
        raise UserError(f"{names[2]}: must be from 0 to {count - 1} ({count} processes), not {index}")
    host, _, port = values[0].rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"{names[0]}: {values[0]!r} is not HOST:PORT, for example 127.0.0.1:12321")
    hosts = _slurm_hosts(env, count) if launcher and launcher.name == "Slurm" else ()
    return Group(values[0], count, index, devices, hosts) if count > 1 else None


def _all_given(values: Sequence[str], names: Sequence[str]) -> None:
    missing = [f"{FLAGS[i]} (or {ENVIRONMENT[i]})" for i in range(3) if not values[i]]
    if missing:
        present = ", ".join(names[i] for i in range(3) if values[i])
        raise UserError(f"{present} given without {' and '.join(missing)}: several processes need all three")


def _integer(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}: {text!r} is not a whole number") from None


def _devices(flag: str, env: Mapping[str, str]) -> str:
    name, text = (DEVICE_FLAG, flag) if flag else (DEVICE_VARIABLE, env.get(DEVICE_VARIABLE, ""))
    text = "".join(text.split())
    if text in ("", "all"):
        return text
    if not re.fullmatch(r"\d+(,\d+)*", text) or len(set(text.split(","))) < len(text.split(",")):
        raise UserError(f"{name}: {text!r} is not a list of different GPU numbers such as 0,1, nor 'all'")
    return text


# ---- what started the processes ----------------------------------------------------------------------------------

# (name, variable of the number of processes, of this one's). Open MPI's own are inside those of a Slurm job, where
# mpirun starts one helper a node with srun.
_OPEN_MPI = ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
_PMI = ("PMI", "PMI_SIZE", "PMI_RANK")
_SLURM = ("Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")


def _launcher(env: Mapping[str, str]) -> _Launcher | None:
    """The innermost one that started several processes. Raises UserError if it says only half."""
    mpi, pmi, slurm = (_read(env, *names) for names in (_OPEN_MPI, _PMI, _SLURM))
    if slurm and pmi and slurm.count == pmi.count:  # srun --mpi=pmi2 sets both
        pmi = None
    return next((found for found in (mpi, pmi, slurm) if found and found.count > 1), None)


def _read(env: Mapping[str, str], name: str, count_variable: str, index_variable: str) -> _Launcher | None:
    if not env.get(count_variable, "").strip():
        return None
    count = _integer(env[count_variable], count_variable)
    if count > 1 and not env.get(index_variable, "").strip():
        raise UserError(
            f"{count_variable} is {count}, but {index_variable} is not set: {name} started something else than this "
            "process; start each process by it, or unset the variable"
        )
    return _Launcher(name, count_variable, index_variable, count, _integer(env.get(index_variable) or "0", name))


def _address(launcher: _Launcher, env: Mapping[str, str]) -> str:
    """HOST:PORT of process 0 by the launcher's variables; "" where they do not tell. Any process finds the same."""
    if launcher.name == "Slurm" and env.get("SLURM_STEP_NODELIST"):
        return f"{host_names(env['SLURM_STEP_NODELIST'])[0]}:{_port(env, env.get('SLURM_JOB_ID', ''))}"
    local_count = env.get("OMPI_COMM_WORLD_LOCAL_SIZE" if launcher.name == "Open MPI" else "MPI_LOCALNRANKS", "")
    if local_count == str(launcher.count):
        return f"127.0.0.1:{_port(env, env.get('PMIX_NAMESPACE') or env.get('PMI_PORT', ''))}"
    raise UserError(
        f"{launcher.name} started {launcher.count} processes and does not say where process 0 runs; set "
        f"{FLAGS[0]}=HOST:PORT (or {ENVIRONMENT[0]}) to a free port of that host"
    )


def _port(env: Mapping[str, str], job: str) -> int:
    if given := env.get(PORT_VARIABLE, "").strip():
        port = _integer(given, PORT_VARIABLE)
        if not 0 < port < 65536:
            raise UserError(f"{PORT_VARIABLE}: {port} is no port; use one from 1 to 65535")
        return port
    return FIRST_PORT + (int(job) if job.isdigit() else zlib.crc32(job.encode())) % PORTS


def _slurm_hosts(env: Mapping[str, str], count: int) -> tuple[str, ...]:
    """The host of each task, one node's after the other's, as Slurm lays them out by default; () where it says
    otherwise."""
    names = host_names(env.get("SLURM_STEP_NODELIST", ""))
    each = [
        int(tasks)
        for tasks, _, times in re.findall(r"(\d+)(\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        for _ in range(int(times or 1))
    ]
    ordered = max(each, default=0) == 1 or env.get("SLURM_DISTRIBUTION", "block").startswith("block")
    if not ordered or len(names) != len(each) or sum(each) != count:
        return ()
    return tuple(name for name, tasks in zip(names, each, strict=True) for _ in range(tasks))


def host_names(nodes: str) -> list[str]:
    """The hosts of a list as Slurm writes it: n001, n002, n007 and m2 of "n[001-002,007],m2"."""
    found = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        pieces = [_numbers(piece) if i % 2 else [piece] for i, piece in enumerate(re.split(r"\[([^\]]*)\]", part))]
        found += ["".join(name) for name in itertools.product(*pieces)]
    return found


def _numbers(listed: str) -> list[str]:
    """ "001-003,7" as 001, 002, 003, 7."""
    found = []
    for piece in listed.split(","):
        first, _, last = piece.partition("-")
        if last:
            found += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        else:
            found.append(first)
    return found


# ---- the GPUs of a process ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Member:
    """What a process tells the others before any of them opens a device.

    host: its name; machine: one for all processes of a running kernel; visible: the variables that limit its GPUs;
    gpus: how many it can see, 0 for a run on CPUs.
    """

    host: str
    machine: str
    pid: int
    platform: str
    devices: str
    visible: str
    gpus: int


def local_devices(members: Sequence[Member], index: int) -> list[int] | None:
    """Numbers of the GPUs that process `index` takes of those it can see, None for all.

    Processes of one host share its GPUs evenly, in the order of their numbers, where nothing bound them to some.
    Raises UserError where that cannot be, the same in every process.
    """
    platforms = {member.platform for member in members}
    if len(platforms) > 1:
        hosts = [member.host for member in members]
        which = "; ".join(
            f"{name}: {on_hosts([i for i, m in enumerate(members) if m.platform == name], hosts)}"
            for name in sorted(platforms)
        )
        raise UserError(
            f"--platform: the processes do not agree on one ({which}); look at the driver and jax's plugin there, or "
            "give each the same --platform"
        )
    shares = [_share(members, i) for i in range(len(members))]
    return shares[index]


def _share(members: Sequence[Member], index: int) -> list[int] | None:
    own = members[index]
    if own.platform == "cpu" or own.devices == "all":
        return None
    if own.devices:
        chosen = [int(number) for number in own.devices.split(",")]
        if own.gpus and max(chosen) >= own.gpus:
            raise UserError(
                f"{DEVICE_FLAG}: process {index} on {own.host} is to take GPU {max(chosen)}, but sees {own.gpus} "
                f"(numbered from 0{', within ' + own.visible if own.visible else ''})"
            )
        return chosen
    beside = [i for i, m in enumerate(members) if (m.host, m.machine) == (own.host, own.machine)]
    if len(beside) == 1 or own.gpus <= 1 or any(members[i].visible != own.visible for i in beside):
        return None  # bound to its own by what started it, or alone
    if own.gpus % len(beside):
        raise UserError(
            f"{DEVICE_FLAG}: {own.gpus} GPUs on {own.host} do not divide over its {len(beside)} processes; start "
            f"another number of them, or give each {DEVICE_FLAG} (or {DEVICE_VARIABLE}): its numbers, or 'all' where "
            "it sees only its own"
        )
    each, place = own.gpus // len(beside), beside.index(index)
    return list(range(place * each, (place + 1) * each))


def ranges(numbers: Sequence[int]) -> str:
    """ "0-3,7" of 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def on_hosts(numbers: Sequence[int], hosts: Sequence[str], count: int = 0) -> str:
    """ "process 3 of 8 (node2)", "processes 0-7 (node1, node2)".

    hosts: of all processes, by number, or empty. count: of all processes, 0 = not said.
    """
    different = list(dict.fromkeys(hosts[i] for i in numbers if i < len(hosts) and hosts[i]))
    shown = ", ".join(different[:4]) + ", ..." * (len(different) > 4)
    of = f" of {count}" if count else ""
    return f"process{'es'[: 2 * (len(numbers) > 1)]} {ranges(numbers)}{of}" + (f" ({shown})" if shown else "")
