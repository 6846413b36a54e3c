"""The server extension's stream and addresses in a real jupyter_server, with real clusters."""

import asyncio
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tornado.httpclient import HTTPClientError

from notebook_cluster.agent import shared_machines
from notebook_cluster.client import Cluster
from notebook_cluster.protocol import PROTOCOL_VERSION, VERSION
from notebook_cluster.protocol.clock import dated
from notebook_cluster.protocol.views import ConnectionFile
from notebook_cluster.security import cluster_directory
from notebook_cluster.server import typescript
from tests.cluster import running_cluster
from tests.conftest import MARK, end_processes, marked_processes, wait_until
from tests.sidebar_client import Stream
from tests.strangers import Strangers, running_strangers

pytest_plugins = ["pytest_jupyter.jupyter_server"]

Fetch = Callable[..., Awaitable[Any]]
Connect = Callable[[], Awaitable[Stream]]

ENDLESS = "import time\nwhile True: time.sleep(0.05)"
WRITE_TO_TERMINAL = r"""
import os
os.write(2, b"  \x1b[31mred\x1b[0m \x1b]0;title\x07<b>bold</b>\x00\n 5 %\r100 %\n" + b"x" * 5000 + b"\n")
"""
TRAIN = """
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
sync = nc.LocalSGD(model, every=2)
for step in range(8):
    loss = (model(torch.ones(1, 4)) ** 2).mean()
    loss.backward()
    sync.step(loss=float(loss), samples=1)
sync.finish()
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Jupyter's folders for all tests here, in which one cluster ``shown`` of two nodes runs."""
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="nbt-", dir="/tmp"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        mark = uuid.uuid4().hex
        stack.callback(lambda: end_processes(marked_processes(mark)))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(MARK, mark)
        use(root, patch)
        (root / "work").mkdir()
        stack.enter_context(running_cluster("shown", local=2, directory=str(root / "work")))
        yield root


