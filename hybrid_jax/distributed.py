"""Several processes as one run: a thin, checked layer over jax.distributed.

Process 0 prints and writes metrics; checkpoints are written by all processes together (they must see one
folder).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

from hybrid_jax.errors import UserError

ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
FLAGS = ("--coordinator_address", "--num_processes", "--process_id")


def _integer(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}: {text!r} is not a whole number") from None


def settings(
    coordinator_address: str = "",
    num_processes: int = 0,
    process_id: int = -1,
    environment: Mapping[str, str] | None = None,
) -> tuple[str, int, int] | None:
    """The checked (address, processes, id), from the arguments ("" / 0 / -1 = not given) or else the
    environment.

    None when nothing asks for several processes. Raises UserError when only a part is given or a value is
    impossible.
    """
    env = os.environ if environment is None else environment
    given = {0: coordinator_address, 1: "" if num_processes == 0 else str(num_processes)}
    given[2] = "" if process_id == -1 else str(process_id)
    names = {i: FLAGS[i] if given[i] else ENVIRONMENT[i] for i in range(3)}
    values = {i: given[i] or env.get(ENVIRONMENT[i], "").strip() for i in range(3)}
    if not any(values.values()):
        return None
    missing = [f"{FLAGS[i]} (or {ENVIRONMENT[i]})" for i in range(3) if not values[i]]
    if missing:
        present = ", ".join(names[i] for i in range(3) if values[i])
        raise UserError(f"{present} given without {' and '.join(missing)}: several processes need all three")
    count, index = _integer(values[1], names[1]), _integer(values[2], names[2])
    if count < 1:
        raise UserError(f"{names[1]}: must be at least 1, not {count}")
    if not 0 <= index < count:
        raise UserError(f"{names[2]}: must be from 0 to {count - 1} ({count} processes), not {index}")
    host, _, port = values[0].rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"{names[0]}: {values[0]!r} is not HOST:PORT, for example 127.0.0.1:12321")
    return values[0], count, index


def initialize(
    coordinator_address: str = "", num_processes: int = 0, process_id: int = -1, timeout_seconds: int = 300
) -> bool:
    """Joins the other processes of the run; True if there are any. Call before the first use of a device.

    Does nothing when nothing asks for it, or when the process has joined already. Raises UserError on a wrong
    combination of settings and when the others do not answer within `timeout_seconds`.
    """
    import jax

    if jax.distributed.is_initialized():
        return jax.process_count() > 1
    found = settings(coordinator_address, num_processes, process_id)
    if found is None or found[1] == 1:
        return False
    address, count, index = found
    try:
        jax.distributed.initialize(address, count, index, initialization_timeout=timeout_seconds)
    except Exception as error:  # jax raises RuntimeError or XlaRuntimeError, by version
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"process {index} of {count} could not join {address}: {reason}") from error
    return True


def is_main() -> bool:
    """Whether this process prints and writes metrics."""
    import jax

    return jax.process_index() == 0


class MissingProcesses(UserError):
    """Some processes of the run did not arrive: nothing more can be done together with them."""

    abandon = True


def agree(said: str, doing: str, timeout_seconds: float = 600, setting: str = "") -> dict[int, str]:
    """What each process of the run said, by process, where it said anything; all of them must ask, in the same order.

    Needs no device, and never waits longer than `timeout_seconds`: then it raises MissingProcesses, a line that says
    what was being done (`doing`), which processes are missing, and which config key (`setting`) the limit is.
    """
    import jax

    if jax.process_count() == 1:
        return {0: said} if said else {}
    # jax has no public way to a barrier that ends, nor to the store of keys beside it.
    client = jax._src.distributed.global_state.client  # type: ignore[attr-defined]
    return _agree(client, jax.process_index(), jax.process_count(), said, doing, timeout_seconds, setting)


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
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise MissingProcesses(f"{doing}: the {count} processes did not meet: {reason}") from error
        which = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(map(str, missing))}"
        limit = f" ({setting})" if setting else ""
        raise MissingProcesses(
            f"{doing}: {which} of {count} did not arrive within {timeout_seconds:g} s{limit}; look at what "
            f"{'it' if len(missing) == 1 else 'they'} printed last, and start all processes again"
        ) from error
    values = {int(key.rpartition("/")[2]): value[1:] for key, value in client.key_value_dir_get(folder)}
    if index == 0 and call:  # all have read the last call's, or they would not be here
        client.key_value_delete(f"hybrid_jax/agree/{call - 1}/")
    return {process: value for process, value in sorted(values.items()) if value}


def everywhere(ok: bool, doing: str = "waiting for each other") -> bool:
    """Whether `ok` holds in every process of the run; all of them must ask. Raises MissingProcesses."""
    return not agree("" if ok else "no", doing)
