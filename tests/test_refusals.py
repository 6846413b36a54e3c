"""Who may not run code on a peer, tried with the keys that they really have. Each test prints the refusal it saw."""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from notebook_cluster.coordinator.view_server import ViewServer
from notebook_cluster.link import Listener
from notebook_cluster.link.inbound_listener import InboundListener
from notebook_cluster.mesh import Mesh
from notebook_cluster.pairing.guest import PairingError, PairingHost, pair
from notebook_cluster.protocol import PROTOCOL_VERSION, decode, encode
from notebook_cluster.protocol.node import NodeAddress, Roster
from notebook_cluster.protocol.pairing import Begin, Challenge, FromHost, Here, Prove
from notebook_cluster.security import Gate, Identity, OpenCode, load_identity, new_identity, same_user_keys
from notebook_cluster.security.codes import PAIRING_IDENTITY, GuestExchange
from notebook_cluster.sockets import IOThread
from tests.cluster import run, running_cluster
from tests.command import COMMAND, end_programs
from tests.conftest import Agents, wait_until
from tests.ports import free_port
from tests.raw_link import ACCEPTED, REFUSED, RawClient, RawLink, execute, try_to_execute
from tests.recording import Recorder, replay

ROOT = Path(__file__).parents[1]
CODE = "tiger-lamp-42"
GUESSER = new_identity().public_key
MINI = f"mini-{os.getpid()}"
"""Others on this network may share a machine called mini as well."""


# ---- CURVE servers without their ZAP handler -----------------------------------------------------------------


@dataclass
class Server:
    """A CURVE server that lets ``client`` in, as long as ``gate`` answers for it."""

    endpoint: str
    key: str
    client: Identity
    gate: Gate


@asynccontextmanager
async def listener(context: "zmq.Context[zmq.Socket[bytes]]", client: Identity) -> AsyncIterator[Server]:
    identity, gate = new_identity(), Gate(context)
    server = Listener(
        context, "tcp://127.0.0.1:0", identity, authorise={client.public_key: "teacher"}.get,
        on_session=lambda session: pytest.fail("a session began"), gate=gate,
    )  # fmt: skip
    yield Server(f"tcp://127.0.0.1:{server.start()}", identity.public_key, client, gate)
    await server.close(flush=0)
    gate.close()


@asynccontextmanager
async def reception(context: "zmq.Context[zmq.Socket[bytes]]", client: Identity) -> AsyncIterator[Server]:
    identity, gate = new_identity(), Gate(context)
    server = InboundListener(
        context, "tcp://127.0.0.1:0", identity, authorise={client.public_key: "mini"}.get,
        on_arrival=lambda key, address: pytest.fail("an agent arrived"), gate=gate,
    )  # fmt: skip
    yield Server(f"tcp://127.0.0.1:{server.start()}", identity.public_key, client, gate)
    server.close()
    gate.close()


@asynccontextmanager
async def pairing_host(context: "zmq.Context[zmq.Socket[bytes]]", client: Identity) -> AsyncIterator[Server]:
    gate = Gate(context)
    here = Here(
        protocol=PROTOCOL_VERSION, role="peer", name="mini", owner="ada@mini", key=new_identity().public_key, port=1
    )
    host = PairingHost(
        context, "tcp://127.0.0.1:0", gate=gate, here=lambda: here, on_paired=lambda partner: None,
        on_attempt=lambda line: None,
    )  # fmt: skip
    port = host.open(OpenCode(CODE, single_use=True, valid_s=None))
    yield Server(f"tcp://127.0.0.1:{port}", PAIRING_IDENTITY.public_key, client, gate)
    host.close()
    gate.close()


@asynccontextmanager
async def mesh(context: "zmq.Context[zmq.Socket[bytes]]", client: Identity) -> AsyncIterator[Server]:
    loop = IOThread("test-mesh")
    loop.start()
    server = Mesh(loop, "desk", 1, host="127.0.0.1")
    row = NodeAddress(
        name="mini", incarnation=1, rank=0, local_rank=0, peer="mini", machine="m", device="cpu", hosts=["127.0.0.1"],
        mesh_key=client.public_key, mesh_port=1, mesh_ipc="", master_port=0,
    )  # fmt: skip
    server.set_roster(Roster(cluster="class", generation=1, nodes=[row]))
    loop.call(lambda: None)
    yield Server(f"tcp://127.0.0.1:{server.port}", server.key, client, server._listening.gate)
    server.close()
    loop.close()


