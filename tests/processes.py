"""What tests with several processes of one run share."""

import socket


def free_port() -> int:
    """Of this machine, for a coordinator."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
