"""For mkdocstrings: docstrings name things as Sphinx does (``:meth:`.Cluster.add```); the site shows the name alone."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod|exc):`[~.]*([^`]+)`")


class Roles(griffe.Extension):
    """Put the name in the place of each role."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
