"""Private files, identities, same-user trust, CURVE with ZAP, and the allow-list for output."""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from notebook_cluster import security
from notebook_cluster.security import curve, sanitise


@pytest.fixture
def jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---- files and identity --------------------------------------------------------------------------------------


def test_all_folders_are_private(jupyter: Path) -> None:
    folders = [
        security.data_directory(),
        security.runtime_directory(),
        security.cluster_directory("class"),
        security.agent_directory("mini"),
    ]
    assert [mode(folder) for folder in folders] == [0o700] * 4


def test_a_folder_open_to_others_is_closed_again(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    assert mode(security.private_directory(tmp_path / "open")) == 0o700


def test_a_path_in_a_cluster_name_is_refused(jupyter: Path) -> None:
    with pytest.raises(ValueError, match=r"cluster name '\.\./x' is not usable"):
        security.cluster_directory("../x")


def test_the_socket_directory_is_short_and_private() -> None:
    folder = security.private_socket_directory()
    try:
        assert mode(folder) == 0o700
        assert len(str(folder)) < 40
    finally:
        folder.rmdir()


def test_a_failed_private_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    security.write_private(path, b"old")

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        security.write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert mode(path) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_an_identity_is_made_once_and_kept(tmp_path: Path) -> None:
    first = security.load_identity(tmp_path / "agent")
    assert security.load_identity(tmp_path / "agent") == first
    assert mode(tmp_path / "agent" / "identity.json") == 0o600
    assert first.secret_key not in repr(first)


def test_two_that_make_an_identity_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: security.load_identity(tmp_path / "same"), range(8)))
    assert len(set(made)) == 1


def test_an_identity_readable_by_others_is_refused(tmp_path: Path) -> None:
    security.load_identity(tmp_path)
    (tmp_path / "identity.json").chmod(0o644)
    with pytest.raises(PermissionError, match=r"mode 0644.*delete it"):
        security.load_identity(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"public_key": 1, "secret_key": 2}', "mismatch"])
def test_a_broken_identity_is_named(tmp_path: Path, content: str) -> None:
    if content == "mismatch":
        keys = security.new_identity(), security.new_identity()
        content = json.dumps({"public_key": keys[0].public_key, "secret_key": keys[1].secret_key})
    security.write_private(tmp_path / "identity.json", content.encode())
    with pytest.raises(ValueError, match=r"identity\.json holds no key pair.*delete it"):
        security.load_identity(tmp_path)


def test_a_fingerprint_is_eight_hex_digits() -> None:
    identity = security.new_identity()
    text = security.fingerprint(identity.public_key)
    assert re.fullmatch("[0-9a-f]{8}", text)
    assert text == security.fingerprint(identity.public_key)


# ---- same user -----------------------------------------------------------------------------------------------


def test_an_announced_key_is_trusted_until_withdrawn(jupyter: Path) -> None:
    key = security.new_identity().public_key
    path = security.announce("coordinator", key, "class")
    assert mode(path) == 0o600
    assert security.same_user_keys("coordinator") == {key: "class"}
    assert security.same_user_keys("agent") == {}
    security.withdraw(path)
    assert security.same_user_keys("coordinator") == {}


