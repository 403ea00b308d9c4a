"""What `python -m hybrid_jax.<verb>` commands share: how they take their options, say what happens, and end."""

import argparse
import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from hybrid_jax.errors import UserError

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Its mistakes are UserErrors of one line. doc: the module's docstring, whose first line describes the command."""

    def __init__(self, verb: str, doc: str | None):
        super().__init__(f"python -m hybrid_jax.{verb}", description=(doc or "").split("\n", 1)[0])

    def error(self, message: str):
        raise UserError(" ".join(message.removeprefix("argument ").split()))


@contextlib.contextmanager
def logged(say: Callable[[str], None]) -> Iterator[None]:
    """Lets `say` tell what the package logs."""
    handler, logger = logging.Handler(logging.INFO), logging.getLogger("hybrid_jax")
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # else a root handler, as absl's, says it again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def within_memory(run: Callable[[], T], remedy: str) -> T:
    """What `run` gives. Raises UserError, with the remedy, where the devices run out of memory meanwhile."""
    import jax

    try:
        return run()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"the device's memory does not hold this: {remedy}") from None


def unprinted(error: OSError) -> int:
    """The exit code where standard output could not be written: 0 if its reader wants no more of it, as `head`, else
    2 after one line. Raises the error again if it is of another kind."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else what is in the buffer fails at exit
    if error.errno == errno.EPIPE:
        return 0
    print(f"error: standard output: {error.strerror}", file=sys.stderr)
    return 2


def main(run: Callable[[Sequence[str]], int], arguments: Sequence[str], stopped: str) -> int:
    """`run` with a UserError as one line on stderr and exit code 2. Ctrl-C and SIGTERM end it with 130 and the words
    `stopped`, after what it does to clear up. Output that its reader wants no more of, as `head`, ends it with 0."""
    try:
        old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not in the main thread
        old = None
    try:
        code = run(arguments)
        sys.stdout.flush()  # here, where what it cannot write is told in one line
        return code
    except UserError as error:
        for line in error.lines or [str(error)]:
            print("error: " + " ".join(line.split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nstopped: {stopped}", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is not None:
            raise
        return unprinted(error)
    finally:
        if old is not None:
            signal.signal(signal.SIGTERM, old)