def use(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Jupyter's folders are those in ``root``."""
    folders = {"JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "run", "JUPYTER_CONFIG_DIR": "config"}
    for variable, folder in folders.items():
        (root / folder).mkdir(mode=0o700, exist_ok=True)
        patch.setenv(variable, str(root / folder))
    patch.setenv("IPYTHONDIR", str(root / "ipython"))


@pytest.fixture
def jp_server_config() -> dict[str, Any]:
    return {"ServerApp": {"jpserver_extensions": {"notebook_cluster.server": True}}}


@pytest.fixture
def server(home: Path, jp_serverapp: Any, monkeypatch: pytest.MonkeyPatch, jp_asyncio_loop: Any) -> Iterator[Any]:
    """The server, which sees the clusters in ``home``."""
    use(home, monkeypatch)
    yield jp_serverapp
    jp_asyncio_loop.run_until_complete(jp_serverapp.web_app.settings["notebook_cluster_hub"].close())


@pytest.fixture
def connect(server: Any, jp_ws_fetch: Fetch) -> Connect:
    """``await connect()`` is a browser whose stream begins."""

    async def connected() -> Stream:
        return Stream(await jp_ws_fetch("notebook-cluster", "stream"))

    return connected


@pytest.fixture
def strangers(home: Path) -> Iterator[Strangers]:
    with running_strangers(home) as factory:
        yield factory


def is_running(stream: Stream, nodes: int = 2) -> bool:
    """Cluster ``shown`` is seen with so many nodes that are well."""
    return [node["condition"] for node in stream.nodes("shown").values()] == ["ok"] * nodes


async def test_the_overview_has_the_cluster_with_every_field_of_its_state(server: Any, jp_fetch: Fetch) -> None:
    response = await jp_fetch("notebook-cluster", "overview")
    assert response.headers["Content-Type"].startswith("application/json")
    overview = json.loads(response.body)
    assert overview["type"] == "Overview"
    assert overview["server"] == {"version": VERSION, "protocol": PROTOCOL_VERSION}
    assert overview["sharing"]["on"] is False
    slurm, ssh = [engine for engine in overview["engines"] if engine["name"] in ("slurm", "ssh")]
    assert slurm["hosts"] == "number"
    assert ssh == {"name": "ssh", "title": "SSH", "hosts": "names", "options": ["nodes_per_host", "setup", "address"]}
    (row,) = overview["clusters"]
    assert (row["name"], row["condition"], row["reason"]) == ("shown", "running", "")
    assert [(node["name"], node["loss"], node["reason"]) for node in row["state"]["nodes"]] == [
        ("local", None, ""), ("local-2", None, ""),
    ]  # fmt: skip


async def test_training_is_seen_as_points_rounds_and_gauges_and_can_be_saved(connect: Connect, jp_fetch: Fetch) -> None:
    stream = await connect()
    await stream.until(lambda: is_running(stream))
    await stream.until(lambda: any(message["reset"] for message in stream.series))
    with await asyncio.to_thread(Cluster.attach, "shown") as cluster:
        cell = asyncio.ensure_future(asyncio.to_thread(cluster.run, TRAIN, replay=False))

        def points() -> int:
            new = [curve for message in stream.series if not message["reset"] for curve in message["series"]]
            return sum(len(curve["value"]) for curve in new if curve["name"] == "loss" and curve["node"] == "local-2")

        await stream.until(lambda: points() == 8)
        await stream.until(lambda: stream.row("shown")["state"]["jobs"][0]["round"] == 4)
        assert (await cell)[0].status == "ok"
    folder = await stream.ask("checkpoint", cluster="shown", value="kept")
    assert os.listdir(folder)

    series = json.loads((await jp_fetch("notebook-cluster", "clusters", "shown", "series")).body)
    (loss,) = [curve for curve in series["series"] if (curve["node"], curve["name"]) == ("local-2", "loss")]
    assert loss["step"] == list(range(1, 9))

    metrics = (await jp_fetch("metrics")).body.decode()
    assert 'notebook_cluster_up{cluster="shown"} 1.0' in metrics
    assert 'notebook_cluster_nodes{cluster="shown",condition="ok"} 2.0' in metrics
    assert 'notebook_cluster_rounds{cluster="shown",job="model"} 4.0' in metrics
    gauges = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("notebook_cluster_"))
    sent = float(gauges['notebook_cluster_sent_bytes{cluster="shown",job="model"}'])
    assert 0 < sent < float(gauges['notebook_cluster_data_parallel_bytes{cluster="shown",job="model"}'])
    for node in ("local", "local-2"):
        used = float(gauges[f'notebook_cluster_node_memory_used_bytes{{cluster="shown",node="{node}"}}'])
        assert 1e6 < used < float(gauges[f'notebook_cluster_node_memory_total_bytes{{cluster="shown",node="{node}"}}'])


async def test_a_running_cell_is_interrupted_and_waiting_cells_are_freed(connect: Connect) -> None:
    stream = await connect()
    await stream.until(lambda: is_running(stream))
    with await asyncio.to_thread(Cluster.attach, "shown") as cluster:
        cell = asyncio.ensure_future(asyncio.to_thread(cluster.run, ENDLESS, replay=False))
        await stream.until(lambda: (stream.row("shown")["state"]["cell"] or {}).get("status") == "running")
        await stream.until(lambda: all(node["busy"] for node in stream.nodes("shown").values()))
        await stream.ask("detach", cluster="shown")
        assert (await cell)[0].status == "detached"
        await stream.ask("interrupt", cluster="shown")
        await stream.until(lambda: stream.row("shown")["state"]["cell"]["status"] == "interrupted")


async def test_nodes_are_added_restarted_and_removed(connect: Connect) -> None:
    stream = await connect()
    await stream.until(lambda: is_running(stream))
    assert await stream.ask("add", cluster="shown", target="local", value=1) == ["local-3"]
    await stream.until(lambda: is_running(stream, 3))
    await stream.ask("restart", cluster="shown", target="local-3")
    await stream.until(lambda: stream.nodes("shown")["local-3"]["incarnation"] == 2)
    await stream.ask("remove", cluster="shown", target="local-3")
    await stream.until(lambda: "local-3" not in stream.nodes("shown"))
    assert "'desk'" in await stream.refused("restart", cluster="shown", target="desk")


async def test_machines_are_invited(connect: Connect) -> None:
    stream = await connect()
    line = await stream.ask("invite", cluster="shown")
    assert "notebook-cluster share --dial" in line
    await stream.until(lambda: stream.nodes("shown") and stream.row("shown")["state"]["invitation"])
    assert await stream.ask("invite", cluster="shown", value=False) is None
    await stream.until(lambda: not stream.row("shown")["state"]["invitation"])


async def test_the_last_lines_of_a_node_are_text_that_steers_nothing(connect: Connect) -> None:
    stream = await connect()
    await stream.until(lambda: is_running(stream))
    with await asyncio.to_thread(Cluster.attach, "shown") as cluster:
        await asyncio.to_thread(cluster.run, WRITE_TO_TERMINAL, replay=False)

    async def last(count: int) -> list[str]:
        lines: list[str] = await stream.ask("log", cluster="shown", target="local-2", value=count)
        return lines

    assert (await last(4))[:3] == ["  red <b>bold</b>", " 5 %", "100 %"]
    assert [len(line) for line in await last(1)] == [2000]
    assert len(await stream.ask("log", cluster="shown", target="local-2")) > 3


async def test_a_cluster_that_has_ended_has_a_report_until_it_is_dismissed_and_its_run_stays(
    connect: Connect, jp_fetch: Fetch
) -> None:
    address = ("notebook-cluster", "clusters", "over", "report")
    stream = await connect()
    await stream.ask("start", cluster="over", value=1)
    await stream.until(lambda: len(stream.nodes("over")) == 1)
    assert await refusal(jp_fetch, *address) == "no cluster 'over' that has ended is shown: it runs"
    started = stream.row("over")["state"]["started"]
    await stream.ask("stop", cluster="over")
    await stream.until(lambda: stream.row("over")["condition"] == "ended")
    response = await jp_fetch(*address)
    assert response.headers["Content-Type"].startswith("text/html")
    assert "sandbox;" in response.headers["Content-Security-Policy"]
    assert "<h1>over</h1>" in response.body.decode()
    assert f"the cluster was started {dated(started)}" in response.body.decode()

    await stream.ask("dismiss", cluster="over")
    await stream.until(lambda: stream.row("over") is None)
    again = await connect()
    await again.until(lambda: again.overviews)
    assert again.row("over") is None
    assert "is not shown any more" in await refusal(jp_fetch, *address)
    assert "over" in {run.cluster for run in await asyncio.to_thread(Cluster.runs)}


async def refusal(jp_fetch: Fetch, *address: str) -> str:
    """What is said where there is nothing at ``address``."""
    with pytest.raises(HTTPClientError) as refused:
        await jp_fetch(*address)
    assert refused.value.code == 404
    return str(json.loads(refused.value.response.body)["message"])


async def test_a_cluster_is_started_stopped_and_shown_as_ended(connect: Connect, jp_fetch: Fetch) -> None:
    stream = await connect()
    await stream.ask("start", cluster="fresh", value=1)
    await stream.until(lambda: len(stream.nodes("fresh")) == 1)
    await stream.ask("stop", cluster="fresh")
    await stream.until(lambda: stream.row("fresh")["condition"] == "ended")
    assert stream.row("fresh")["reason"] == "cluster 'fresh' has ended: stopped"
    assert 'cluster="fresh"' not in (await jp_fetch("metrics")).body.decode()
    assert await stream.refused("detach", cluster="fresh") == "cluster 'fresh' has ended: stopped"


async def test_a_cluster_is_started_with_local_nodes_and_the_peers_that_are_chosen(
    connect: Connect, strangers: Strangers
) -> None:
    chosen, other = strangers("chosen", "--code", "class-code-7"), strangers("other", "--code", "class-code-7")
    await asyncio.to_thread(lambda: (chosen.code, other.code))
    stream = await connect()
    await stream.until(lambda: {chosen.name, other.name} <= stream.peers().keys())
    said = await stream.ask("start", cluster="class", value=2, target=f"{chosen.name}, ", code="class-code-7")
    assert said == ["local: local, local-2", f"{chosen.name}: {chosen.name}"]
    await stream.until(lambda: set(stream.nodes("class")) == {"local", "local-2", chosen.name})
    await stream.ask("stop", cluster="class")


async def test_a_cluster_is_not_started_when_a_chosen_peer_refuses_the_code(
    connect: Connect, strangers: Strangers
) -> None:
    peer = strangers("mini", "--code", "right-code-1")
    address = await asyncio.to_thread(lambda: peer.pairing)
    stream = await connect()
    said = await stream.refused("start", cluster="class", value=1, target=address, code="wrong-code-1")
    assert f"the code 'wrong-code-1' is wrong at {peer.name}" in said
    await stream.until(lambda: (stream.row("class") or {"condition": "ended"})["condition"] == "ended")


async def test_a_cluster_whose_coordinator_is_killed_ends_with_the_way_to_bring_it_back(connect: Connect) -> None:
    stream = await connect()
    cluster = await asyncio.to_thread(Cluster.start, "killed", local=0)
    await stream.until(lambda: (stream.row("killed") or {}).get("condition") == "running")
    os.kill(cluster.connection.file.pid, 9)
    await stream.until(lambda: stream.row("killed")["condition"] == "ended")
    assert stream.row("killed")["reason"].endswith("%cluster start killed brings it back")
    await asyncio.to_thread(cluster.close)


async def test_a_coordinator_of_another_version_is_named_with_both_versions(connect: Connect) -> None:
    file = ConnectionFile(
        cluster="old", address="tcp://127.0.0.1:1", server_key="", view_public_key="", view_secret_key="",
        pid=os.getpid(), epoch=1, protocol=PROTOCOL_VERSION - 1, version="0.0.9", run_log="",
    )  # fmt: skip
    path = cluster_directory("old") / "connection.json"
    path.write_bytes(msgspec.json.encode(file))
    try:
        stream = await connect()
        row = await stream.until(lambda: stream.row("old"))
        assert (row["condition"], row["state"]) == ("unreachable", None)
        assert f"0.0.9 (protocol {PROTOCOL_VERSION - 1})" in row["reason"]
        assert f"{VERSION} (protocol {PROTOCOL_VERSION})" in row["reason"]
        assert await stream.refused("stop", cluster="old") == row["reason"]
    finally:
        path.unlink()


async def test_a_cluster_ends_by_itself_when_no_browser_looks_at_it_but_not_before(connect: Connect) -> None:
    lease = 1.0
    stream = await connect()
    cluster = await asyncio.to_thread(Cluster.start, "idle", local=1, lease=lease)
    await asyncio.to_thread(cluster.close)

    def age() -> float:
        state = (stream.row("idle") or {}).get("state")
        return float(state["now"] - state["started"]) if state else 0.0

    await stream.until(lambda: age() > 2.5 * lease)
    assert stream.row("idle")["condition"] == "running"
    stream.socket.close()
    await asyncio.to_thread(cluster.connection.wait_closed, 20)


async def test_a_wrong_code_is_answered_with_what_the_coordinator_says(connect: Connect, strangers: Strangers) -> None:
    peer = strangers("mini", "--code", "right-code-1")
    address = await asyncio.to_thread(lambda: peer.pairing)
    stream = await connect()
    said = [
        await stream.refused("add", cluster="shown", target=address, code=f"wrong-code-{number}") for number in range(3)
    ]
    for number, line in enumerate(said):
        assert f"the code 'wrong-code-{number}' is wrong at {peer.name}: {19 - number} tries left" in line


async def test_peers_on_the_network_are_seen_while_a_browser_is_there(connect: Connect, strangers: Strangers) -> None:
    peer = strangers("desk")
    code = await asyncio.to_thread(lambda: peer.code)
    stream = await connect()

    await stream.until(lambda: peer.name in stream.peers())
    row = stream.peers()[peer.name]
    assert (row["trusted"], row["pairing"]) == (False, True)
    assert row["key"] not in stream.overviews[-1]["sharing"]["keys"]
    assert await stream.ask("add", cluster="shown", target=peer.name, code=code) == [peer.name]
    await stream.until(lambda: is_running(stream, 3))
    assert await stream.ask("hand_over", cluster="shown", target=peer.name) == peer.name
    await stream.until(lambda: stream.overviews[-1]["clusters"][0]["state"]["head"] == peer.name)
    assert await stream.ask("hand_over", cluster="shown", target="local") == ""
    await stream.ask("remove", cluster="shown", target=peer.name)


async def test_this_machine_is_shared_and_not_shared_any_more(connect: Connect) -> None:
    stream = await connect()
    shared = await stream.ask("share_on")
    try:
        assert shared["on"]
        assert shared["code"] in shared["command"]
        assert shared["qr_svg_data_url"].startswith("data:image/svg+xml")
        again = await connect()
        await again.until(lambda: again.overviews and again.overviews[-1]["sharing"] == shared)
        (agent,) = shared_machines()
        assert agent.pid != os.getpid()
        assert os.getsid(agent.pid) == agent.pid
        own = await stream.until(lambda: [row for row in stream.peers().values() if row["key"] in shared["keys"]])
        assert [row["name"] for row in own] == [shared["name"]]
    finally:
        after = await stream.ask("share_off")
    assert after["on"] is False
    assert await asyncio.to_thread(
        wait_until, lambda: not os.path.exists(f"/proc/{agent.pid}") or not shared_machines()
    )


async def test_a_stream_that_cannot_go_on_is_closed_so_that_its_page_connects_anew(
    server: Any, connect: Connect
) -> None:
    def broken(name: str) -> str:
        raise RuntimeError("nothing is there")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.web_app.settings["notebook_cluster_hub"], "history", broken)
        stream = await connect()
        async with asyncio.timeout(60):
            while await stream.socket.read_message() is not None:
                pass
    again = await connect()
    await again.until(lambda: is_running(again) and again.series)


