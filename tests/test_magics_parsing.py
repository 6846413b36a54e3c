"""What is typed after the magics: options, targets, names, completion."""

import pytest

from notebook_cluster.magics.completion import complete
from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.grammar import COMMANDS, ON, ON_ALL, PUSH
from notebook_cluster.magics.parsing import (
    find_node,
    help_on,
    help_text,
    parse_cluster,
    parse_line,
    resolve,
    wants_help,
)
from notebook_cluster.magics.session import default_cluster_name
from notebook_cluster.protocol.state import NodeView


def node(name, rank, device="cpu", condition="ok", reason=""):
    return NodeView(
        name=name, rank=rank, peer=name, device=device, device_name=device, incarnation=1, condition=condition,
        reason=reason,
    )  # fmt: skip


NODES = [
    node("desk", 1, "cuda:0"),
    node("mini", 0),
    node("air", 2, "mps"),
    node("rack-1", 3, "cuda:1"),
    node("old", None, "cpu", "dead", "killed by SIGKILL"),
]


def error(call, *arguments):
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


# ---- %cluster


def test_start_reads_name_and_every_option():
    call = parse_cluster("start digits --local 2 --nodes=4 --peers mini,desk --fresh --no-panel")
    assert call.command is COMMANDS["start"]
    assert call.argument == "digits"
    assert call.options == {"local": 2, "nodes": 4, "peers": ("mini", "desk"), "fresh": True, "no_panel": True}


@pytest.mark.parametrize("typed", ["tiger-lamp-42", "'Tiger lamp 42'", "TIGER_LAMP_42"])
def test_a_code_is_read_as_people_write_it(typed):
    assert parse_cluster(f"add mini --code {typed}").options == {"code": "tiger-lamp-42"}


def test_an_invitation_has_a_code_and_a_time():
    call = parse_cluster("invite --code open-house-31 --minutes 30")
    assert call.options == {"code": "open-house-31", "minutes": 30.0}
    assert parse_cluster("invite --close").options == {"close": True}


def test_the_bench_reads_megabytes():
    assert parse_cluster("bench --mb 4").options == {"mb": 4}


def test_the_doctor_reads_names_of_packages():
    assert parse_cluster("doctor --packages torch,pandas").options == {"packages": ("torch", "pandas")}


def test_options_that_were_not_typed_are_absent():
    assert parse_cluster("start").options == {}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_parses_with_its_argument(name):
    argument = {"estimate": "1.1B", "shrink": "2"}.get(name, "mini") if COMMANDS[name].argument else ""
    assert parse_cluster(f"{name} {argument}").command.name == name


@pytest.mark.parametrize(
    ("text", "number"), [("1.1e9", 1_100_000_000), ("124M", 124_000_000), ("7b", 7 * 10**9), ("12", 12)]
)
def test_a_number_of_parameters_is_read_as_people_write_it(text, number):
    assert parse_cluster(f"estimate {text}").argument == str(number)


@pytest.mark.parametrize("text", ["7G", "M", "0", "3MM", "nan", "1e99"])
def test_what_is_no_number_of_parameters_names_what_was_typed(text):
    assert error(parse_cluster, f"estimate {text}") == (
        f"%cluster estimate {text}: say how many parameters the model has, as 124M, 1.1B or 1.1e9"
    )


@pytest.mark.parametrize("line", ["", "  ", "help", "--help", "-h", "start --help", "start mini -h", "nonsense --help"])
def test_nothing_or_help_asks_for_the_help(line):
    assert parse_cluster(line) is None


def test_the_help_names_every_subcommand_and_magic():
    text = help_text()
    assert all(f"%cluster {name}" in text for name in COMMANDS)
    assert all(magic in text for magic in ("%%on_all", "%%on ", "%push"))
    assert all(option.usage in text for command in COMMANDS.values() for option in command.options)


def test_the_help_on_a_subcommand_is_of_that_one():
    text = help_on("runs --help")
    assert text.startswith("%cluster runs ")
    assert "\n%" not in text
    assert help_on("--help") == help_on("nonsense -h") == help_text()
    assert help_text(ON).startswith("%%on TARGETS...")
    assert wants_help("0,2 --help")
    assert not wants_help("helper --head help")


