"""Ports for processes that find each other on this machine."""

import random
import socket

# Below 32,768: from there on Linux gives ports to connections, also while a process starts.
PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Return a port that nothing listens on, and that no connection is given meanwhile."""
    drawn = random.SystemRandom()  # two workers with one seed would take the same port
    while True:
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port := drawn.choice(PORTS)))
            except OSError:
                continue
            return port
