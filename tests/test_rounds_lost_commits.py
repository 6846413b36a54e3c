"""A machine that loses power, and with it the last commits of a job of which every step is a round."""

import pytest
from msgspec.structs import replace

from notebook_cluster.journal.records import CommitRecord, SealRecord
from notebook_cluster.protocol import rounds as p
from notebook_cluster.rounds.leader import machine as rounds
from tests.rounds_helpers import Cluster, register, sent, told

START = 1 << 20


def trained(names="abc", last=3):
    """(a cluster that has committed ``last`` rounds, what a node reports of each)."""
    cluster = Cluster(names)
    for name in names:
        cluster.say(name, register("h0", every_step=True))
    for number in range(1, last + 1):
        cluster.arrive(names, number=number, base=f"h{number - 1}")
        slices = ["x"] * len(cluster.job.open.seal.slices)
        cluster.prepare(names, number=number, state_hash=f"h{number}", slices=slices)
    seals = [record.seal for record in cluster.records if isinstance(record, SealRecord)]
    commits = [record.commit for record in cluster.records if isinstance(record, CommitRecord)]
    rows = [p.CommittedRound(seal=s, slice_hashes=slices, commit=c) for s, c in zip(seals, commits, strict=True)]
    return cluster, rows


def lose_power(cluster, kept, names="abc"):
    """The journal ends with the COMMIT of round ``kept``; what the next coordinator asks."""
    while not (isinstance(cluster.records[-1], CommitRecord) and cluster.records[-1].commit.round == kept):
        cluster.records.pop()
    return cluster.restart(names, running=names, attempts=START)


def report(cluster, node, rows, start=START):
    return cluster.say(node, p.CommitReport(job="model", start=start, rounds=rows))


def test_every_step_is_written_and_need_not_be_synced():
    cluster, _ = trained(last=1)
    logs = [effect for effect in cluster.effects if isinstance(effect, rounds.Log)]
    assert [log.durable for log in logs] == [not isinstance(log.record, SealRecord | CommitRecord) for log in logs]


def test_the_newest_commit_that_a_node_has_counts_and_is_in_the_journal_again():
    cluster, rows = trained()
    before = list(cluster.records)
    asked = sent(lose_power(cluster, 1), p.CommitQuery)
    assert {name: (query.round, query.start) for name, query in asked.items()} == dict.fromkeys("abc", (1, START))
    assert not sent(report(cluster, "a", rows[1:2]) + report(cluster, "b", []), p.RoundQuery)
    effects = report(cluster, "c", rows[1:])
    assert (cluster.job.round, cluster.job.state_hash) == (3, "h3")
    commits = [record for record in before if isinstance(record, CommitRecord)]
    assert [record for record in cluster.records if isinstance(record, CommitRecord)] == commits
    assert sent(effects, p.RoundQuery).keys() == {"a", "b", "c"}
    assert "lost rounds 2 to 3 of 'model'" in told(effects, "warning")[0]
    cluster.status("a", 2, "h2")
    again = cluster.status("b", 2, "h2", attempt=1, phase="prepared", prepared_round=3, prepared_state_hash="h3")
    assert sent(again, p.Commit, "b")[0] == rows[2].commit
    cluster.status("c", 3, "h3")
    cluster.arrive("a", number=3, base="h2")
    assert sent(cluster.effects, p.Behind, "a")[-1].counted


def test_attempts_go_on_above_all_that_may_have_been_lost():
    cluster, rows = trained(last=2)
    lose_power(cluster, 1)
    for name in "abc":
        report(cluster, name, rows[1:])
    for name in "abc":
        cluster.status(name, 2, "h2")
    assert sent(cluster.arrive(number=3, base="h2"), p.Seal, "a")[0].attempt == START + 1


def test_nothing_is_decided_before_all_have_said_what_was_committed_or_some_time_has_passed():
    cluster, rows = trained(last=2)
    lose_power(cluster, 1)
    report(cluster, "a", rows[1:])
    report(cluster, "b", rows[1:])
    assert rounds.job_views(cluster.state)[0].waiting_for == ["c"]
    assert not sent(cluster.feed(rounds.Tick(219.0)), p.RoundQuery)
    assert sent(cluster.feed(rounds.Tick(221.0)), p.RoundQuery).keys() == {"a", "b", "c"}
    assert cluster.job.round == 2
    assert rounds.job_views(cluster.state)[0].waiting_for == ["a", "b"]


def test_a_node_whose_process_ends_is_not_waited_for():
    cluster, rows = trained(last=2)
    lose_power(cluster, 1)
    report(cluster, "a", rows[1:])
    report(cluster, "b", rows[1:])
    assert sent(cluster.lose("c"), p.RoundQuery).keys() == {"a", "b"}


