"""Several processes as one run: a thin, checked layer over jax.distributed.

Process 0 prints and writes metrics; checkpoints are written by all processes together (they must see one
folder).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_jax import cluster, platform, rendezvous, signals, supervisor
from hybrid_jax.cluster import Group, Member, MissingProcesses
from hybrid_jax.errors import UserError

HEARTBEAT_SECONDS = 30  # after which a silent process counts as gone
JOIN_SECONDS = 600
_SHUTDOWN_SECONDS = 3600  # processes end together; one that died meanwhile is found by its heartbeat
_LEAVE_SECONDS = 5.0
_LINGER_SECONDS = 2.0  # of process 0 after all the others, so that each ends by itself
_ABORT_SECONDS = 15  # that the runtime takes at most, after the heartbeat's
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_heartbeat_seconds = HEARTBEAT_SECONDS
members: list[Member] = []  # the processes of this run, by number, once they have joined; empty for a single one


def initialize(
    group: Group | None,
    platform_name: str = "cpu",
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    join_seconds: int = JOIN_SECONDS,
) -> bool:
    """Joins the other processes of the run; True if there are any. Call before the first use of a device.

    Each process then sees its own GPUs only (cluster.local_devices). Does nothing for a single process (None), or when
    this one has joined already. Raises MissingProcesses when the others do not come within `join_seconds`, UserError
    when what they say does not fit together.
    """
    import jax

    if jax.distributed.is_initialized():
        return jax.process_count() > 1
    if group is None:
        return False
    global _heartbeat_seconds
    _heartbeat_seconds = heartbeat_seconds
    visible, gpus = platform.visible_gpus(platform_name, os.environ)
    own = Member(socket.gethostname(), _machine(), os.getpid(), platform_name, group.devices, visible, gpus)
    said = rendezvous.meet(group, own.host, json.dumps(dataclasses.asdict(own)), join_seconds)
    members[:] = [Member(**json.loads(text)) for text in said]
    supervisor.tell([member.host for member in members])
    _go_past_proxies(group.address)
    try:
        # jax's own detection gives each process of a Slurm job one GPU, also where it is the only one of its host.
        jax.distributed.initialize(
            group.address,
            group.count,
            group.index,
            cluster_detection_method="deactivate",
            initialization_timeout=join_seconds,
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except Exception as error:  # jax raises RuntimeError or XlaRuntimeError, by version
        raise UserError(
            f"process {group.index} of {group.count} could not join {group.address}: {_first_line(error)}; "
            "see that nothing else has that port, or give all processes another one (--coordinator_address)"
        ) from error
    devices = cluster.local_devices(members, group.index)
    if devices is not None:
        jax.config.update(f"jax_{platform_name}_visible_devices", ",".join(map(str, devices)))
    return True


def _machine() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _go_past_proxies(address: str) -> None:
    """gRPC would ask an HTTP proxy of the environment for the coordinator, which such a proxy does not reach."""
    import jax

    if any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        skipped = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy", "")
        host = address.rpartition(":")[0].strip("[]")
        os.environ["no_grpc_proxy"] = f"{skipped},{host}".strip(",")
        jax.config.update("jax_check_proxy_envs", False)  # it warns of just that


def _client() -> Any:
    # jax has no public way to a barrier that ends, nor to the store of keys beside it.
    import jax

    return jax._src.distributed.global_state.client  # type: ignore[attr-defined]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def leave(code: int) -> None:
    """Ends this process with `code`, without what runs at exit, which would wait for processes that do not end.

    For errors. Where all end for one and the same they do so together; else those that are left find out by the
    heartbeat. Returns where no others have joined.
    """
    if not members:
        return
    if code != signals.PEER_LOST_EXIT_CODE:
        with contextlib.suppress(Exception):  # the others go on, or are gone
            _client().wait_at_barrier("hybrid_jax/leave", round(1000 * _LEAVE_SECONDS))
            if is_main():  # the service goes with it, and the runtime ends those that are left, in another way
                time.sleep(_LINGER_SECONDS)
    supervisor.flush()
    os._exit(code)


def await_abort(error: BaseException) -> None:
    """After an error of a collective, as when the process at its other end died: waits until the runtime ends this
    process for that, or for longer than it would take. Returns at once for other errors."""
    import jax

    if members and isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
        time.sleep(_heartbeat_seconds + _ABORT_SECONDS)


def check_expected(expected: int) -> None:
    """Raises UserError unless the run has `expected` devices: a line with what each process has. Starts the backend."""
    import jax

    if expected and jax.device_count() != expected:
        raise UserError(f"--expected_devices: {expected} expected, but there are {jax.device_count()}: {_found()}")


def _found() -> str:
    import jax

    by_count: dict[tuple[int, str], list[int]] = {}
    for process in range(jax.process_count()):
        kinds = [device.device_kind for device in jax.devices() if device.process_index == process]
        by_count.setdefault((len(kinds), kinds[0] if kinds else "device"), []).append(process)
    return "; ".join(f"{named(which)}: {count} x {kind}" for (count, kind), which in by_count.items())


def named(which: list[int], count: int = 0) -> str:
    """Processes with their hosts, as far as these are known."""
    return cluster.on_hosts(which, [member.host for member in members], count)


_MOST_ROWS = 8
_Row = tuple[list[str], list[int], str, str]  # hosts, processes, devices a process, kind


def table() -> str:
    """Who makes the run, a row a host: its processes, their devices. Where there are many, hosts one after the other
    that are alike share a row. "" for a single process. Starts the backend."""
    import jax

    from hybrid_jax.report import aligned

    if not members:
        return ""
    devices: dict[int, list[Any]] = {}
    for device in jax.devices():
        devices.setdefault(device.process_index, []).append(device)
    hosts: dict[str, list[int]] = {}
    for index, member in enumerate(members):
        hosts.setdefault(member.host, []).append(index)
    rows: list[_Row] = []
    for host, which in hosts.items():
        counts = sorted({len(devices.get(i, [])) for i in which})
        kinds = sorted({device.device_kind for i in which for device in devices.get(i, [])})
        row = ([host], which, "-".join(map(str, dict.fromkeys((counts[0], counts[-1])))), ", ".join(kinds))
        if len(hosts) > _MOST_ROWS and rows and rows[-1][2:] == row[2:] and _alike(rows[-1], row):
            rows[-1] = (rows[-1][0] + [host], rows[-1][1] + which, *row[2:])
        else:
            rows.append(row)
    lines = [("host", "processes", "devices a process", "devices", "kind")]
    for names, which, each, kind in rows:
        host = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} hosts)"
        total = sum(len(devices.get(i, [])) for i in which)
        lines.append((host, cluster.ranges(which), each, str(total), kind))
    return "\n".join(aligned(lines))


def _alike(row: _Row, other: _Row) -> bool:
    return len(row[1]) == len(row[0]) * len(other[1])


def is_main() -> bool:
    """Whether this process prints and writes metrics."""
    import jax

    return jax.process_index() == 0


def agree(said: str, doing: str, timeout_seconds: float = 600, setting: str = "") -> dict[int, str]:
    """What each process of the run said, by process, where it said anything; all of them must ask, in the same order.

    Needs no device, and never waits longer than `timeout_seconds`: then it raises MissingProcesses, a line that says
    what was being done (`doing`), which processes are missing, and which config key (`setting`) the limit is.
    """
    import jax

    if jax.process_count() == 1:
        return {0: said} if said else {}
    return _agree(_client(), jax.process_index(), jax.process_count(), said, doing, timeout_seconds, setting)


_calls = itertools.count()


def _agree(
    client: Any, index: int, count: int, said: str, doing: str, timeout_seconds: float, setting: str
) -> dict[int, str]:
    call = next(_calls)
    folder = f"hybrid_jax/agree/{call}/"
    client.key_value_set(f"{folder}{index}", "+" + said)
    try:
        client.wait_at_barrier(f"hybrid_jax/agree/{call}", max(1, round(1000 * timeout_seconds)))
    except Exception as error:  # jax's own kind of RuntimeError, by version
        here = {int(key.rpartition("/")[2]) for key, _ in client.key_value_dir_get(folder)}
        missing = sorted(set(range(count)) - here)
        if not missing:  # the last one came as the time ran out, or the service failed
            raise MissingProcesses(f"{doing}: the {count} processes did not meet: {_first_line(error)}") from error
        limit = f" ({setting})" if setting else ""
        late = "DEADLINE_EXCEEDED" in str(error)  # else the service knew before that they are gone
        what = f"did not arrive within {timeout_seconds:g} s{limit}" if late else "ended"
        raise MissingProcesses(
            f"{doing}: {named(missing, count)} {what}; look at what {'it' if len(missing) == 1 else 'they'} printed "
            "last, and start all processes again"
        ) from error
    values = {int(key.rpartition("/")[2]): value[1:] for key, value in client.key_value_dir_get(folder)}
    if index == 0 and call:  # all have read the last call's, or they would not be here
        client.key_value_delete(f"hybrid_jax/agree/{call - 1}/")
    return {process: value for process, value in sorted(values.items()) if value}


def everywhere(ok: bool, doing: str = "waiting for each other") -> bool:
    """Whether `ok` holds in every process of the run; all of them must ask. Raises MissingProcesses."""
    return not agree("" if ok else "no", doing)


_KINDS = 8  # of configs that are compared key by key
_SHOWN = 60  # characters of a value


def check_alike(values: Mapping[str, Any], doing: str, remedy: str) -> None:
    """Raises UserError, the same in every process, unless `values` (JSON-ready) are the same in all of them.

    The line names the first key that differs, and which processes have which value. All processes must ask; `doing` is
    what MissingProcesses says that they do.
    """
    import jax

    text = json.dumps(values)
    kinds: dict[str, list[int]] = {}
    for process, digest in agree(hashlib.sha256(text.encode()).hexdigest(), doing).items():
        kinds.setdefault(digest, []).append(process)
    if len(kinds) < 2:
        return
    first = [which[0] for which in kinds.values()][:_KINDS]
    said = agree(text if jax.process_index() in first else "", doing)
    raise UserError(
        _difference({process: json.loads(said[process]) for process in first}, list(kinds.values()), remedy)
    )


def _difference(said: Mapping[int, Mapping[str, Any]], kinds: list[list[int]], remedy: str) -> str:
    """said: by the first process of each kind. kinds: of all, the processes that are alike."""
    keys = dict.fromkeys(key for values in said.values() for key in values)
    key = next(key for key in keys if len({json.dumps(values.get(key)) for values in said.values()}) > 1)
    by_value: dict[str, list[int]] = {}
    for which in kinds:
        if which[0] in said:
            value = repr(said[which[0]].get(key))
            value = value if len(value) <= _SHOWN else value[: _SHOWN - 3] + "..."
            by_value.setdefault(value, []).extend(which)
    told = "; ".join(f"{value} in {named(sorted(which))}" for value, which in by_value.items())
    return f"{key}: {told}; {remedy}"
