"""``%cluster class``: a class comes in with one code; files are handed out to it, and files and values collected."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_cluster.magics.display.publishing import ProgressLine
from notebook_cluster.magics.errors import ClusterProblem, UsageError, shortened
from notebook_cluster.magics.execution.cells import run_cell
from notebook_cluster.magics.grammar import PULL
from notebook_cluster.magics.parsing import Invocation, resolve
from notebook_cluster.magics.session import NotebookSession
from notebook_cluster.magics.transfer_commands import pull
from notebook_cluster.memory import amount
from notebook_cluster.protocol.names import check_name, did_you_mean

if TYPE_CHECKING:
    from notebook_cluster.client import HandedIn

COLLECTED = "collected"
"""The folder beside the notebook into which files are collected, in a folder for each node."""
_MOST_NAMES = 6
_MINUTES = 60.0


def class_command(session: NotebookSession, call: Invocation) -> None:
    """Do what the first word says.

    Raises:
        UsageError: it is none of ours, or words and options do not fit it.
        ClusterError, ClusterProblem: it cannot be done.
    """
    word, *rest = call.arguments
    if word not in _ACTIONS:
        raise UsageError(
            f"%cluster class has no {word!r}{did_you_mean(word, _ACTIONS)}. There are: {', '.join(_ACTIONS)}"
        )
    action, what, options = _ACTIONS[word]
    for option in call.options:
        if option not in options:
            raise UsageError(f"%cluster class {word} takes no --{option}")
    needed = bool(what) and not what.startswith("[")
    if len(rest) > bool(what) or (needed and not rest):
        raise UsageError(f"write %cluster class {word} {what}".rstrip())
    action(session, call, rest[0] if rest else "")


def _start(session: NotebookSession, call: Invocation, name: str) -> None:
    from notebook_cluster.client import Cluster, how_to_join
    from notebook_cluster.widgets import show_panel

    try:
        name = check_name(name, "cluster") if name else ""
    except ValueError as error:
        raise UsageError(str(error)) from None
    there = session.cluster if session.cluster is not None and session.cluster.connected else None
    name = name or (there.name if there is not None else session.default_name)
    cluster = Cluster.start(name, local=call.options.get("local"), kind="magics", on_progress=_say)
    session.hold(cluster)
    invitation = cluster.invite(call.options.get("code", ""), call.options.get("minutes", _MINUTES))
    if session.headless:
        _say(how_to_join(invitation))
    show_panel(cluster, headless=session.headless, as_class=True)
    _say(
        f"class {name!r} is open for {invitation.minutes:g} minutes: machines come in by themselves, and those that "
        "share with its code are found"
    )
    added = cluster.add("all", code=invitation.code)
    if added:
        _say(f"in now: {shortened(added, _MOST_NAMES)}")


def _close(session: NotebookSession, call: Invocation, nothing: str) -> None:
    session.require().close_invitation()
    _say("nobody new comes in with the code; who is in stays (%cluster stop ends it for all)")


def _hand_out(session: NotebookSession, call: Invocation, path: str) -> None:
    from notebook_cluster.client import MOST_REPLAYED, find_sources
    from notebook_cluster.values.handed_out import put_source

    cluster = session.require()
    sources = find_sources(path)
    if sources.size > MOST_REPLAYED:
        raise UsageError(
            f"{path} has {amount(sources.size)}: at most {amount(MOST_REPLAYED)} are handed out, because who comes "
            f"later gets it too. %cluster send {path} puts it where there are machines now"
        )
    if not sources.files:
        raise UsageError(f"there is no file in {path}")
    files = {source.path: source.file.read_bytes() for source in sources.files}
    targets = resolve(call.options["to"], cluster.state().nodes) if "to" in call.options else ()
    run_cell(cluster, session.shell, f"# %cluster class hand-out {path}\n{put_source(files)}", targets)


def _collect(session: NotebookSession, call: Invocation, what: str) -> None:
    cluster = session.require()
    if what.isidentifier():
        if "into" in call.options:
            raise UsageError(f"{what} is taken for a variable, and comes as {{node: value}}; --into goes with ./{what}")
        words = {"from": call.options["to"]} if "to" in call.options else {}
        pull(session, cluster, Invocation(PULL, (what,), words))
        return
    pattern = what.removeprefix("./").rstrip("/")
    into = Path(call.options.get("into", COLLECTED)).expanduser()
    # Without --to also those whose kernel is dead.
    targets = resolve(call.options["to"], cluster.state().nodes) if "to" in call.options else ()
    with ProgressLine(session.shell, f"collecting {pattern}") as progress:
        places = cluster.collect_files(pattern, into, targets, on_progress=progress)
    for line in _told(pattern, into, places):
        _say(line)
    if not any(place.files for place in places):
        reason = next((place.error for place in places if place.error), "only the notebook's own folder is here")
        raise ClusterProblem(f"{pattern} came from nobody: {reason}")


def _told(pattern: str, into: Path, places: "Sequence[HandedIn]") -> list[str]:
    came = [place for place in places if place.files]
    files, size = sum(len(place.files) for place in came), sum(place.size for place in came)
    names = shortened([place.nodes[0] for place in came], _MOST_NAMES)
    what = f"{files} file{'' if files == 1 else 's'}, {amount(size)}"
    lines = [f"collected {pattern} from {len(came)} ({what}) into {into}/NODE/: {names}"] if came else []
    lines += [f"not from {place.nodes[0]}: {place.error}" for place in places if place.error]
    kept = [path for place in places for path in place.kept]
    if kept:
        lines.append(f"what was there before and differs stays beside it: {shortened([str(path) for path in kept], 3)}")
    return lines


def _say(text: str) -> None:
    print(text, flush=True)


_ACTIONS: dict[str, tuple[Callable[[NotebookSession, Invocation, str], None], str, tuple[str, ...]]] = {
    "start": (_start, "[NAME]", ("code", "minutes", "local")),
    "hand-out": (_hand_out, "FILE|DIR", ("to",)),
    "collect": (_collect, "FILE|DIR|VARIABLE", ("to", "into")),
    "close": (_close, "", ()),
}
"""Word -> what it does, what follows it, and its options."""