async def test_what_is_not_an_action_is_answered_with_why(connect: Connect, jp_fetch: Fetch) -> None:
    stream = await connect()
    await stream.socket.write_message('{"id": 5, "action": "explode"}')
    assert "explode" in (await stream.answer(5))["error"]
    await stream.socket.write_message("{{{")
    assert "not an action" in (await stream.answer(0))["error"]
    for body in ("{{{", "[]", '{"id": 1, "action": "stop", "cluster": 7}', '{"id": 1}', "x" * 20_000):
        with pytest.raises(HTTPClientError) as refused:
            await jp_fetch("notebook-cluster", "actions", method="POST", body=body)
        assert refused.value.code == 400
        assert json.loads(refused.value.response.body)["type"] == "Done"


async def test_an_action_over_rest_answers_when_it_is_done(server: Any, jp_fetch: Fetch) -> None:
    body = json.dumps({"id": 3, "action": "detach", "cluster": "shown"})
    response = await jp_fetch("notebook-cluster", "actions", method="POST", body=body)
    assert json.loads(response.body) == {"type": "Done", "id": 3, "error": "", "value": None}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"action": "stop", "cluster": "nowhere"}, "no cluster 'nowhere' runs on this machine (running: shown)"),
        ({"action": "add", "cluster": "shown"}, "add needs a peer as target"),
        ({"action": "hand_over", "cluster": "shown"}, "hand_over needs a peer as target"),
        ({"action": "hand_over", "cluster": "shown", "target": "local"}, "is led from this machine already"),
        ({"action": "remove", "cluster": "shown"}, "remove needs the name of a node as target"),
        ({"action": "add", "cluster": "shown", "target": "local", "value": -1}, "use a number of nodes from 0 to 64"),
        ({"action": "start", "cluster": "../up"}, "cluster name '../up' is not usable"),
        ({"action": "start", "cluster": "far", "launch": {"on": ""}}, "start with launch needs the name of an engine"),
        ({"action": "start", "cluster": "far", "launch": {"on": "slrum"}}, "--on slrum: no such engine (did you mean"),
        (
            {"action": "start", "cluster": "far", "launch": {"on": "slurm", "hosts": 0x400}},
            "--hosts 1024: use 1 to 1000",
        ),
        ({"action": "log", "cluster": "shown"}, "log needs the name of a node as target"),
        ({"action": "log", "cluster": "nowhere", "target": "local"}, "no cluster 'nowhere' runs on this machine"),
        ({"action": "log", "cluster": "shown", "target": "../../etc"}, "no such node (local, local-2)"),
        ({"action": "log", "cluster": "shown", "target": "local", "value": 0}, "a number of lines from 1 to 1000"),
        ({"action": "log", "cluster": "shown", "target": "local", "value": True}, "a number of lines from 1 to 1000"),
        ({"action": "dismiss", "cluster": "shown"}, "no cluster 'shown' that has ended is shown: it runs"),
        ({"action": "dismiss", "cluster": "../up"}, "it is not shown any more"),
        ({"action": "share_on", "code": "my-own-code"}, "notebook-cluster share --code;"),
    ],
)
async def test_what_cannot_be_done_is_said_in_one_line(connect: Connect, fields: dict[str, Any], said: str) -> None:
    stream = await connect()
    assert said in await stream.refused(**fields)


def test_the_types_of_the_sidebar_are_those_of_the_messages() -> None:
    if not typescript.TOOL.is_file():
        pytest.skip("the packages of labextension/ are not installed")
    assert typescript.TARGET.read_text() == typescript.generate()


def test_types_that_the_browser_can_trust() -> None:
    text = typescript.TARGET.read_text()
    assert "type: 'Overview';" in text
    assert "type: 'PeerView';" not in text
    assert "time: (number | null)[];" in text
    assert "step: number[];" in text
    assert "id: number;\n  action:" in text
    assert "  cluster?: string;" in text
    assert "  reason: string;" in text
    assert " * What a person clicked.\n" in text


def test_types_are_not_made_without_node_which_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(typescript, "TOOL", tmp_path / "cli.js")
    assert typescript.main(["--check"]) == 1
    assert re.fullmatch(r"\S+ is missing: make labextension installs it\n", capsys.readouterr().err)
    monkeypatch.setattr(typescript.shutil, "which", lambda *args, **options: None)
    assert typescript.main([]) == 1
    assert capsys.readouterr().err == "Node.js is missing: make labextension installs it\n"