def test_unknown_subcommand_names_it_the_nearest_and_all():
    text = error(parse_cluster, "strat")
    assert "'strat'" in text
    assert "did you mean 'start'?" in text
    assert "detach" in text


def test_unknown_option_names_it_the_nearest_and_all():
    text = error(parse_cluster, "start --lokal 2")
    assert "--lokal (did you mean '--local'?)" in text
    assert "--peers" in text


def test_an_option_of_a_command_without_options_says_so():
    assert "It has none" in error(parse_cluster, "detach --now")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("start --local many", ["--local", "whole number from 0 to 64", "'many'"]),
        ("start --local=-1", ["--local", "'-1'"]),
        ("start --local", ["--local needs a value", "--local N"]),
        ("start --local --fresh", ["--local needs a value"]),
        ("start --nodes 0", ["--nodes", "from 1 to 64"]),
        ("start --peers ,", ["--peers", "'all'"]),
        ("start --fresh=yes", ["--fresh takes no value", "'yes'"]),
        ("start one two", ["'two'"]),
        ("start a/b", ["cluster name 'a/b'"]),
        ("start 3", ["%cluster start --local 3 has so many nodes on this machine"]),
        ("start nodes=3", ["an option has two dashes, %cluster start --nodes 3"]),
        ("nodes", ["no subcommand 'nodes': %cluster status shows nodes"]),
        ("push x", ["no subcommand 'push': %push NAME"]),
        ("start --code abc", ["code 'abc'", "3 letters and digits", "tiger-lamp-42"]),
        ("add mini --code", ["--code needs a value"]),
        ("add mini tiger-lamp-42", ["does not take 'tiger-lamp-42' (did you mean '--code tiger-lamp-42'?)"]),
        ("add mini red-lamp-42", ["does not take 'red-lamp-42': %cluster add"]),
        ("add mini --nodes 2", ["has no option --nodes (did you mean '--count'?)"]),
        ("add mini --code=", ["code ''", "tiger-lamp-42"]),
        ("invite --minutes soon", ["a number of minutes above 0", "'soon'"]),
        ("invite mini", ["'mini'"]),
        ("doctor --packages ,", ["names of packages"]),
        ("add", ["needs PEER|HOST:PORT"]),
        ("restart", ["needs NODE"]),
        ("status now", ["'now'"]),
        ("start 'digits", ["cannot be read"]),
    ],
)
def test_bad_values_are_named(line, parts):
    text = error(parse_cluster, line)
    assert all(part in text for part in parts), text


# ---- %%on_all, %%on, %push


def test_on_all_options():
    assert parse_line(ON_ALL, "--timeout 2.5 --no-replay").options == {"timeout": 2.5, "no_replay": True}


@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan"])
def test_a_timeout_is_a_number_of_seconds_above_zero(value):
    assert "a number of seconds above 0" in error(parse_line, ON_ALL, f"--timeout={value}")


def test_on_all_takes_no_targets():
    assert "'mini'" in error(parse_line, ON_ALL, "mini")


def test_on_needs_targets():
    assert "%%on needs TARGETS" in error(parse_line, ON, "--timeout 3")


def test_on_takes_several_targets_and_options_between():
    call = parse_line(ON, "0 --timeout 3 !mini")
    assert call.arguments == ("0", "!mini")


def test_push_takes_several_names():
    assert parse_line(PUSH, "x y").arguments == ("x", "y")


