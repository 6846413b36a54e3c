"""TCP ports for what must be told its port before it binds it."""

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(neighbours: int = 0) -> int:
    """A port P of loopback that is free now, as are those up to P + ``neighbours``.

    It lies below those that the system gives to whoever asks for any port, so that nobody gets it meanwhile.
    """
    first_given = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    numbers = random.SystemRandom()
    while True:
        port = numbers.randrange(max(1_024, first_given // 2), first_given - neighbours)
        if all(_is_free(port + number) for number in range(neighbours + 1)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
