"""Names of clusters, peers, nodes and checkpoints: short, printable, safe in paths and HTML. And of packages.
And what was meant by a name that is not known."""

import difflib
import os
import re
from collections.abc import Iterable

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_NO_FILE = re.compile(r"[\x00-\x1f\x7f-\x9f\\]|^[A-Za-z]:")
MOST_PATH_CHARACTERS = 1000
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")


def is_name(name: object) -> bool:
    """True for 1 to 63 letters, digits, ``_ . -`` that begin with a letter or digit."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None and ".." not in name


def check_name(name: str, what: str) -> str:
    """Return ``name``, or raise ValueError that says what may be in the name of a ``what``."""
    if not is_name(name):
        raise ValueError(
            f"{what} name {name!r} is not usable: use 1 to 63 letters, digits, '_', '-' or '.', "
            "beginning with a letter or digit"
        )
    return name


def as_name(text: str, fallback: str = "cluster") -> str:
    """The nearest usable name to ``text`` (a notebook's or machine's name)."""
    cleaned = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")[:63]
    return cleaned if is_name(cleaned) else fallback


def is_distribution(name: object) -> bool:
    """True for what may be the name of a Python package on an index: safe to put into a ``pip install``."""
    return isinstance(name, str) and _DISTRIBUTION.fullmatch(name) is not None


def distribution_name(name: str) -> str:
    """``name`` of a package as they are compared (PEP 503): ``Foo_Bar`` and ``foo-bar`` are one."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names_in(path: str) -> tuple[str, ...]:
    """The names in ``path``, a relative one with ``/`` between them that stays where it begins.

    Raises:
        ValueError: it is absolute, leads upward, or has names that are none; one line.
    """
    names = tuple(path.split("/"))
    usable = 0 < len(path) <= MOST_PATH_CHARACTERS and path.isprintable()
    if not usable or any(name in ("", ".", "..") or _NO_FILE.search(name) for name in names):
        raise ValueError(f"path {path[:200]!r} is not usable: it must be relative and stay inside the working folder")
    try:
        long = any(len(os.fsencode(name)) > 255 for name in names)
    except UnicodeEncodeError:
        long = True
    if long:
        raise ValueError(f"path {path[:200]!r} has a name that this machine cannot write")
    return names


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'start'?)``, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
