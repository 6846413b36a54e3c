"""What may be typed as the value of an option, and what is said when it may not."""

import datetime
import time
from pathlib import Path

import pytest

from notebook_cluster.cli import main
from notebook_cluster.cli.arguments import parse
from notebook_cluster.cli.values import next_time


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shar"], ["shar", "share"]),
        (["share", "--nam", "mini"], ["--nam"]),
        (["share", "--name", "a/b"], ["a/b", "letters"]),
        (["share", "--name", "local"], ["local", "another name"]),
        (["share", "--port", "70000"], ["70000", "65535"]),
        (["share", "--lease", "0"], ["0", "seconds"]),
        (["stop"], ["CLUSTER"]),
        (["stop", "nowhere"], ["nowhere", "no cluster runs"]),
        (["detach", "nowhere"], ["nowhere"]),
        (["status", "nowhere"], ["nowhere"]),
        (["share", "--code", "cat"], ["'cat'", "6"]),
        (["share", "--code", "123456"], ["too easy"]),
        (["share", "--code-minutes", "soon"], ["'soon'", "minutes"]),
        (["share", "--code-minutes", "5"], ["--code-minutes", "--code"]),
        (["share", "--code", "tiger-lamp-42", "--no-code"], ["--no-code", "--code"]),
        (["share", "--dial", "desk"], ["'desk'", "HOST:PORT"]),
        (["share", "--dial", "desk:0"], ["'desk:0'", "HOST:PORT"]),
        (["share", "--dial", "desk:99999"], ["HOST:PORT"]),
        (["share", "--dial", "a b:1"], ["HOST:PORT"]),
        (["share", "--max-nodes", "0"], ["'0'", "1 or more"]),
        (["share", "--max-nodes", "-1"], ["'-1'"]),
        (["share", "--devices", "gpu"], ["'gpu'", "cuda:0"]),
        (["share", "--devices", ","], ["','", "device"]),
        (["share", "--devices", "cpu:1"], ["'cpu:1'"]),
        (["share", "--memory", "8"], ["'8'", "8GB"]),
        (["share", "--memory", "0GB"], ["'0GB'", "8GB"]),
        (["share", "--memory", "lots"], ["'lots'"]),
        (["share", "--on-power", "101"], ["'101'", "0 to 100"]),
        (["share", "--on-power", "nan"], ["'nan'", "0 to 100"]),
        (["share", "--until", "25:00"], ["'25:00'", "17:00"]),
        (["share", "--until", "noon"], ["'noon'", "17:00"]),
        (["share", "--confirm"], ["--confirm", "terminal"]),
        (["share", "--join"], ["--join", "--dial", "terminal"]),
        (["pair", "a/b", "--code", "tiger-lamp-42"], ["'a/b'", "HOST:PORT"]),
        (["pair", "mini", "--code", "x"], ["'x'"]),
        (["trust", "remove"], ["NAME|OWNER|FINGERPRINT"]),
        (["doctor", "--packages", "../x"], ["'../x'", "package"]),
    ],
)
def test_a_bad_value_is_one_line_with_the_way_out(
    jupyter_dirs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    assert all(word in said.err for word in words), said.err


def test_everything_that_share_understands() -> None:
    typed = (
        "share --name mini --port 4711 --data-dir /x --lease 60 --code Tiger_Lamp42 --code-minutes 45 --max-nodes 2 "
        "--devices cpu,cuda:0,cpu --memory 1.5GB --idle-only --on-power 40% --confirm --no-qr"
    )
    options = parse(typed.split())
    assert (options.name, options.port, options.data_dir, options.lease) == ("mini", 4711, Path("/x"), 60)
    assert (options.code, options.code_minutes) == ("tiger-lamp42", 45)
    assert (options.max_nodes, options.devices, options.memory) == (2, ("cpu", "cuda:0"), 1_500_000_000)
    assert (options.idle_only, options.on_power, options.confirm, options.no_qr) == (True, 40.0, True, True)
    assert parse(["share", "--on-power"]).on_power == 30.0
    assert parse(["share", "--memory", "500 mib"]).memory == 500 * 2**20
    assert parse(["share", "--dial", "desk.local:04711"]).dial == "desk.local:4711"


@pytest.mark.parametrize(
    ("now", "hour", "minute", "expected"),
    [
        ((2026, 3, 1, 16, 59, 59), 17, 0, (2026, 3, 1, 17, 0)),
        ((2026, 3, 1, 17, 0, 0), 17, 0, (2026, 3, 2, 17, 0)),
        ((2026, 12, 31, 23, 30, 0), 0, 15, (2027, 1, 1, 0, 15)),
    ],
)
def test_until_is_the_next_time_that_the_clock_shows(
    now: tuple[int, int, int, int, int, int], hour: int, minute: int, expected: tuple[int, int, int, int, int]
) -> None:
    found = next_time(hour, minute, datetime.datetime(*now))
    assert datetime.datetime.fromtimestamp(found) == datetime.datetime(*expected)


def test_until_a_night_that_is_an_hour_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        now = datetime.datetime(2026, 3, 28, 18, 0)
        assert next_time(17, 0, now) - now.timestamp() == 22 * 3600
    finally:
        monkeypatch.undo()
        time.tzset()
