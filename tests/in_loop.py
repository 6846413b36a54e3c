"""Tests that are coroutines, and waiting in them."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

Arguments = ParamSpec("Arguments")

DEADLINE = 100.0
"""Seconds: far above what any of these tests needs, also on a busy machine."""


def in_loop(test: Callable[Arguments, Awaitable[None]]) -> Callable[Arguments, None]:
    """Run the test in an event loop of its own; it fails when it is not over in DEADLINE."""

    @functools.wraps(test)
    def played(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        async def until_deadline() -> None:
            async with asyncio.timeout(DEADLINE):
                await test(*arguments, **named)

        asyncio.run(until_deadline())

    return played


async def until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait until ``condition()`` holds."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"no {what} after {seconds} s"
        await asyncio.sleep(0.005)
