"""Ctrl-C, SIGTERM and SIGUSR1: what they end at once, what they ask for, and the exit codes."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_jax import signals

ROOT = Path(__file__).parents[1]

_HOLD = """
import sys, time
from hybrid_jax import signals
with signals.StopRequest().listen() as stop:
    print("ready", flush=True)
    while not stop.signal: time.sleep(0.01)
    print("stopping", flush=True)
    time.sleep(60 if "wait" in sys.argv else 0)
sys.exit(signals.exit_code(stop.signal, 75))
"""


@pytest.mark.parametrize(
    ("sent", "code"),
    [((signal.SIGINT,), 130), ((signal.SIGTERM,), 75), ((signal.SIGUSR1,), 75), ((signal.SIGINT,) * 2, 130)],
)
def test_first_signal_asks_and_second_ctrl_c_aborts(sent, code):
    arguments = [sys.executable, "-c", _HOLD] + ["wait"] * (len(sent) > 1)
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(sent[0])
        assert process.stdout.readline() == "stopping\n"
        for number in sent[1:]:
            process.send_signal(number)
        assert process.wait(20) == code
        said = process.stderr.read()
    assert ("aborted" in said) == (len(sent) > 1)
    assert "stopping after this step" in said


def test_a_ctrl_c_that_comes_twice_at_once_is_one():
    """As where a scheduler signals a process and the parent that passes it on."""
    code = _HOLD.replace("with signals", "signals.StopRequest.together_seconds = 0.5\nwith signals")
    with subprocess.Popen(
        [sys.executable, "-c", code, "wait"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.7)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130 and "aborted" in process.stderr.read()


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_signal_is_noted_and_the_old_handlers_come_back(number, capfd):
    before = [signal.getsignal(n) for n in signals.SIGNALS]
    with signals.StopRequest() as stop:
        assert [signal.getsignal(n) for n in signals.SIGNALS] == before  # not before it listens
        stop.listen()
        os.kill(os.getpid(), number)
        assert stop.signal == number
        os.kill(os.getpid(), signal.SIGTERM)  # said once more: the first counts
        assert stop.signal == number
    assert [signal.getsignal(n) for n in signals.SIGNALS] == before
    assert capfd.readouterr().err.count("stopping after this step") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 99), (signal.SIGUSR1, 99), (signal.SIGINT, None)])
def test_after_the_last_step_a_signal_ends_what_is_being_done(number, code):
    with signals.StopRequest(99) as stop, pytest.raises(SystemExit if code else KeyboardInterrupt) as ended:
        stop.listen().no_more_steps()
        os.kill(os.getpid(), number)
    assert code is None or ended.value.code == code
    with signals.StopRequest(99) as stop:
        stop.listen()
        os.kill(os.getpid(), number)  # it came during the last step
        with pytest.raises(SystemExit if code else KeyboardInterrupt):
            stop.no_more_steps()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 99), (signal.SIGINT, None)])
def test_what_python_drops_is_raised_again(number, code, capfd):
    """A handler runs between any two instructions: here of a callback of the garbage collector."""
    sent = []

    def callback(phase, details):
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    gc.callbacks.append(callback)
    try:
        with signals.StopRequest(99) as stop, pytest.raises(SystemExit if code else KeyboardInterrupt) as ended:
            stop.listen().no_more_steps()
            gc.collect()
            time.sleep(10)
        time.sleep(0.2)  # no signal is left over, which would end this process now
    finally:
        gc.callbacks.remove(callback)
    assert sent and (code is None or ended.value.code == code)
    said = capfd.readouterr().err
    assert "Traceback" not in said and said.count("stopping when") == 1 and "aborted" not in said


def test_exit_codes():
    assert [signals.exit_code(n, 75) for n in signals.SIGNALS] == [130, 75, 75]


# A jax whose import never ends, and turns what interrupts it into something else, as imports of extensions do.
_JAX = """
import time
print("importing", flush=True)
while True:
    try:
        time.sleep(30)
    except BaseException:
        pass
"""


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        (["launch.py", "--config=configs/tiny_hybrid.py", "--platform=cpu"], signal.SIGINT, 130),
        (["launch.py", "--config=configs/tiny_hybrid.py", "--platform=cpu"], signal.SIGTERM, 75),
        (["launch.py", "--config=configs/tiny_hybrid.py", "--config.train.requeue_exit_code=99"], signal.SIGUSR1, 99),
        (["-m", "hybrid_jax.kernels.aot"], signal.SIGINT, 130),
    ],
)
def test_a_signal_before_anything_began_is_one_line(command, number, code, tmp_path):
    (tmp_path / "jax.py").write_text(_JAX)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "importing\n"
        time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(10) == code
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        assert process.stderr.read() == f"{name}: stopped; nothing is lost, and the same command starts again\n"
