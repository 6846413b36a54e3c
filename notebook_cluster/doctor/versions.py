"""What the doctor says about versions: Python, drivers and the packages that the cluster's cells import."""

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from notebook_cluster.doctor.findings import Examined, listed, on, say
from notebook_cluster.protocol.names import distribution_name, is_distribution
from notebook_cluster.protocol.views import Finding

ALWAYS = ("notebook-cluster", "torch", "mlx", "numpy")
"""Compared where they are installed; that one of them is missing says nothing."""
_DRIVERS = ("cuda", "rocm")
_IMPORT = re.compile(r"^\s*(?:import|from)\s+([A-Za-z_]\w*)", re.MULTILINE)
_VERSION = re.compile(r"[0-9][A-Za-z0-9.!_-]{0,40}")
_ABSENT = "none"


def imported_modules(sources: Iterable[str]) -> set[str]:
    """Top-level modules outside the standard library that these cells import, also inside functions."""
    found: set[str] = set()
    for source in sources:
        python = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!", "?")))
        try:
            tree = ast.parse(python)
        except (SyntaxError, ValueError):
            found.update(_IMPORT.findall(python))
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


def distributions(modules: Iterable[str]) -> list[str]:
    """The packages of this machine that bring ``modules``. Reads every installed package's list of files: slow."""
    brought_by = importlib.metadata.packages_distributions()
    return sorted({distribution_name(name) for module in modules for name in brought_by.get(module, [])})


def versions(peers: Sequence[Examined], wanted: Sequence[str]) -> list[Finding]:
    """Compares every peer with the notebook's machine. ``wanted``: packages that must be on all of them."""
    reference = next((peer for peer in peers if peer.here), peers[0] if peers else None)
    if reference is None:
        return []
    required = [distribution_name(name) for name in wanted if is_distribution(name)]
    compared = list(dict.fromkeys((*ALWAYS, *required)))
    ours = reference.diagnosis.packages
    missing = [name for name in required if name not in ours and name not in ALWAYS]
    findings = [*_pythons(peers, reference), *_drivers(peers), *_packages(peers, reference, compared, set(required))]
    if missing:
        text = f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} not installed on {reference.name}"
        findings.append(say("versions", "info", f"{text}: nothing to compare with"))
    different = {row[0] for finding in findings for row in finding.table}
    same = [f"Python {_minor(reference)}"] if "python" not in different else []
    same += [name for name in compared if name in ours and name not in different]
    if same:
        names = listed([peer.name for peer in peers])
        findings.append(say("versions", "ok", f"{listed(same)}: no difference between {names}"))
    return findings


def _packages(
    peers: Sequence[Examined], reference: Examined, compared: Sequence[str], required: set[str]
) -> list[Finding]:
    """A table of the packages that differ, and a cell for each peer that makes them equal."""
    rows, fixes = [], {peer.name: list[str]() for peer in peers}
    for name in compared:
        ours = reference.diagnosis.packages.get(name)
        differing = [peer for peer in peers if _differs(ours, peer.diagnosis.packages.get(name), name in required)]
        if differing:
            rows.append([name, *(peer.diagnosis.packages.get(name, _ABSENT) for peer in peers)])
        for peer in differing:
            if ours is not None and _VERSION.fullmatch(_public(ours)):
                fixes[peer.name].append(f"{name}=={_public(ours)}")
    if not rows:
        return []
    others = listed([name for name, packages in fixes.items() if packages] or [peer.name for peer in peers])
    text = f"{listed([row[0] for row in rows])}: {others} and {reference.name} have different versions"
    fix = "\n\n".join(_install(peer, fixes[peer.name]) for peer in peers if fixes[peer.name])
    table = [["package", *(peer.name for peer in peers)], *rows]
    return [say("versions", "warning", text, fix or "install the same version on all of them", table)]


def _install(peer: Examined, packages: Sequence[str]) -> str:
    """A cell for the notebook; where no node runs there, and for this package itself, a line for that machine."""
    own = [package for package in packages if package.startswith("notebook-cluster==")]
    others = [package for package in packages if package not in own]
    parts = []
    if others and peer.nodes:
        parts.append(f"%%on {peer.nodes[0]}\n%pip install {' '.join(others)}")
    elif others:
        parts.append(on(peer.name, f"pip install {' '.join(others)}"))
    if own:
        parts.append(on(peer.name, f"pip install {own[0]}  # then notebook-cluster share again"))
    return "\n\n".join(parts)


def _differs(ours: str | None, theirs: str | None, required: bool) -> bool:
    if ours is None or theirs is None:
        return required and ours is not None
    return _public(ours) != _public(theirs)


def _public(version: str) -> str:
    """``2.4.0+cu121`` and ``2.4.0+cpu`` are one release for different devices."""
    return version.partition("+")[0]


def _pythons(peers: Sequence[Examined], reference: Examined) -> list[Finding]:
    other = [peer for peer in peers if _minor(peer) and _minor(peer) != _minor(reference)]
    if not other:
        return []
    text = "; ".join(f"{peer.name} has Python {_minor(peer)}" for peer in other)
    text += f", {reference.name} has {_minor(reference)}: a cell that needs the newer one fails there"
    fix = "\n".join(
        on(peer.name, f"uv venv --python {_minor(reference)} && uv pip install notebook-cluster  # then share from it")
        for peer in other
    )
    rows = [
        ["", *(peer.name for peer in peers)],
        ["python", *(peer.diagnosis.facts.get("python", "?") for peer in peers)],
    ]
    return [say("versions", "warning", text, fix, rows)]


def _minor(peer: Examined) -> str:
    """``3.12``, or empty when it did not say."""
    match = re.match(r"\d+\.\d+", peer.diagnosis.facts.get("python", ""))
    return match.group() if match else ""


def _drivers(peers: Sequence[Examined]) -> list[Finding]:
    findings = []
    for fact in _DRIVERS:
        said: Mapping[str, str] = {p.name: p.diagnosis.facts[fact] for p in peers if p.diagnosis.facts.get(fact)}
        if len(set(said.values())) > 1:
            text = f"{fact.upper()} differs: " + ", ".join(f"{name} {version}" for name, version in said.items())
            findings.append(
                say("versions", "info", text, "usually harmless: each torch brings its own; update the older driver")
            )
    return findings
