"""What commands share: a parser whose complaints are errors of one line, the package's log, output nobody reads on."""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator

from hybrid_jax.errors import UserError


class Parser(argparse.ArgumentParser):
    """Raises UserError for a command line that it cannot read."""

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


def close_quietly() -> None:
    """After a BrokenPipeError: what is still in stdout's buffer goes nowhere, instead of failing at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
