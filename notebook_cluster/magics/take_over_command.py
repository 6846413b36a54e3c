"""``%cluster hand-over``: the cluster is led from elsewhere while it runs. ``%cluster take-over``: a new cluster in the
place of one whose coordinator is gone."""

import time

from notebook_cluster.magics.parsing import Invocation
from notebook_cluster.magics.session import NotebookSession


def take_over(session: NotebookSession, call: Invocation) -> None:
    from notebook_cluster.client import Cluster
    from notebook_cluster.widgets import show_panel

    name = call.argument or session.default_name
    if session.cluster is not None and not session.cluster.connected:
        session.let_go()
    began = time.monotonic()
    cluster = Cluster.take_over(
        name,
        local=call.options.get("local", 1),
        peers=call.options.get("peers", ("all",)),
        nodes=call.options.get("nodes", 0),
        kind="magics",
        on_progress=_say,
    )
    session.hold(cluster)
    nodes = [node.name for node in cluster.state().nodes]
    _say(f"cluster {name!r} is ready in {time.monotonic() - began:.1f} s: {len(nodes)} nodes ({', '.join(nodes)})")
    if not call.options.get("no_panel"):
        show_panel(cluster, headless=session.headless)


def hand_over(session: NotebookSession, call: Invocation) -> None:
    cluster = session.require()
    if call.options.get("survive"):
        cluster.hand_over(call.argument, code=call.options.get("code", ""), survive=True)
        if call.argument == "local":
            _say(f"cluster {cluster.name!r} stays on this machine when it sleeps")
        else:
            _say(f"cluster {cluster.name!r} is handed over to {call.argument} when this machine is about to sleep")
        return
    began = time.monotonic()
    _say(
        f"handing cluster {cluster.name!r} over to {'this machine' if call.argument == 'local' else call.argument} ..."
    )
    led = cluster.hand_over(call.argument, code=call.options.get("code", ""))
    seconds = time.monotonic() - began
    if led:
        _say(f"cluster {cluster.name!r} is led from {led} now ({seconds:.1f} s): it goes on without this machine")
    else:
        _say(f"cluster {cluster.name!r} is led from this machine now ({seconds:.1f} s)")


def _say(text: str) -> None:
    print(text, flush=True)
