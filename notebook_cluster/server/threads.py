"""What blocks runs here, and not on the server's own pool: a coordinator that never answers must not use up the threads
that serve notebooks."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Value = TypeVar("Value")
_looks = ThreadPoolExecutor(max_workers=4, thread_name_prefix="notebook-cluster")
_actions = ThreadPoolExecutor(max_workers=8, thread_name_prefix="notebook-cluster-action")


async def look(call: Callable[[], Value]) -> Value:
    """``call()`` in a thread for what takes milliseconds."""
    return await asyncio.get_running_loop().run_in_executor(_looks, call)


async def act(call: Callable[[], Value]) -> Value:
    """``call()`` in a thread for what may take a minute."""
    return await asyncio.get_running_loop().run_in_executor(_actions, call)
