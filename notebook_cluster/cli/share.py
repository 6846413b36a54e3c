"""``notebook-cluster share``: offer this machine until Ctrl-C."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_cluster.agent import (
    DEFAULT_CODE_MINUTES,
    DEFAULT_LEASE_S,
    AgentReady,
    AgentSettings,
    Limits,
    SharingEvent,
    SharingFile,
    run_agent,
)
from notebook_cluster.agent.machine import host_addresses
from notebook_cluster.agent.running import log_to_file, log_to_terminal
from notebook_cluster.cli.arguments import UsageError
from notebook_cluster.cli.console import is_terminal
from notebook_cluster.cli.terminal import Terminal
from notebook_cluster.cli.values import read_code
from notebook_cluster.security import agent_directory, in_words, private_directory

if TYPE_CHECKING:
    from notebook_cluster.discovery import FoundCluster


def share(options: argparse.Namespace) -> int:
    """Run a shared agent in this process; returns when it was stopped."""
    if options.launch_key is not None:
        from notebook_cluster.cli.launched import share_launched

        return share_launched(options)
    interactive = is_terminal()
    _check_together(options, interactive)
    options.code = read_code(options)
    directory = options.data_dir.expanduser().resolve() if options.data_dir else agent_directory(options.name)
    settings = _settings(options, private_directory(directory))
    chosen: tuple[FoundCluster, str] | None = None
    if options.join:
        from notebook_cluster.cli.picker import choose

        chosen = choose()
    try:
        return _share(options, settings, interactive, chosen)
    except OSError as error:
        raise in_words(error, Path(error.filename or settings.directory)) from None


def _share(
    options: argparse.Namespace, settings: AgentSettings, interactive: bool, chosen: "tuple[FoundCluster, str] | None"
) -> int:
    if interactive:
        # The person reads the events; between them a log would only be in the way of what is typed.
        log_to_file(settings.directory / "agent.log")
    else:
        log_to_terminal()
    terminal = Terminal(settings, interactive=interactive, picture=not options.no_qr, join=chosen)
    file = SharingFile()

    def ready(said: AgentReady) -> None:
        terminal.ready(said)
        file.ready(said)

    def happened(event: SharingEvent) -> None:
        terminal.happened(event)
        file.happened(event, host_addresses()[0])

    try:
        reason = run_agent(settings, ready, happened, terminal.beside)
    finally:
        file.close()
    print(f"not shared any more: {reason}", flush=True)
    return 0


def _check_together(options: argparse.Namespace, interactive: bool) -> None:
    """UsageError for options that do not go together, or that need a person at a terminal."""
    code = options.code or options.code_file
    if options.no_code and code and not options.dial:
        raise UsageError("--no-code and --code exclude each other: leave one of them out")
    if options.code_minutes and (not code or options.dial):
        raise UsageError("--code-minutes is how long this machine's own --code is accepted: give that code as well")
    if options.place or options.start:
        raise UsageError("--place and --start go with --launch-key: engines give them")
    if options.dial and "," in options.dial:
        raise UsageError(f"--dial {options.dial}: give one HOST:PORT; several go with --launch-key")
    if options.join and options.dial:
        raise UsageError("--join and --dial exclude each other: --join lets you choose, --dial goes to an address")
    if options.join and not interactive:
        raise UsageError("--join needs a terminal to choose at: use --dial HOST:PORT --code CODE without one")
    if options.confirm and not interactive:
        raise UsageError("--confirm needs a terminal at which a person answers: leave it out, or share from a terminal")


def _settings(options: argparse.Namespace, directory: Path) -> AgentSettings:
    limits = Limits(
        max_nodes=options.max_nodes,
        devices=options.devices,
        memory_bytes=options.memory,
        files_bytes=options.files,
        idle_only=options.idle_only,
        on_power=options.on_power,
        confirm=options.confirm,
        until=options.until,
        owners=options.owners,
    )
    return AgentSettings(
        name=options.name,
        directory=directory,
        port=options.port,
        lease=options.lease or DEFAULT_LEASE_S,
        code=options.code,
        code_minutes=options.code_minutes or DEFAULT_CODE_MINUTES,
        pairing=not options.no_code,
        dial=options.dial or "",
        limits=limits,
    )
