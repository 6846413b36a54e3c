"""A cluster on hosts that are reached with SSH: a real sshd on each of two hosts, which are network namespaces."""

import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.protocol.launches import LaunchKey
from notebook_cluster.security import data_directory
from tests.cluster import running_cluster, told
from tests.command import COMMAND
from tests.conftest import MARK, marked_processes, shared_folders, wait_until
from tests.engines.running import SshHosts, no_ssh, ssh_hosts, where_it_stands

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(bool(no_ssh()), reason=no_ssh() or "there are some"),
]
PASSED_ON = ("PYTHONPATH", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", MARK)


@pytest.fixture(name="hosts", scope="module")
def running_hosts() -> Iterator[SshHosts]:
    with shared_folders() as root, pytest.MonkeyPatch.context() as patch, ssh_hosts() as hosts:
        work = root / "work"
        work.mkdir()
        patch.chdir(work)
        yield hosts


def setup() -> str:
    """What a login shell of a real host would have done."""
    passed = [f"{name}={shlex.quote(os.environ[name])}" for name in PASSED_ON if name in os.environ]
    return f"export PATH={shlex.quote(str(Path(COMMAND).parent))}:$PATH {' '.join(passed)}"


def agents() -> list[str]:
    """The command lines of agents on the hosts."""
    found = marked_processes(os.environ[MARK]).values()
    return [line for line in found if "share --dial" in line and not line.split()[0].endswith("/ssh")]


def test_hosts_train_together_and_the_key_stands_nowhere(hosts: SshHosts) -> None:
    with running_cluster("lesson", on="ssh:h1,h2", setup=setup(), address=hosts.address) as cluster:
        ended, outputs = cluster.run("import socket\nprint(socket.gethostname(), nc.mean_metrics(x=rank)['x'])")
        assert ended.status == "ok", ended
        assert {output.content["text"] for output in outputs} == {"h1 0.5\n", "h2 0.5\n"}
        (launch,) = cluster.launches()
        assert launch.text == "ssh h1,h2: 2 running"
        path = data_directory() / "launches" / launch.launch / "key.json"
        secret = msgspec.json.decode(path.read_bytes(), type=LaunchKey).secret_key
        assert where_it_stands(secret) == []
        assert len([line for line in agents() if "--launch-key -" in line]) == 2
        assert cluster.shrink(1) == ["h2"] or names(cluster) == {"h2"}
        assert len(names(cluster)) == 1
    wait_until(lambda: not agents(), what=lambda: str(agents()))
    assert not path.exists()


def names(cluster: Cluster) -> set[str]:
    return {node.name for node in cluster.state().nodes if node.condition == "ok"}


def test_a_host_without_notebook_cluster_is_named_with_what_helps(hosts: SshHosts) -> None:
    error = (
        r"ssh h1: no notebook-cluster on its PATH \(.*not found\): ssh h1 pip install notebook-cluster, or .*--setup"
    )
    with pytest.raises(ClusterError, match=error):
        Cluster.start("bare", on="ssh:h1", address=hosts.address)


def test_a_host_that_asks_for_a_password_is_named_and_the_other_one_is_used(hosts: SshHosts) -> None:
    config = hosts.folder / "config"
    h1 = re.search(r"HostName (\S+)", config.read_text())
    assert h1 is not None
    config.write_text(f"Host locked\n  HostName {h1[1]}\n  PubkeyAuthentication no\n" + config.read_text())
    with running_cluster("half", on="ssh:locked,h2", setup=setup(), address=hosts.address) as cluster:
        line = told(cluster, "Permission denied")
        assert "ssh locked must work without a password (ssh-keygen, then ssh-copy-id locked)" in line
        assert names(cluster) == {"h2"}


def test_a_coordinator_that_dies_takes_its_hosts_with_it_and_the_next_one_says_so(hosts: SshHosts) -> None:
    with running_cluster("brief", on="ssh:h2", setup=setup(), address=hosts.address) as cluster:
        os.kill(cluster.connection.file.pid, signal.SIGKILL)
        wait_until(lambda: not agents(), what=lambda: str(agents()))
        cluster.connection.wait_closed()
        with Cluster.start("brief", local=0) as again:
            assert told(again, "has ended there: it is gone")
            assert not again.state().nodes
            again.stop()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"on": "ssh:"}, "name hosts of ~/.ssh/config with commas between"),
        ({"on": "ssh:-oProxyCommand=true"}, "name hosts of ~/.ssh/config with commas between"),
        ({"on": "ssh:h1", "hosts": 2}, "these are 1 hosts, leave --hosts out"),
        ({"on": "ssh:h1", "partition": "gpu"}, "it does not know --partition"),
        ({"on": "ssh:h1", "setup": "a\nb"}, "--setup 'a.nb' cannot be used"),
    ],
)
def test_what_ssh_cannot_use_is_refused_before_anything_starts(
    hosts: SshHosts, options: dict[str, object], error: str
) -> None:
    with pytest.raises(ClusterError, match=error):
        Cluster.start("refused", address=hosts.address, **options)  # type: ignore[arg-type]
