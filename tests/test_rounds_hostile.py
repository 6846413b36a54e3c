"""The coordinator's side of the rounds when a node says numbers that none of ours would say."""

import math

import msgspec
import pytest

from notebook_cluster.journal.records import Record
from notebook_cluster.protocol import rounds as p
from notebook_cluster.protocol import runs
from notebook_cluster.rounds.leader import machine as rounds
from tests.rounds_helpers import Cluster, register, sent, told

IMPOSSIBLE = [
    {"patience": math.nan}, {"patience": math.inf}, {"grace": math.nan}, {"mix": math.inf}, {"quorum": math.inf},
    {"quorum": math.nan}, {"fragments": 0}, {"fragments": -3}, {"fragments": 3, "fragment_blocks": [100]},
    {"fragments": 2, "fragment_blocks": [100, -1]}, {"momentum_bits": -1}, {"lr_bits": 1 << 40},
    {"parameters": (1 << 64) - 1}, {"round": (1 << 64) - 1, "holds_state": True}, {"blocks": 1 << 60},
    {"resume": "x", "resume_round": (1 << 64) - 1}, {"cell": 2},
]  # fmt: skip


@pytest.mark.parametrize("numbers", IMPOSSIBLE, ids=str)
def test_a_registration_that_cannot_be_is_refused_by_its_name_and_the_others_train(numbers):
    cluster = Cluster()
    refused = sent(cluster.say("a", register("h7", **numbers)), runs.RegisterRefused, "a")[0].reason
    assert refused.startswith("'a' registers 'model' with ")
    assert any(name in refused for name in [*numbers, "outer settings"])
    cluster.feed(rounds.CellLeft(1, "a", "error"))
    cluster.train("bc")
    assert set(sent(cluster.arrive("bc"), p.Seal)) == {"b", "c"}


@pytest.mark.parametrize("numbers", [{"run": 10**9}, {"run": -5}, {"patience": 1e9}], ids=str)
def test_what_is_only_unusual_is_read_again_from_the_log(numbers):
    cluster = Cluster()
    cluster.say("a", register("h7", **numbers))
    cluster.train("bc")
    cluster.records = [msgspec.json.decode(msgspec.json.encode(record), type=Record) for record in cluster.records]
    cluster.restart()


def test_outer_settings_that_are_no_numbers_are_not_taken():
    cluster = Cluster("ab").train("ab")
    cluster.arrive("a", outer=p.OuterChange(lr_bits=1 << 40, momentum_bits=0))
    effects = cluster.arrive("b", outer=p.OuterChange(lr_bits=1 << 20, momentum_bits=0))
    assert sent(effects, p.Seal, "a")[0].outer.lr_bits == 1 << 20


@pytest.mark.parametrize("said", [(1 << 64) - 1, -(1 << 63)])
def test_counters_of_traffic_stay_what_a_view_can_be_told(said):
    cluster = Cluster("ab").train("ab")
    state_hash = "h0"
    for number in (1, 2, 3):
        cluster.arrive("ab", number=number, base=state_hash)
        state_hash = f"h{number}"
        cluster.prepare("ab", number=number, state_hash=state_hash)
        cluster.say("b", p.Applied(job="model", round=number, state_hash=state_hash, bytes_sent=said, steps=said))
    (view,) = rounds.job_views(cluster.state)
    assert view.bytes_sent >= 0
    assert view.bytes_data_parallel >= 0
    msgspec.msgpack.encode(view)


def test_hashes_in_a_line_for_people_are_printable():
    cluster = Cluster("ab").train("ab")
    cluster.arrive("ab")
    cluster.prepare("b", state_hash="\x1b[2J\n\x07..")
    (line,) = told(cluster.prepare("a"), "warning")
    assert line.isprintable()