@asynccontextmanager
async def view_server(context: "zmq.Context[zmq.Socket[bytes]]", client: Identity) -> AsyncIterator[Server]:
    server = ViewServer(lambda view, body: pytest.fail("a request was read"), lambda view, clean: None)
    endpoint = server.start()
    yield Server(endpoint, server.socket.server.public_key, server.socket.view_identity, server.socket._keys)
    await server.close()


MakeServer = Callable[["zmq.Context[zmq.Socket[bytes]]", Identity], AbstractAsyncContextManager[Server]]
NO_HANDLER = "HANDSHAKE_FAILED_NO_DETAIL"
SERVERS: dict[str, list[MakeServer]] = {
    "link/authenticated_router.py": [listener, reception],
    "pairing/port.py": [pairing_host],
    "mesh/listening.py": [mesh],
    "coordinator/view_server.py": [view_server],
}
"""Every file that makes a CURVE server, and the servers that it makes."""


def test_every_curve_server_of_the_package_is_tried_below() -> None:
    package = ROOT / "notebook_cluster"
    sources = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    found = {name for name, text in sources.items() if re.search(r"^ +serve\(", text, re.M) and "Gate" in text}
    assert found == set(SERVERS)
    assert [name for name, text in sources.items() if "zmq.CURVE_SERVER" in text] == ["security/curve.py"]


def events_of(server: Server, seconds: float) -> Counter[str]:
    """What happens to a client that has the right key, until it is let in or refused, or ``seconds`` are over."""
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    with RawClient(server.endpoint, server.key, server.client) as client:
        while not {ACCEPTED, NO_HANDLER} & set(seen) and (event := client.event(max(deadline - time.monotonic(), 0))):
            seen[event] += 1
    return seen


@pytest.mark.parametrize("make", [make for row in SERVERS.values() for make in row], ids=lambda make: make.__name__)
def test_a_server_whose_zap_handler_is_gone_lets_nobody_in(make: MakeServer) -> None:
    async def scenario() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        async with make(context, new_identity()) as server:
            # So what is refused below is refused for the handler's absence.
            assert list(await asyncio.to_thread(events_of, server, 10)) == [ACCEPTED]
            server.gate.close()
            # Whoever comes while the handler's socket still closes waits in vain: 30 s for its handshake.
            seen = await asyncio.to_thread(events_of, server, 60)
            print(f"without a ZAP handler: {dict(seen)}")
            assert ACCEPTED not in seen
            assert seen[NO_HANDLER] >= 1
        context.destroy(linger=0)

    asyncio.run(scenario())


# ---- somebody tries to run code on a peer --------------------------------------------------------------------


@dataclass
class Peer:
    """``notebook-cluster share`` of somebody else: its folders are not ours, so there is no same-user trust."""

    port: int
    folder: Path
    environment: dict[str, str]
    process: "subprocess.Popen[bytes]"

    @property
    def key(self) -> str:
        return load_identity(self.folder / "data").public_key

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [COMMAND, *words], env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )


@contextlib.contextmanager
def shared_peer(root: Path, *options: str) -> Iterator[Peer]:
    folder = root / "theirs"
    environment = dict(os.environ)
    for variable in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "HOME"):
        (folder / variable.lower()).mkdir(mode=0o700, parents=True)
        environment[variable] = str(folder / variable.lower())
    port = free_port(neighbours=1)
    command = [COMMAND, "share", "--name", MINI, "--port", str(port), "--data-dir", str(folder / "data"), *options]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    peer = Peer(port, folder, environment, process)
    try:
        wait_until(lambda: _answers(port) or process.poll() is not None, 60, lambda: f"the peer: {peer.output()}")
        assert process.poll() is None, peer.output()
        yield peer
    finally:
        end_programs(process)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def pair_now(peer: Peer, owner: str) -> Identity:
    """Pair with the right code; the coordinator that the peer trusts from now on."""
    identity = new_identity()

    async def ask() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            await pair(
                context, f"127.0.0.1:{peer.port + 1}", CODE, identity_key=identity.public_key, role="cluster",
                name="class", owner=owner,
            )  # fmt: skip
        finally:
            context.destroy(linger=0)

    asyncio.run(ask())
    return identity


