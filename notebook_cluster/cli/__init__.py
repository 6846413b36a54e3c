"""The command ``notebook-cluster``: share this machine, see what is there, steer a cluster from a terminal.

May import: ``client``, ``agent``, ``doctor``, ``peering``, ``pairing``, ``discovery``, ``security``, ``protocol``,
``widgets`` (the plain-text renderer), ``magics`` (texts of a terminal, Stop). Called by: people, and by anything that
can start a command (ssh, systemd, srun).

- :mod:`.arguments`: what may be typed; :mod:`.values`: how each value is read, and where a code comes from
- :mod:`.share`: offer this machine; :mod:`.terminal`, :mod:`.console`, :mod:`.picker`: what its person sees and types
- :mod:`.launched`: the same for an engine that starts it on its hosts
- :mod:`.trust`: ``pair`` and ``trust``, trust a peer, see who is trusted, take trust back
- :mod:`.clusters`: ``peers``, ``status``, ``report``, ``replay``, ``export``, ``runs``, ``stop``, ``detach``, ``skip``
- :mod:`.doctor`: ``doctor``; :mod:`.bench`: ``bench``
- :mod:`.run`: ``run``, a script on every node; :mod:`.run_arguments`, :mod:`.run_files`, :mod:`.run_output`: what is
  typed, what goes to the nodes, and what is shown of theirs

Exit codes: 0 done, 1 it did not work (one line says why), 2 what was typed is not known.
"""

import os
import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run one command with ``arguments`` (default: those of the process) and return its exit code."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str] | None) -> int:
    # Loaded here, so that Ctrl-C meanwhile is no traceback.
    from notebook_cluster.cli.arguments import UsageError, parse
    from notebook_cluster.magics import why_not_here

    try:
        options = parse(arguments)
        if problem := why_not_here():
            raise RuntimeError(problem)
        # What a command needs is loaded when it runs: --version and --help answer at once.
        run = options.load()
        code: int = run(options)
        print(end="", flush=True)
    except BrokenPipeError:
        # Whoever should read has gone, as head does when it has enough. Python tries again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UsageError as error:
        print(f"notebook-cluster: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError, RuntimeError) as error:
        from notebook_cluster.security import in_words

        print(f"notebook-cluster: {in_words(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 1
    return code
