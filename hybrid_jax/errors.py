"""The one exception whose message is meant for the person at the keyboard."""


class UserError(Exception):
    """A mistake the user can mend: one line that says what, where and what to do.

    `launch.py` and every `python -m hybrid_jax.<verb>` print it as `error: <message>` on stderr and exit with
    `exit_code`.
    """

    exit_code = 2

    lines: tuple[str, ...] = ()  # instead, where there are several mistakes: a line of each
