"""Memory that was freed stays with the process, for the next large block."""

import functools

_LARGEST = (32 << 20) - (64 << 10)
"""Bytes, with what the allocator adds at most 32 MiB."""


@functools.cache
def keep_freed() -> None:
    """Have glibc keep blocks of up to 32 MiB that are freed, 64 MiB at most, as it does in any process that has freed
    one so large (mallopt(3), on the dynamic threshold of M_MMAP_THRESHOLD). Before that, what libzmq receives comes in
    new pages each time, which cost as much as two copies. Elsewhere this does nothing."""
    import numpy

    numpy.empty(_LARGEST, numpy.uint8)
