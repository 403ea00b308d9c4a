"""Settings of several processes: which combinations are taken, and what a wrong one says."""

import pytest

from hybrid_jax import distributed
from hybrid_jax.errors import UserError

ALL = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


def test_nothing_asked_for_is_one_process():
    assert distributed.settings(environment={}) is None
    assert distributed.settings(environment=dict.fromkeys(ALL, " ")) is None


def test_environment_and_arguments():
    assert distributed.settings(environment=ALL) == ("127.0.0.1:1234", 4, 3)
    assert distributed.settings("host:9", 2, 0, environment=ALL) == ("host:9", 2, 0)
    assert distributed.settings(process_id=0, environment=ALL) == ("127.0.0.1:1234", 4, 0)


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (
            ("host:9", 0, -1),
            {},
            r"--coordinator_address given without --num_processes .*JAX_NUM_PROCESSES.* and --process_id",
        ),
        (("", 2, 0), {}, r"--num_processes, --process_id given without --coordinator_address"),
        (("", 0, -1), {"JAX_PROCESS_ID": "0"}, r"JAX_PROCESS_ID given without"),
        (("", 0, -1), {**ALL, "JAX_NUM_PROCESSES": "two"}, r"JAX_NUM_PROCESSES: 'two' is not a whole number"),
        (("", 0, -1), {**ALL, "JAX_PROCESS_ID": "4"}, r"JAX_PROCESS_ID: must be from 0 to 3"),
        (("host:9", -2, 0), {}, r"--num_processes: must be at least 1"),
        (("host", 2, 0), {}, r"--coordinator_address: 'host' is not HOST:PORT"),
        (("host:99999", 2, 0), {}, r"is not HOST:PORT"),
    ],
)
def test_wrong_combinations_are_one_line(arguments, environment, said):
    with pytest.raises(UserError, match=said) as caught:
        distributed.settings(*arguments, environment=environment)
    assert "\n" not in str(caught.value)


def test_one_process_does_not_start_a_service(monkeypatch):
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    assert distributed.initialize() is False
    assert distributed.initialize("127.0.0.1:1", 1, 0) is False
    assert distributed.is_main()
