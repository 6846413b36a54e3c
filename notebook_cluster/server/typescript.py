"""TypeScript types of what server and sidebar say to each other, from the structs in ``protocol/sidebar.py``.

``python -m notebook_cluster.server.typescript`` writes ``labextension/src/generated.ts`` of this checkout; with
``--check`` it only says whether that is what it would write (exit code 1: it is not). json-schema-to-typescript, one of
the packages of ``labextension/``, makes them of msgspec's JSON schema.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.protocol import sidebar

_LABEXTENSION = Path(__file__).resolve().parents[2] / "labextension"
TARGET = _LABEXTENSION / "src" / "generated.ts"
TOOL = _LABEXTENSION / "node_modules" / "json-schema-to-typescript" / "dist" / "src" / "cli.js"
_HEAD = """// Made by `python -m notebook_cluster.server.typescript` from notebook_cluster/protocol/sidebar.py.
// Do not edit. What the server sends has every field; numbers that are not finite are null.
"""
_FROM_BROWSER = ("Action", "StartLaunch")
_LAYOUT = ("--no-additionalProperties", "--style.printWidth=120", "--style.singleQuote")


def generate() -> str:
    """The whole file. OSError where Node.js or the package is missing."""
    node = shutil.which("node", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if node is None or not TOOL.is_file():
        raise OSError(f"{'Node.js' if node is None else TOOL} is missing: make labextension installs it")
    command = [node, str(TOOL), *_LAYOUT, f"--bannerComment={_HEAD}"]
    text = subprocess.run(command, input=json.dumps(_schema()), stdout=subprocess.PIPE, text=True, check=True).stdout
    return text.replace("(number | null) | null", "number | null")


def _schema() -> dict[str, Any]:
    messages = [struct.__name__ for struct in typing.get_args(sidebar.ServerMessage)]
    (server, action), structs = msgspec.json.schema_components(
        [sidebar.ServerMessage, sidebar.Action], ref_template="#/definitions/{name}"
    )
    for name, struct in structs.items():
        if name not in messages:  # only whole messages say what they are; what is inside them is known by its place
            struct["properties"].pop("type", None)
        if name not in _FROM_BROWSER:  # of the server every field comes; the browser leaves out what has a default
            struct["required"] = list(struct["properties"])
        struct["description"] = struct.get("description", "").partition("\n")[0].replace("``", "`")
    named = {"title": "ServerMessage", "anyOf": server["anyOf"]}
    return {"title": "SidebarMessage", "anyOf": [named, action], "definitions": _finite(structs)}


def _finite(schema: Any) -> Any:
    """Numbers may be null, whole ones never are; a default says nothing about the type."""
    if isinstance(schema, list):
        return [_finite(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    number = {"type": ["number", "null"]} if schema.get("type") == "number" else {}
    return {key: _finite(part) for key, part in schema.items() if key != "default"} | number


def main(arguments: list[str] | None = None) -> int:
    """Write or check the file; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m notebook_cluster.server.typescript", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when the file is out of date")
    options = parser.parse_args(arguments)
    try:
        text = generate()
        if options.check and TARGET.read_text() != text:
            raise OSError(f"{TARGET} is out of date: run python -m notebook_cluster.server.typescript")
    except (OSError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    if not options.check:
        TARGET.write_text(text)
        print(f"{TARGET} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
