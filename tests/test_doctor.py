"""The doctor of a real cluster with real agents, and ``notebook-cluster doctor`` without one."""

import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.cli import main
from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.protocol.views import Finding
from notebook_cluster.security import data_directory, load_identity
from notebook_cluster.widgets import render_findings
from tests.cluster import run, running_cluster
from tests.conftest import Agents, wait_until
from tests.test_cluster_take_over import OLD

DEMO = "nbc-demo"
MINI = f"mini-{os.getpid()}"
"""Other agents of this network may be called mini as well."""


def demo_package(folder: Path, version: str) -> Path:
    """A folder for PYTHONPATH with module ``nbc_demo`` of distribution ``nbc-demo``."""
    info = folder / f"nbc_demo-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DEMO}\nVersion: {version}\n")
    (info / "top_level.txt").write_text("nbc_demo\n")
    (folder / "nbc_demo.py").write_text(f"VERSION = {version!r}\n")
    return folder


@pytest.fixture
def cluster(agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A node here and one at the agent MINI; the package nbc-demo is there in two versions."""
    agents(MINI, environment={"PYTHONPATH": str(demo_package(tmp_path / "theirs", "1.0"))})
    monkeypatch.setenv("PYTHONPATH", str(demo_package(tmp_path / "ours", "2.0")))
    with running_cluster("doctored", local=1, peers=[MINI]) as running:
        yield running


def about(findings: list[Finding], subject: str, level: str) -> list[Finding]:
    return [finding for finding in findings if (finding.subject, finding.level) == (subject, level)]


def test_a_cluster_is_examined_in_every_respect_and_each_that_is_well_is_said(cluster: Cluster) -> None:
    findings = cluster.examine()
    assert not [finding for finding in findings if finding.level == "error"]
    (links,) = [finding for finding in findings if finding.table[:1] == [["peer", "round trip", "jitter", "bandwidth"]]]
    assert links.table[1][0] == MINI
    assert links.table[1][3].endswith("MB/s")
    (pairs,) = [finding for finding in findings if finding.table and finding.table[0][0] == "from"]
    assert pairs.table[1][:2] == ["local", MINI]
    assert pairs.table[1][4] == "direct"
    assert MINI in about(findings, "clock", "ok")[0].text
    assert [
        finding for finding in about(findings, "port", "ok") if f"local and {MINI} reach each other" in finding.text
    ]
    assert about(findings, "versions", "ok")
    assert not [finding for finding in about(findings, "names", "warning") if MINI in finding.text]


def test_a_package_that_a_cell_imports_is_compared_and_the_fix_is_a_cell(cluster: Cluster) -> None:
    run(cluster, "import nbc_demo")
    (found,) = about(cluster.examine(), "versions", "warning")
    assert found.table == [["package", "local", MINI], [DEMO, "2.0", "1.0"]]
    assert found.fix == f"%%on {MINI}\n%pip install nbc-demo==2.0"
    assert "%pip install nbc-demo==2.0" in render_findings([found])


def test_a_package_that_was_asked_for_is_compared_and_an_impossible_name_is_refused(cluster: Cluster) -> None:
    (found,) = about(cluster.examine(["NBC_demo"]), "versions", "warning")
    assert found.table[1] == [DEMO, "2.0", "1.0"]
    with pytest.raises(ClusterError, match="is not the name of a package"):
        cluster.examine(["numpy; reboot"])


def test_a_peer_that_does_not_answer_is_named_and_the_others_are_examined(cluster: Cluster, agents: Agents) -> None:
    os.kill(agents.pid(MINI), signal.SIGSTOP)
    try:
        findings = cluster.examine()
    finally:
        os.kill(agents.pid(MINI), signal.SIGCONT)
    (silent,) = about(findings, "peers", "warning")
    assert f"{MINI} is connected but did not answer" in silent.text
    assert "local" in about(findings, "versions", "ok")[0].text


def test_the_command_asks_the_running_cluster(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--packages", DEMO]) == 0
    said = capsys.readouterr()
    assert "examining cluster doctored" in said.err
    assert DEMO in said.out
    assert f"%%on {MINI}" in said.out


# ---- without a cluster


def findings_of(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[dict[str, object]]]:
    code = main(["doctor", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_without_a_cluster_this_machine_is_looked_at(jupyter_dirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = findings_of(capsys, "--packages", "msgspec,no-such-package")
    assert code == 0
    assert {"versions", "peers", "cluster"} <= {finding["subject"] for finding in findings}
    (missing,) = [finding for finding in findings if "no-such-package" in str(finding["text"])]
    assert missing["fix"] == "pip install no-such-package"


def test_a_key_that_others_can_read_is_an_error(jupyter_dirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_identity(data_directory())
    path = data_directory() / "identity.json"
    assert not [finding for finding in findings_of(capsys)[1] if finding["level"] == "error"]
    os.chmod(path, 0o644)
    code, findings = findings_of(capsys)
    assert code == 1
    (found,) = [finding for finding in findings if finding["level"] == "error"]
    assert str(found["fix"]).startswith(f"chmod 600 {path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_an_unknown_cluster_is_one_line_and_exit_code_2(jupyter_dirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_shared_agent_is_listed_with_whether_it_answers(
    agents: Agents, jupyter_dirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agents(MINI)

    def heard() -> list[dict[str, object]]:
        """What the doctor says once it hears the agent: its own listening may be too short on a busy machine."""
        _, findings = findings_of(capsys)
        (peers,) = [finding for finding in findings if finding["subject"] == "peers"]
        return findings if "table" in peers else []

    findings = wait_until(heard, 60, "the agent to be heard")
    (peers,) = [finding for finding in findings if finding["subject"] == "peers"]
    row = next(row for row in peers["table"] if row[0] == MINI)  # type: ignore[attr-defined]
    assert row[3] == "yes"
    assert [finding for finding in findings if finding["subject"] == "port" and MINI in str(finding["text"])]


def test_a_peer_of_another_version_is_named_with_the_way_out(
    agents: Agents, jupyter_dirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OLD)
    agents(MINI, environment={"PYTHONPATH": str(tmp_path)})

    def warned() -> list[dict[str, object]]:
        return [finding for finding in findings_of(capsys)[1] if f"peer '{MINI}' speaks" in str(finding["text"])]

    (found,) = wait_until(warned, 60, "the agent to be heard")
    assert (found["subject"], found["level"]) == ("versions", "warning")
    assert str(found["text"]).endswith(f"upgrade notebook-cluster on '{MINI}'")
