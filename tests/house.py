"""The package as somebody sees who is new in it: how many files there are, how long they are, whether imports go in
circles, and whether a class name means one thing.

``python -m tests.house`` prints it, ``tests/test_house.py`` holds it to :data:`MOST`. An import counts wherever it
stands: in a function, or under ``TYPE_CHECKING``.
"""

import ast
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import grimp

PACKAGE = "notebook_cluster"
ROOT = Path(__file__).parent.parent
PURE_MACHINES = {f"{PACKAGE}.rounds.leader.events_effects", f"{PACKAGE}.rounds.member.events_effects"}
"""Both halves of the round protocol have a Tick and a Log: their events and effects may share names."""
MOST = {"files": 485, "lines": 87_721, "longest file": 360, "circles": 0, "class names used twice": 0}


@dataclass(frozen=True)
class House:
    """What was measured. ``lengths``: file -> lines; ``circles``: modules that import each other; ``twice``: public
    class name -> modules that each define one of that name."""

    lengths: dict[str, int]
    circles: list[list[str]]
    twice: dict[str, list[str]]

    def numbers(self) -> dict[str, int]:
        """The same names as in :data:`MOST`."""
        return {
            "files": len(self.lengths), "lines": sum(self.lengths.values()), "longest file": max(self.lengths.values()),
            "circles": len(self.circles), "class names used twice": len(self.twice),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """The numbers with what they may be, and by name what is too long, in a circle, or there twice."""
        shown = [f"{name}: {number} (at most {MOST[name]})" for name, number in self.numbers().items()]
        for file, length in sorted(self.lengths.items()):
            if length > MOST["longest file"]:
                shown.append(f"too long: {file}, {length} lines")
        shown += [f"circle: {', '.join(circle)}" for circle in self.circles]
        shown += [f"class {name}: {', '.join(modules)}" for name, modules in self.twice.items()]
        return shown


def measure(package: str = PACKAGE, root: Path = ROOT) -> House:
    """Read all Python files of ``package``, a folder below ``root`` that can be imported."""
    files = sorted((root / package).rglob("*.py"))
    return House(
        lengths={str(file.relative_to(root)): len(file.read_text().splitlines()) for file in files},
        circles=_circles(package),
        twice=_defined_twice({_module(file, root): file.read_text() for file in files}),
    )


def _module(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _circles(package: str) -> list[list[str]]:
    graph = grimp.build_graph(package, cache_dir=None)
    found = set()
    for module in graph.modules:
        circle = graph.find_upstream_modules(module) & graph.find_downstream_modules(module)
        if circle:
            found.add(frozenset(circle | {module}))
    return sorted(sorted(circle) for circle in found)


def _defined_twice(sources: dict[str, str]) -> dict[str, list[str]]:
    where = defaultdict(list)
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(module)
    return {
        name: modules
        for name, modules in sorted(where.items())
        if len(modules) > 1 and not set(modules) <= PURE_MACHINES
    }


if __name__ == "__main__":
    print("\n".join(measure().lines()))