def paired(peer: Peer) -> Identity:
    """:func:`pair_now`, as soon as the peer's code is open."""
    wait_until(lambda: _answers(peer.port + 1), 60, lambda: f"the pairing port: {peer.output()}")
    return pair_now(peer, "ada@desk")


def touch(file: Path) -> str:
    return f"open({str(file)!r}, 'a').write('here\\n')"


def test_an_unpaired_client_is_refused_and_a_paired_one_is_not(
    jupyter_dirs: Path, no_processes_left: str, tmp_path: Path
) -> None:
    with shared_peer(jupyter_dirs, "--code", CODE) as peer:
        with RawLink(peer.endpoint, peer.key, new_identity()) as link:
            seen = try_to_execute(link, touch(tmp_path / "stranger"))
        print(f"an unpaired client: {seen}")
        assert seen == REFUSED
        teacher = paired(peer)
        with RawLink(peer.endpoint, peer.key, teacher) as link:
            assert try_to_execute(link, touch(tmp_path / "teacher")) == "executed"
        assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


def test_a_removed_coordinator_is_refused_and_its_open_connection_is_dead(
    jupyter_dirs: Path, no_processes_left: str, tmp_path: Path
) -> None:
    with shared_peer(jupyter_dirs, "--code", CODE) as peer:
        teacher = paired(peer)
        with RawLink(peer.endpoint, peer.key, teacher) as link:
            assert try_to_execute(link, "import os; " + touch(tmp_path / "before")) == "executed"
            done = peer.command("trust", "remove", "ada@desk", "--data-dir", str(peer.folder / "data"))
            assert done.returncode == 0, done.stderr
            # The connection that was open all the time, before libzmq makes a new one.
            seen = execute_on_open_connection(link, touch(tmp_path / "after"))
        print(f"its open connection: {seen}")
        assert "DISCONNECTED" in seen
        assert "executed" not in seen
        with RawLink(peer.endpoint, peer.key, teacher) as link:
            again = try_to_execute(link, touch(tmp_path / "again"))
        print(f"a new connection: {again}")
        assert again == REFUSED
        assert [path.name for path in tmp_path.iterdir()] == ["before"]


def execute_on_open_connection(link: RawLink, code: str) -> list[str]:
    """Tries to run ``code`` until the connection ends, at most 10 s; what was seen."""
    seen: list[str] = []
    deadline = time.monotonic() + 10
    time_of_removal_passed = False
    while time.monotonic() < deadline and "DISCONNECTED" not in seen:
        if event := link.event(0.1):
            seen.append(event)
        elif not time_of_removal_passed:
            time_of_removal_passed = time.monotonic() > deadline - 9
        elif (said := execute(link, code, timeout=0.2)) == "executed":
            seen.append(said)
    return seen


# ---- nodes ---------------------------------------------------------------------------------------------------

ATTACK = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from notebook_cluster.training import current_runtime
from notebook_cluster.protocol import encode, peer
from tests.raw_link import *
mesh = current_runtime()._mesh
own = mesh._identity
"""


def test_a_node_cannot_run_code_on_another_peer(agents: Agents, tmp_path: Path) -> None:
    """It dials the other agent's link with the only key it has, its mesh key."""
    agents(MINI, options=("--port", str(port := free_port(neighbours=1))))
    key = next(key for key, name in same_user_keys("agent").items() if name == MINI)
    with running_cluster("class", local=1, directory=str(tmp_path)) as cluster:
        cluster.add(MINI)
        said = run(
            cluster,
            ATTACK
            + f"""
with RawLink("tcp://127.0.0.1:{port}", {key!r}, own) as link:
    print(try_to_execute(link, {touch(tmp_path / "file")!r}))
""",
            ("local",),
        )
        print(f"a node at the link of another peer: {said['local']}")
        assert said["local"] == f"{REFUSED}\n"
        assert not (tmp_path / "file").exists()


