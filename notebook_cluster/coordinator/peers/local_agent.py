"""The agent of the notebook's own machine, which a cluster starts for itself."""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec

from notebook_cluster.protocol.views import RequestError


class PrivateAgent(msgspec.Struct):
    """What an agent that was started for this cluster says when it is ready."""

    name: str
    public_key: str
    port: int
    pid: int


async def start_private_agent(
    name: str, directory: Path, lease: float
) -> tuple[PrivateAgent, asyncio.subprocess.Process]:
    """Start an agent for this machine. It survives a crash of the coordinator and ends with the cluster.

    Raises:
        RequestError: it ended before it was ready; names its log.
    """
    command = [sys.executable, "-m", "notebook_cluster.agent", "--private", "--name", name]
    command += ["--cluster-dir", str(directory), "--lease", str(lease)]
    log_path = directory / "agent.log"
    with open(log_path, "ab") as errors:  # noqa: ASYNC230 - a local file, opened once
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
    except asyncio.CancelledError:
        # The cluster ends already: nobody would tell this agent.
        process.terminate()
        raise
    try:
        return msgspec.json.decode(line, type=PrivateAgent), process
    except msgspec.DecodeError:
        raise RequestError(f"the agent of this machine did not start: see {log_path}") from None