def test_a_node_that_gets_out_of_reach_meanwhile_may_have_the_only_commit_and_is_waited_for():
    cluster, rows = trained("ab", last=2)
    lose_power(cluster, 1, "ab")
    report(cluster, "a", [])
    assert not sent(cluster.lose("b", gone=False), p.RoundQuery)
    assert sent(cluster.feed(rounds.MemberUp("b", 1, 1)), p.CommitQuery).keys() == {"b"}
    assert sent(report(cluster, "b", rows[1:]), p.RoundQuery).keys() == {"a", "b"}
    assert (cluster.job.round, cluster.job.state_hash) == (2, "h2")


def test_a_node_that_stays_out_of_reach_is_waited_for_as_long_as_one_that_says_nothing():
    cluster, _ = trained("ab", last=2)
    lose_power(cluster, 1, "ab")
    report(cluster, "a", [])
    cluster.lose("b", gone=False)
    assert not sent(cluster.feed(rounds.Tick(219.0)), p.RoundQuery)
    assert sent(cluster.feed(rounds.Tick(221.0)), p.RoundQuery).keys() == {"a"}


def test_an_answer_to_the_coordinator_before_says_nothing():
    cluster, rows = trained(last=2)
    lose_power(cluster, 1)
    for name in "abc":
        report(cluster, name, rows[1:], start=START - (1 << 10))
    assert (cluster.job.round, cluster.job.reporting) == (1, {"a", "b", "c"})


def test_rounds_that_were_voided_come_not_back():
    cluster, rows = trained("ab", last=2)
    cluster.records = [record for record in cluster.records if getattr(record, "commit", None) != rows[1].commit]
    cluster.restart("ab", running="ab", attempts=START)
    for name in "ab":
        report(cluster, name, [])
    for name in "ab":  # none has applied it: both arrive for it once more, and it is played again
        cluster.status(name, 1, "h1")
    cluster.arrive("ab", number=2, base="h1")
    cluster.prepare("ab", number=2, attempt=START + 1, state_hash="other")
    assert (cluster.job.round, cluster.job.state_hash) == (2, "other")
    cluster.restart("ab", running="ab", attempts=2 * START)
    for name in "ab":  # the one of the first start is older, however many rounds there were of it
        report(cluster, name, [rows[1]])
    assert (cluster.job.round, cluster.job.state_hash) == (2, "other")


def test_of_two_starts_the_later_one_counts_however_many_rounds_there_were_before():
    cluster, rows = trained("ab", last=3)
    later = [replace(part, round=2, attempt=START + 1) for part in (rows[1].seal, rows[1].commit)]
    newer = replace(rows[1], seal=later[0], commit=replace(later[1], state_hash="later"))
    while len(cluster.records) > 5:
        cluster.records.pop()
    assert isinstance(cluster.records[-1], CommitRecord)
    cluster.restart("ab", running="ab", attempts=2 * START)
    report(cluster, "a", rows[1:], 2 * START)
    report(cluster, "b", [newer], 2 * START)
    assert (cluster.job.round, cluster.job.state_hash) == (2, "later")


def test_who_came_to_the_newest_one_without_those_before_has_it_all_the_same():
    cluster, rows = trained(last=3)
    lose_power(cluster, 1)
    report(cluster, "a", rows[2:])
    report(cluster, "b", [])
    effects = report(cluster, "c", [])
    assert (cluster.job.round, cluster.job.state_hash) == (3, "h3")
    assert sent(effects, p.Commit, "b")[0] == rows[2].commit


IMPOSSIBLE = [
    lambda row: replace(row, commit=replace(row.commit, attempt=1 << 70), seal=replace(row.seal, attempt=1 << 70)),
    lambda row: replace(row, commit=replace(row.commit, round=1 << 70), seal=replace(row.seal, round=1 << 70)),
    lambda row: replace(row, commit=replace(row.commit, members=["a"])),
    lambda row: replace(row, commit=replace(row.commit, state_hash="h" * 1000)),
    lambda row: replace(row, seal=replace(row.seal, members=[replace(row.seal.members[0], name="stranger")])),
    lambda row: replace(row, seal=replace(row.seal, members=[replace(m, weight_bits=-1) for m in row.seal.members])),
    lambda row: replace(row, seal=replace(row.seal, slices=[p.Slice(owner="a", start=-1, stop=1 << 70)])),
    lambda row: replace(row, seal=replace(row.seal, outer=replace(row.seal.outer, lr_bits=1 << 40))),
    lambda row: replace(row, slice_hashes=[]),
]


@pytest.mark.parametrize("change", IMPOSSIBLE)
def test_what_cannot_have_been_decided_is_not_taken(change):
    cluster, rows = trained(last=2)
    lose_power(cluster, 1)
    effects = report(cluster, "a", [change(rows[1])])
    assert "'a' says of the committed rounds of 'model' cannot be" in told(effects, "warning")[0]
    report(cluster, "b", [])
    report(cluster, "c", [])
    assert (cluster.job.round, cluster.job.state_hash) == (1, "h1")