# ---- targets


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["0"], ["mini"]),
        (["0,2"], ["mini", "air"]),
        (["0-3"], ["mini", "desk", "air", "rack-1"]),
        (["desk,mini"], ["mini", "desk"]),
        (["cuda"], ["desk", "rack-1"]),
        (["mps", "cpu"], ["mini", "air"]),
        (["!mini"], ["desk", "air", "rack-1"]),
        (["cuda,!rack-1"], ["desk"]),
        (["all,!0-1"], ["air", "rack-1"]),
        (["rack-1"], ["rack-1"]),
        (["!old"], ["mini", "desk", "air", "rack-1"]),
        (["0", "0,mini"], ["mini"]),
    ],
)
def test_targets_mean_nodes_in_rank_order(words, names):
    assert resolve(words, NODES) == names


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["dask"], ["'dask'", "did you mean 'desk'?", "0 mini, 1 desk"]),
        (["!dask"], ["'dask'", "did you mean 'desk'?"]),
        (["7"], ["rank 7", "0 mini"]),
        (["0-7"], ["rank 7"]),
        (["2-0"], ["backwards", "0-2"]),
        (["rocm"], ["'rocm'", "desk cuda:0"]),
        (["old"], ["'old' is dead (killed by SIGKILL)", "%cluster restart old"]),
        (["mini,!0"], ["no node is left"]),
    ],
)
def test_targets_that_mean_nothing_name_what_there_is(words, parts):
    text = error(resolve, words, NODES)
    assert all(part in text for part in parts), text


def test_targets_in_an_empty_cluster_say_how_to_add_a_node():
    assert "%cluster add" in error(resolve, ["0"], [])


def test_one_node_is_found_by_name_or_rank_even_when_it_is_dead():
    assert find_node("old", NODES) == "old"
    assert find_node("1", NODES) == "desk"
    assert "did you mean 'mini'?" in error(find_node, "mimi", NODES)


# ---- the cluster's name


@pytest.mark.parametrize(
    ("namespace", "environment", "name"),
    [
        ({}, {"JPY_SESSION_NAME": "/home/ann/My first net.ipynb"}, "My-first-net"),
        ({}, {"JPY_SESSION_NAME": "lessons/02_text.ipynb"}, "02_text"),
        ({"__vsc_ipynb_file__": "C:\\work\\digits.ipynb"}, {}, "digits"),
        ({}, {"JPY_SESSION_NAME": "console-1"}, "cluster"),
        ({}, {"JPY_SESSION_NAME": "日本.ipynb"}, "cluster"),
        ({}, {}, "cluster"),
    ],
)
def test_the_default_name_is_the_notebooks(namespace, environment, name):
    assert default_cluster_name(namespace, environment) == name


# ---- completion


def names(kind):
    return {
        "NODE": ["mini", "desk"], "PEER": ["air"], "CLUSTER": ["digits"], "RANK": ["0", "1", "2"],
        "MEMORY": ["ram>=16GB", "vram>=8GB"],
    }[kind]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "found", "typed"),
    [
        ("%cluster sta", ["start", "status"], "sta"),
        ("%cluster start --pe", ["--peers"], "--pe"),
        ("%cluster restart m", ["mini"], "m"),
        ("%cluster logs ", ["mini", "desk"], ""),
        ("%cluster add a", ["air", "all"], "a"),
        ("%cluster attach ", ["digits"], ""),
        ("%cluster inv", ["invite"], "inv"),
        ("%cluster add air --", ["--code", "--count"], "--"),
        ("%cluster invite ", ["--code", "--minutes", "--close"], ""),
        ("%%on m", ["mini", "mps"], "m"),
        ("%%on mini,d", ["desk"], "d"),
        ("%%on !d", ["desk"], "d"),
        ("%%on 1", ["1"], "1"),
        ("%%on 1-", ["1-2"], "1-"),
        ("%%on mini,v", ["vram>="], "v"),
        ("%%on !vram>=", ["vram>=8GB"], "vram>="),
        ("%%on_all --canary d", ["desk"], "d"),
        ("%%on_all --a", ["--async"], "--a"),
        ("%cluster cells ", ["all", "local"], ""),
        ("%cluster cells l", ["local"], "l"),
        ("%%lo", ["%%local"], "%%lo"),
        ("%%on_all --t", ["--timeout"], "--t"),
        ("%cluster send data.csv --to d", ["desk"], "d"),
        ("%cluster send data", [], "data"),
        ("%pull loss --f", ["--from"], "--f"),
        ("%pull loss --from mini,d", ["desk"], "d"),
        ("%push lo", [], "lo"),
        ("x = cluster", [], ""),
        ("%cluster nothing ", [], ""),
    ],
)
def test_completion(text, found, typed):
    assert complete(text, names) == (found, typed)
