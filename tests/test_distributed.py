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


class _Client:
    """The part of jax's client that is used; what other processes would do is in `others`."""

    def __init__(self, others):
        self.values, self.others = {}, others

    def key_value_set(self, key, value):
        self.values[key] = value

    def wait_at_barrier(self, name, milliseconds):
        for index, said in self.others.items():
            self.values[f"{name}/{index}"] = "+" + said
        if len(self.key_value_dir_get(name + "/")) < 4:
            raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out.\nmore lines")

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_delete(self, folder):
        for key, _ in self.key_value_dir_get(folder):
            del self.values[key]


def _agree(client, said=""):
    return distributed._agree(client, 0, 4, said, "checkpoint 7", 2.5, "config.checkpoint.timeout_seconds")


def test_what_processes_say_is_known_to_all():
    client = _Client({1: "", 2: "disk full", 3: ""})
    assert _agree(client) == {2: "disk full"}
    assert _agree(client, "mine") == {0: "mine", 2: "disk full"}
    assert len(client.values) == 4  # of the last call alone
    assert distributed.agree("alone", "x") == {0: "alone"} and distributed.agree("", "x") == {}
    assert distributed.everywhere(True) and not distributed.everywhere(False)


@pytest.mark.parametrize(("others", "missing"), [({1: "", 3: ""}, "process 2 of 4"), ({2: "a"}, "processes 1, 3 of 4")])
def test_processes_that_do_not_come_are_named(others, missing):
    with pytest.raises(distributed.MissingProcesses) as caught:
        _agree(_Client(others))
    said = f"checkpoint 7: {missing} did not arrive within 2.5 s (config.checkpoint.timeout_seconds); look at what"
    assert str(caught.value).startswith(said) and caught.value.abandon


def test_a_service_that_fails_is_one_line():
    class Broken(_Client):
        def wait_at_barrier(self, name, milliseconds):
            super().wait_at_barrier(name, milliseconds)
            raise RuntimeError("UNAVAILABLE: gone\nmore lines")

    with pytest.raises(UserError, match=r"the 4 processes did not meet: UNAVAILABLE: gone$"):
        _agree(Broken({1: "", 2: "", 3: ""}))