def test_a_node_of_the_same_cluster_can_only_send_numbers(agents: Agents, tmp_path: Path) -> None:
    """The mesh lets it in, and drops everything that is not a frame of numbers."""
    agents(MINI)
    with running_cluster("class", local=1, directory=str(tmp_path)) as cluster:
        (node,) = cluster.add(MINI)
        said = run(
            cluster,
            ATTACK
            + f"""
before = mesh.dropped
print("dropped", before, flush=True)
nc.barrier()
if nc.node() == "local":
    target = mesh._nodes[{node!r}]
    code = {touch(tmp_path / "file")!r}
    with RawClient(f"tcp://127.0.0.1:{{target.mesh_port}}", target.mesh_key, own) as client:
        print("client", client.event())
        for message in (
            [encode(peer.ToKernel(node={node!r}, incarnation=1, channel="shell")), *execute_parts(code)],
            [encode(peer.ToKernel(node={node!r}, incarnation=1, channel="shell")), execute_parts(code)[3]],
            [encode(peer.StartNode(node="x", incarnation=1)), b""],
            execute_parts(code),
            [code.encode(), b""],
        ):
            client.send(message)
        nc.barrier()
else:
    end = time.monotonic() + 20
    while mesh.dropped < before + 5 and time.monotonic() < end:
        time.sleep(0.01)
    nc.barrier()
print("dropped", mesh.dropped)
""",
        )
        (event,) = re.findall(r"^client (\w+)$", said["local"], re.MULTILINE)
        before, after = re.findall(r"^dropped (\d+)$", said[node], re.MULTILINE)
        print(f"a node at the mesh of another node: {event}, frames dropped there: {before} -> {after}")
        assert event == ACCEPTED
        assert int(after) - int(before) == 5
        assert run(cluster, "print(nc.all_reduce(1.0))") == {"local": "2.0\n", node: "2.0\n"}
        assert not (tmp_path / "file").exists()


def test_a_node_of_another_cluster_is_refused_by_link_and_mesh(agents: Agents, tmp_path: Path) -> None:
    agents(MINI, options=("--port", str(port := free_port(neighbours=1))))
    key = next(key for key, name in same_user_keys("agent").items() if name == MINI)
    with (
        running_cluster("class", local=1, directory=str(tmp_path)) as cluster,
        running_cluster("other", local=1, directory=str(tmp_path)) as other,
    ):
        (node,) = cluster.add(MINI)
        told = run(cluster, ATTACK + "print(mesh.port, mesh.key)", (node,))
        mesh_port, mesh_key = told[node].split()
        said = run(
            other,
            ATTACK
            + f"""
with RawLink("tcp://127.0.0.1:{port}", {key!r}, own) as link:
    print(try_to_execute(link, {touch(tmp_path / "file")!r}))
with RawClient("tcp://127.0.0.1:{mesh_port}", {mesh_key!r}, own) as client:
    print(client.event())
""",
        )
        print(f"a node of another cluster, at the link and at the mesh: {said['local'].split()}")
        assert said["local"].split() == [REFUSED, REFUSED]
        assert not (tmp_path / "file").exists()


def test_what_a_node_tells_its_own_agent_is_never_an_order(tmp_path: Path, jupyter_dirs: Path) -> None:
    """Its agent and coordinator take from it what a node says; what a coordinator says they drop."""
    with running_cluster("class", local=2, directory=str(tmp_path)) as cluster:
        before = cluster.state()
        said = run(
            cluster,
            ATTACK
            + """
from notebook_cluster.protocol import node as n
control = current_runtime()._control
for order in (
    peer.ToKernel(node="local-2", incarnation=1, channel="shell"),
    peer.StartNode(node="x", incarnation=1),
    peer.ToNode(node="local-2", incarnation=1, body=encode(n.InterruptCell(cell=3))),
    peer.StopNode(node="local-2", incarnation=1, force=True),
    n.Roster(cluster="class", generation=99, nodes=[]),
    n.InterruptCell(cell=1),
    peer.Release(),
):
    control.send(order)
print("said")
""",
            ("local",),
        )
        assert said["local"] == "said\n"
        answers = run(cluster, "print(nc.all_reduce(1.0), nc.world_size())")
        assert answers == {"local": "2.0 2\n", "local-2": "2.0 2\n"}
        after = cluster.state()
        assert [(row.name, row.incarnation) for row in after.nodes] == [
            (row.name, row.incarnation) for row in before.nodes
        ]
        log = Path(after.run_log).with_name("coordinator.log").read_text()
        refused = re.findall(r"control message of local is not readable: (.*)", log)
        print(f"the coordinator's log: {refused}")
        # Of seven the first, the second and the fourth are written, with the number so far.
        assert re.findall(r"\((\d) of this kind so far\)", "\n".join(refused)) == ["1", "2", "4"]


