"""The product without one of its precautions: a simulation that does not see that sees nothing.

Each name is what is left out; ``python -m tests.simulation --without NAME`` plays until a seed has found it.
"""

import contextlib

from notebook_cluster.coordinator.peers import links
from notebook_cluster.link.listener import Listener
from notebook_cluster.link.session import Session
from notebook_cluster.protocol.rounds import Commit, Prepared
from notebook_cluster.rounds.member import events_effects as m
from notebook_cluster.training.background.job import Job
from tests.simulation.disk import DiskConnection
from tests.simulation.replaced import Patches


@contextlib.contextmanager
def left_out(name, world):
    """The product without ``name``; None: as it is."""
    if name is None:
        yield
        return
    patches = Patches()
    NAMES[name](patches, world)
    with patches.applied():
        yield


def _commit(patches, world):
    """A node applies a round as soon as it is PREPARED."""
    do = Job._do

    def without(job, effect):
        do(job, effect)
        if isinstance(effect, m.SendControl) and isinstance(effect.message, Prepared):
            prepared = effect.message
            commit = Commit(
                job=job.name, round=prepared.round, attempt=prepared.attempt, state_hash=prepared.state_hash,
                members=[job.runtime.name],
            )  # fmt: skip
            job.runtime.call_soon(lambda: job.apply_event(m.FromLeader(commit)))

    patches.attribute(Job, "_do", without)


def _sync(patches, world):
    """Nothing of the journal is synced before it is told."""
    execute = DiskConnection.execute

    def without(connection, statement, values=()):
        return execute(connection, statement.replace("synchronous=FULL", "synchronous=NORMAL"), values)

    patches.attribute(DiskConnection, "execute", without)


def _momentum(patches, world):
    """The hash of a state leaves its momentum out."""
    from notebook_cluster.rounds.numerics import outer

    add = outer.StateHash.add
    patches.attribute(outer.StateHash, "add", lambda both, theta, momentum: add(both, theta, momentum[:0]))


def _epoch(patches, world):
    """An agent obeys whichever coordinator spoke last."""
    objection = Listener._objection

    def without(listener, hello, session, key):
        reason = objection(listener, hello, session, key)
        return None if reason is not None and reason.startswith("start ") else reason

    patches.attribute(Listener, "_objection", without)
    patches.attribute(Session, "is_older", lambda session, hello: False)


def _acknowledge(patches, world):
    """A message counts as received before what follows from it is in the journal."""
    dialler = links.Dialer

    def without(*arguments, **options):
        return dialler(*arguments, **(options | {"gate": lambda call: call()}))

    patches.attribute(links, "Dialer", without)


NAMES = {
    "commit": _commit, "sync": _sync, "momentum": _momentum, "epoch": _epoch, "acknowledge": _acknowledge,
}  # fmt: skip
