"""TypeScript types of what server and sidebar say to each other, from the structs in ``protocol/sidebar.py``.

``python -m notebook_cluster.server.typescript`` writes ``labextension/src/generated.ts`` of this checkout; with
``--check`` it only says whether that is what it would write (exit code 1: it is not).
"""

import argparse
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.protocol import sidebar

TARGET = Path(__file__).resolve().parents[2] / "labextension" / "src" / "generated.ts"
WIDTH = 120
_HEAD = """// Made by `python -m notebook_cluster.server.typescript` from notebook_cluster/protocol/sidebar.py.
// Do not edit. What the server sends has every field; numbers that are not finite are null.
"""
_UNIONS = {"ServerMessage": sidebar.ServerMessage}
_PLAIN = {str: "string", int: "number", float: "number | null", bool: "boolean", type(None): "null", Any: "unknown"}


def generate() -> str:
    """The whole file: an interface for each struct, those that are used first, then the unions."""
    structs: dict[type, None] = {}
    for root in (*typing.get_args(sidebar.ServerMessage), sidebar.Action):
        _collect(root, structs)
    parts = [_HEAD, *(_interface(struct) for struct in structs)]
    parts += [_declared(f"export type {name} =", " ", "", _members(union)) for name, union in _UNIONS.items()]
    return "\n".join(parts)


def _collect(kind: Any, structs: dict[type, None]) -> None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind not in structs:
            for field in typing.get_type_hints(kind).values():
                _collect(field, structs)
            structs[kind] = None
    else:
        for argument in typing.get_args(kind):
            _collect(argument, structs)


def _interface(struct: Any) -> str:
    # Its own only: that of the base class says nothing about it.
    said = struct.__dict__.get("__doc__")
    lines = [f"/** {said.splitlines()[0].replace('``', '`')} */"] if said else []
    lines.append(f"export interface {struct.__name__} {{")
    # Only whole messages say what they are; what is inside them is known by its place.
    lines += [f"  type: '{struct.__name__}';"] if struct in typing.get_args(sidebar.ServerMessage) else []
    from_browser = struct is sidebar.Action
    hints = typing.get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        optional = "?" if from_browser and not field.required else ""
        lines.append(_declared(f"  {field.name}{optional}:", " ", "  ", _members(hints[field.name])).rstrip("\n"))
    return "\n".join([*lines, "}", ""])


def _declared(name: str, space: str, indent: str, members: list[str]) -> str:
    """One declaration as prettier writes it: a union that is too long for the line goes into the next one, or, too long
    for that as well, has a line for each member."""
    line = f"{name}{space}{' | '.join(members)};"
    below = f"{indent}  {' | '.join(members)};"
    if len(line) > WIDTH and len(below) <= WIDTH:
        line = f"{name}\n{below}"
    elif len(line) > WIDTH:
        line = name + "".join(f"\n{indent}  | {member}" for member in members) + ";"
    return line + "\n"


def _members(kind: Any) -> list[str]:
    """The members of ``kind`` as a union in TypeScript, each once."""
    return list(dict.fromkeys(_each(kind)))


def _each(kind: Any) -> Iterator[str]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _PLAIN:
        yield from _PLAIN[kind].split(" | ")
    elif origin in (types.UnionType, typing.Union):
        members = [member for argument in arguments for member in _each(argument)]
        # null last, as one reads it.
        yield from sorted(members, key=lambda member: member == "null")
    elif origin is typing.Literal:
        yield from (f"'{value}'" for value in arguments)
    elif origin is list:
        members = _members(arguments[0])
        yield f"({' | '.join(members)})[]" if len(members) > 1 else f"{members[0]}[]"
    elif origin is dict:
        yield f"{{ [key: string]: {' | '.join(_members(arguments[1]))} }}"
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind.__name__
    else:
        raise TypeError(f"no TypeScript type is known for {kind!r}: add it to {__name__}")


def main(arguments: list[str] | None = None) -> int:
    """Write or check the file; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m notebook_cluster.server.typescript", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when the file is out of date")
    options = parser.parse_args(arguments)
    text = generate()
    if not TARGET.parent.is_dir():
        print(f"{TARGET.parent} is not there: this works in a checkout only", file=sys.stderr)
        return 1
    if options.check:
        if not TARGET.is_file() or TARGET.read_text() != text:
            print(f"{TARGET} is out of date: run python -m notebook_cluster.server.typescript", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text)
    print(f"{TARGET} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
