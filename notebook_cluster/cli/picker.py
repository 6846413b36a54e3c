"""Choosing a cluster of this network at the terminal, as one chooses a device in a list that is close by."""

import time

from notebook_cluster.discovery import ClusterBrowser, FoundCluster

_LOOK_S = 4.0
_SETTLE_S = 0.7
"""After the first cluster was heard: the others answer at the same time."""
_AGAIN = "again"
_NONE = "none"


def choose() -> tuple[FoundCluster, str] | None:
    """The cluster that the person picks and its code, or None for none. KeyboardInterrupt for Ctrl-C."""
    browser = ClusterBrowser()
    browser.start()
    try:
        cluster = _pick(browser)
    finally:
        browser.close()
    if cluster is None:
        return None
    return cluster, ask_code(cluster)


def title(cluster: FoundCluster) -> str:
    """How a cluster is listed."""
    return f"{cluster.name}, of {cluster.owner or 'somebody'}, at {cluster.hosts[0]}"


def _pick(browser: ClusterBrowser) -> FoundCluster | None:
    import questionary

    while True:
        print("Looking for clusters on this network ...", flush=True)
        _listen(browser)
        found = {f"{index}": cluster for index, cluster in enumerate(sorted_clusters(browser))}
        shut = "no code is open: its owner types %cluster invite"
        choices = [
            questionary.Choice(title(cluster), value=index, disabled=None if cluster.pairing_port else shut)
            for index, cluster in found.items()
        ]
        choices += [questionary.Choice("look again", value=_AGAIN), questionary.Choice("join none", value=_NONE)]
        question = "Join which cluster?" if found else f"No cluster invites machines here{_why(browser)}."
        answer = questionary.select(question, choices).unsafe_ask()
        if answer != _AGAIN:
            return found.get(answer)


def sorted_clusters(browser: ClusterBrowser) -> list[FoundCluster]:
    """Those that were heard, in an order that stays."""
    return sorted(browser.clusters().values(), key=lambda cluster: (cluster.name, cluster.instance))


def ask_code(cluster: FoundCluster) -> str:
    """The code of ``cluster`` as it is typed, in its usual form."""
    import questionary

    from notebook_cluster.security import read_code

    def problem(text: str) -> str | bool:
        try:
            read_code(text)
        except ValueError as error:
            return str(error)
        return True

    question = f"Code of {cluster.name} (its owner sees it in the notebook):"
    return read_code(questionary.text(question, validate=problem).unsafe_ask())


def _listen(browser: ClusterBrowser) -> None:
    end = time.monotonic() + _LOOK_S
    while time.monotonic() < end:
        time.sleep(0.1)
        if browser.clusters():
            end = min(end, time.monotonic() + _SETTLE_S)
            break
    time.sleep(max(0.0, end - time.monotonic()))


def _why(browser: ClusterBrowser) -> str:
    return f" ({browser.problem})" if browser.problem else ""
