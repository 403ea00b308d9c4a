"""Several processes as one run: a thin, checked layer over jax.distributed.

Process 0 prints and writes metrics; checkpoints are written by all processes together (they must see one
folder).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

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


def everywhere(ok: bool) -> bool:
    """Whether `ok` holds in every process of the run; all of them must ask. Devices must be up."""
    import jax

    if jax.process_count() == 1:
        return ok
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.asarray(ok))))