# ---- a recorded session --------------------------------------------------------------------------------------


def test_a_recorded_session_replayed_is_refused_and_starts_nothing(
    jupyter_dirs: Path, no_processes_left: str, tmp_path: Path
) -> None:
    with shared_peer(jupyter_dirs, "--code", CODE) as peer:
        teacher = paired(peer)
        with Recorder(peer.port) as recorder, RawLink(f"tcp://127.0.0.1:{recorder.port}", peer.key, teacher) as link:
            assert try_to_execute(link, touch(tmp_path / "file")) == "executed"
        recorded = sum(len(data) for of_client, data in recorder.turns if of_client)
        kernels = peer.output().count(" started node ")
        assert kernels == 1
        for _ in range(3):
            said, answered = replay(recorder.turns, peer.port, 10.0)
            print(f"replayed {said} of {recorded} bytes: the peer said {answered} bytes and closed the connection")
        assert said < recorded  # it was not even let through the handshake
        with RawLink(peer.endpoint, peer.key, teacher) as link:
            assert try_to_execute(link, touch(tmp_path / "file"), node="again") == "executed"
        assert (tmp_path / "file").read_text() == "here\n" * 2
        assert peer.output().count(" started node ") == 2


# ---- wrong codes ---------------------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.parametrize(("addresses", "allowed", "seconds"), [(1, 5, 3), (24, 20, 10)])
def test_wrong_codes_at_full_speed_do_not_get_past_the_limit(
    addresses: int, allowed: int, seconds: int, jupyter_dirs: Path, no_processes_left: str
) -> None:
    """Within a minute at most 5 of one address are checked, and at most 20 of all; then the code is dead."""
    with shared_peer(jupyter_dirs, "--code", CODE) as peer:
        wait_until(lambda: _answers(peer.port + 1), 60, lambda: f"the pairing port: {peer.output()}")
        stop = time.monotonic() + seconds
        tried: list[int] = []
        guessers = [
            threading.Thread(target=lambda n=n: tried.append(guess(peer.port + 1, f"127.0.0.{n}", stop)))
            for n in range(2, 2 + addresses)
        ]
        for guesser in guessers:
            guesser.start()
        for guesser in guessers:
            guesser.join(30)
        checked = peer.output().count(": wrong code: ")
        print(f"{addresses} addresses: {sum(tried)} attempts in {seconds} s, {checked} reached the check")
        assert sum(tried) > allowed
        assert checked == allowed
        if allowed < 20:
            pair_now(peer, "eve@net")  # others are not kept out by one who guesses
        else:
            with pytest.raises(PairingError) as error:
                pair_now(peer, "eve@net")
            print(f"the right code, afterwards: {error.value}")


def guess(port: int, source: str, stop: float) -> int:
    """Try wrong codes from ``source`` until ``stop`` (monotonic), as fast as the host lets us; how many were tried."""
    tried, wrong_code = 0, GuestExchange("wrong-code-1", GUESSER, GUESSER).message
    begin = encode(Begin(role="cluster", name="class", owner="eve@net", key=GUESSER, message=wrong_code))
    while time.monotonic() < stop:
        with RawClient(f"tcp://{source}:0;127.0.0.1:{port}", PAIRING_IDENTITY.public_key, new_identity()) as client:
            client.socket.setsockopt(zmq.SNDTIMEO, 500)
            # A host hears no guest out that talks for long: come back as another one.
            for _ in range(50):
                try:
                    client.send([begin])
                except zmq.Again:
                    break
                tried += 1
                answer = client.receive(2)
                if answer is None:
                    break
                challenge = decode(answer[0], FromHost)
                if isinstance(challenge, Challenge):
                    client.send([encode(Prove(attempt=challenge.attempt, proof=os.urandom(32)))])
                    client.receive(0.5)
    return tried