def test_a_file_open_to_others_is_not_trusted(jupyter: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = security.announce("agent", security.new_identity().public_key, "mini")
    path.chmod(0o640)
    assert security.same_user_keys("agent") == {}
    assert "mode 0640" in caplog.text


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_trusted(jupyter: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = security.announce("agent", security.new_identity().public_key, "mini")
    os.chown(path, 12345, -1)
    assert security.same_user_keys("agent") == {}
    assert "belongs to user 12345" in caplog.text


def test_a_link_and_a_broken_file_are_not_trusted(jupyter: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = security.announce("agent", security.new_identity().public_key, "mini")
    elsewhere = jupyter / "elsewhere.json"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    security.write_private(path.with_name("agent-00000000-1.json"), b'{"role": "agent"}')
    assert security.same_user_keys("agent") == {}
    assert caplog.text.count("ignored") == 2


def test_the_key_of_a_process_that_died_is_forgotten(jupyter: Path) -> None:
    script = (
        "from notebook_cluster import security\n"
        "print(security.announce('agent', security.new_identity().public_key, 'mini'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    path = Path(done.stdout.strip())
    assert path.exists()
    assert security.same_user_keys("agent") == {}
    assert not path.exists()


# ---- CURVE and ZAP -------------------------------------------------------------------------------------------


class Pair:
    """A CURVE server and a client of it, each in a context of its own."""

    def __init__(self) -> None:
        self.server_identity, self.client_identity = security.new_identity(), security.new_identity()
        self.server_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.client_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.server = self.server_context.socket(zmq.ROUTER)
        security.serve(self.server, self.server_identity, "test")
        self.port = self.server.bind_to_random_port("tcp://127.0.0.1")

    def outcome(self) -> zmq.Event:
        """Connect and tell how the handshake ended."""
        self.client = self.client_context.socket(zmq.DEALER)
        security.dial(self.client, self.client_identity, self.server_identity.public_key)
        monitor: Any = self.client.get_monitor_socket()
        self.client.connect(f"tcp://127.0.0.1:{self.port}")
        ends = (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        while monitor.poll(60_000):
            event = recv_monitor_message(monitor)["event"]
            if event in ends:
                self.client.disable_monitor()
                return zmq.Event(event)
        raise AssertionError("the handshake did not end")

    def close(self) -> None:
        self.server_context.destroy(linger=0)
        self.client_context.destroy(linger=0)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_without_a_gate_everybody_is_refused(pair: Pair) -> None:
    assert pair.outcome() != zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_an_unknown_key_is_refused_and_counted(pair: Pair) -> None:
    gate = security.Gate(pair.server_context)
    gate.allow("test", lambda key: None)
    assert pair.outcome() == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert gate.refused == 1
    gate.close()


def test_a_key_of_another_domain_is_refused(pair: Pair) -> None:
    gate = security.Gate(pair.server_context)
    gate.allow("other", lambda key: "somebody")
    assert pair.outcome() == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    gate.close()


def test_a_check_that_fails_refuses(pair: Pair) -> None:
    gate = security.Gate(pair.server_context)

    def broken(key: str) -> str | None:
        raise OSError("folder gone")

    gate.allow("test", broken)
    assert pair.outcome() == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    gate.close()


def test_a_known_key_comes_in_and_its_messages_carry_its_user_id(pair: Pair) -> None:
    gate = security.Gate(pair.server_context)
    gate.allow("test", {pair.client_identity.public_key: "teacher"}.get)
    assert pair.outcome() == zmq.EVENT_HANDSHAKE_SUCCEEDED
    pair.client.send_multipart([b"header", b"x" * 100_000])
    assert pair.server.poll(60_000)
    frames = pair.server.recv_multipart(copy=False)
    assert [curve.user_id(frame) for frame in frames[1:]] == ["teacher", "teacher"]
    gate.close()


def test_a_closed_gate_refuses(pair: Pair) -> None:
    gate = security.Gate(pair.server_context)
    gate.allow("test", lambda key: "anybody")
    gate.close()
    gate.close()
    assert pair.outcome() != zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_another_gate_may_follow_a_closed_one_at_once() -> None:
    with zmq.Context() as context:
        for _ in range(200):
            security.Gate(context).close()


def test_a_message_without_curve_has_no_user_id() -> None:
    with zmq.Context() as context:
        a, b = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        a.bind("inproc://plain")
        b.connect("inproc://plain")
        b.send(b"x")
        assert curve.user_id(a.recv(copy=False)) == ""
        a.close()
        b.close()


# ---- output --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "html",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<img src='http://tracker.example/x.png'>",
        "<a href='javascript:alert(1)'>x</a>",
        "<a href='data:text/html,<script>alert(1)</script>'>x</a>",
        "<svg onload=alert(1)><script>alert(1)</script></svg>",
        "<iframe src='https://e.example'></iframe>",
        "<form action='/hub/logout'><button>x</button></form>",
        "<div style='position:fixed;top:0;background:url(http://t.example)'>x</div>",
        "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)></style></mglyph></table></mtext></math>",
        "<style>body{display:none}</style>",
        "<img src='data:image/svg+xml;base64,PHN2Zy8+\" onerror=alert(1)'>",
        "<div class='jp-Dialog'>x</div>",
        "<meta http-equiv=refresh content='0;url=http://e.example'>",
    ],
)
def test_nothing_active_survives_in_html(html: str) -> None:
    safe = security.safe_bundle({"text/html": html}).get("text/html", "").lower()
    dangers = "script onerror onload http: https: iframe form position url( jp- meta <style <svg data:text"
    assert [danger for danger in dangers.split() if danger in safe] == []


def test_a_data_frame_keeps_its_table() -> None:
    row = '<tr style="text-align: right;"><th scope="row">0</th><td>1</td></tr>'
    html = f'<table border="1" class="dataframe">{row}</table>'
    safe = security.safe_bundle({"text/html": html, "text/plain": "   0\n0  1"})
    assert 'class="dataframe"' in safe["text/html"]
    assert "text-align:right" in safe["text/html"].replace(" ", "")
    assert safe["text/plain"] == "   0\n0  1"


def test_svg_becomes_a_picture() -> None:
    safe = security.safe_bundle({"image/svg+xml": "<svg onload='alert(1)'/>", "text/plain": "<Figure>"})
    assert safe["text/html"].startswith('<img src="data:image/svg+xml;base64,')
    assert "alert" not in safe["text/html"]
    assert set(safe) == {"text/html", "text/plain"}


def test_pictures_pass_only_as_base64() -> None:
    assert security.safe_bundle({"image/png": "iVBORw0KGgo=\n"}) == {"image/png": "iVBORw0KGgo=\n"}
    assert "image/png" not in security.safe_bundle({"image/png": '"><script>'})


def test_charts_pass_only_as_json() -> None:
    chart: dict[str, Any] = {"data": [], "layout": {}}
    kinds = ["application/vnd.plotly.v1+json", "application/vnd.vegalite.v5+json", "application/vnd.vega.v5+json"]
    assert set(security.safe_bundle(dict.fromkeys(kinds, chart))) == set(kinds)
    assert set(security.safe_bundle({kinds[0]: "<script>"})) == {"text/plain"}


def test_mathematics_in_html_has_only_commands_that_write() -> None:
    plain = r"$\alpha + \frac{1}{2}$ and $x < 3$"
    assert "mathjax_ignore" not in security.safe_bundle({"text/html": plain})["text/html"]
    for command in (r"\style{background:url(//x)}{y}", r"\href{x}{y}", r"\require{x}", r"\def\x{y}", r"C:\Users"):
        safe = security.safe_bundle({"text/html": f"<b>${command}$</b>"})["text/html"]
        assert safe.startswith('<div class="mathjax_ignore tex2jax_ignore"><b>')


@pytest.mark.parametrize("mime", ["text/markdown", "text/latex"])
def test_markdown_and_latex_are_shown_as_text_when_nothing_else_is_there(mime: str) -> None:
    assert security.safe_bundle({mime: "# <b>"}) == {"text/plain": "# <b>"}
    assert security.safe_bundle({mime: "# x", "text/plain": "y"}) == {"text/plain": "y"}
    for bare in ("<IPython.core.display.Markdown object>", "<a.B object at 0x7f51C823>", ""):
        assert security.safe_bundle({mime: ["# x\n", "y"], "text/plain": bare}) == {"text/plain": "# x\ny"}


def test_script_that_is_not_run_is_said() -> None:
    told = {"text/plain": "[notebook-cluster: JavaScript was left out: scripts of nodes are not run in the notebook]"}
    bare = "<IPython.core.display.Javascript object>"
    assert security.safe_bundle({"application/javascript": "x()", "text/plain": bare}) == told
    assert security.safe_bundle({"text/html": "<div id=a></div>\n<SCRIPT>x()</SCRIPT>", "text/plain": bare}) == told
    chart = {"text/html": "<div id=a></div><script>x()</script>", "text/plain": "alt.Chart(...)"}
    assert security.safe_bundle(chart) == {"text/plain": "alt.Chart(...)"}
    shown = security.safe_bundle({"text/html": "<b>seen</b><script>x()</script>", "text/plain": bare})
    assert shown["text/html"] == "<b>seen</b>"


@pytest.mark.parametrize("mime", ["application/x-evil", "application/vnd.jupyter.widget-view+json", "text/x-evil"])
def test_any_other_type_is_named_in_a_text(mime: str) -> None:
    safe = security.safe_bundle({mime: "alert(1)"})
    assert set(safe) == {"text/plain"}
    assert mime in safe["text/plain"]


def test_an_output_over_the_limit_is_replaced() -> None:
    safe = security.safe_bundle({"image/png": "A" * 10_000_004, "text/plain": "x"})
    assert safe == {"text/plain": "[notebook-cluster: an output of 10.0 MB was left out (limit 10 MB): "
                                  "save it to a file instead]"}  # fmt: skip


def test_a_stream_keeps_colours_and_loses_other_control_characters() -> None:
    safe = security.safe_output("stream", {"name": "evil", "text": "\x1b[31mred\x1b[0m\r\n\x00\x07end"})
    assert safe == {"name": "stdout", "text": "\x1b[31mred\x1b[0m\r\nend"}


def test_a_display_keeps_known_fields_only() -> None:
    content = {
        "data": {"image/png": "AAAA", "text/html": "x"},
        "metadata": {"image/png": {"width": 10, "isolated": True}, "text/html": {"isolated": True}},
        "transient": {"display_id": "a\x00b", "x": 1},
        "extra": 1,
    }
    assert security.safe_output("display_data", content) == {
        "data": {"image/png": "AAAA", "text/html": "x"},
        "metadata": {"image/png": {"width": 10}},
        "transient": {"display_id": "ab"},
    }


def test_an_error_keeps_its_text_and_is_bounded() -> None:
    content = {"ename": "Value\nError", "evalue": "x", "traceback": ["\x1b[31mline", 5, "y" * 1_000_000]}
    safe = security.safe_output("error", content)
    assert safe is not None
    assert safe["ename"] == "ValueError"
    assert safe["traceback"][0] == "\x1b[31mline"
    assert sum(map(len, safe["traceback"])) < sanitise.MAX_ERROR_CHARACTERS + 200


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("stream", {"name": "stdout", "text": 1}),
        ("display_data", {"data": "x"}),
        ("display_data", {"data": {1: "x"}}),
        ("update_display_data", {"data": {"text/plain": "x"}}),
        ("comm_open", {"data": {}}),
        ("status", {"execution_state": "busy"}),
    ],
)
def test_malformed_or_other_output_is_nothing(kind: str, content: dict[str, Any]) -> None:
    assert security.safe_output(kind, content) is None


def test_clear_output_has_one_field() -> None:
    assert security.safe_output("clear_output", {"wait": True, "x": 1}) == {"wait": True}
