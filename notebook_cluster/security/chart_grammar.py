"""What charts of nodes may hold, in general: the walk through a chart's JSON, and why a chart is refused.

A renderer reads a chart as a program: addresses in it are fetched, with the reader's cookies, as soon as it is shown.
So a chart passes only when every key of it is in a list of words that cannot fetch, and every value that a renderer
reads as more than text or a number is understood here as well. A chart of which one thing is not understood is not
shown at all: one that is silently another would be worse than none.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

MOST_DEPTH = 50
MOST_VALUES = 250_000
"""Objects, lists and their entries of one chart, where a list of numbers counts as one: at most a second
of the coordinator."""
_MOST_KEY = 1_000
_MOST_SHOWN = 60
_FORBIDDEN = frozenset(("__proto__", "constructor", "prototype"))
"""A program that copies these keys from one object into another changes every object of the page."""
_ADDRESSES = frozenset(("url", "href", "source", "images", "src", "topojsonURL", "geojson", "xlink:href"))
_STYLE_ADDRESS = re.compile(r"(?:(?<![a-z])url|image-set)\s*\(", re.IGNORECASE)
_CONTROL = re.compile(r"[^ -~\u00a1-\u1fff\u2c00-\ud7ff]")


class ChartRefused(ValueError):
    """This chart is not drawn; the text says for people why, and what they can do."""


def refused(path: str, value: Any, why: str = "") -> ChartRefused:
    """The error that names the key, its value and the way out."""
    key = path.rpartition(".")[2]
    if not why and (key in _ADDRESSES or key == "image"):
        why = "may load from an address or lead to one: put what it stands for into the chart, or show a picture (PNG)"
    why = why or "is not among what charts of nodes may hold: leave it out, or show the chart as a picture (PNG)"
    shown = "" if isinstance(value, dict | list) else f" ({_shortened(value)})"
    return ChartRefused(f"'{_clean(path)[-120:]}'{shown} {why}")


def check_bounds(value: Any) -> None:
    """Depth, number and keys of ``value`` before anything recursive looks at it. ChartRefused: too much, or a bad key.

    Only what JSON has passes: objects with text as keys, lists, text, finite numbers, booleans and null.
    """
    level = [value]
    count = 0
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                _check_keys(entry)
                below.extend(entry.values())
            elif isinstance(entry, list) and not all(_is_number(number) for number in entry):
                below.extend(entry)
        count += len(below)
        if count > MOST_VALUES:
            raise ChartRefused(f"it holds more than {MOST_VALUES} values: draw fewer points, or show a picture (PNG)")
        level = [entry for entry in below if not _is_simple(entry)]
        if not level:
            return
    raise ChartRefused(f"it is nested more than {MOST_DEPTH} deep: show a picture (PNG)")


def _is_number(value: Any) -> bool:
    kind = type(value)
    return kind is int or (kind is float and value - value == 0)


def _is_simple(value: Any) -> bool:
    if isinstance(value, dict | list):
        return False
    if value is None or isinstance(value, str | bool | int):
        return True
    if isinstance(value, float) and value - value == 0:
        return True
    raise ChartRefused(f"a value ({_shortened(value)}) is not JSON")


def _check_keys(entry: dict[Any, Any]) -> None:
    for key in entry:
        if not isinstance(key, str) or len(key) > _MOST_KEY or key in _FORBIDDEN:
            raise ChartRefused(f"the key '{_shortened(key)}' is not allowed in charts: give it another name")


class ChartReader:
    """Goes through one chart; :meth:`read` of a kind of chart ends, or raises :class:`ChartRefused`."""

    words: ClassVar[frozenset[str]]
    types: ClassVar[frozenset[str]]
    """What any ``type`` may be."""
    special: ClassVar[Mapping[str, Callable[[Any, Any, str], None]]]
    """word -> the method that looks at its value, where it is more than text, numbers and other words."""

    def value(self, value: Any, path: str) -> None:
        """A value of a word that nothing special is known of."""
        if isinstance(value, dict):
            for key, entry in value.items():
                self.entry(key, entry, f"{path}.{key}" if path else key)
        elif isinstance(value, list):
            for entry in value:
                if isinstance(entry, dict | list):
                    self.value(entry, path)
                elif isinstance(entry, str):
                    self.text(entry, path)
        elif isinstance(value, str):
            self.text(value, path)

    def entry(self, key: str, value: Any, path: str) -> None:
        """A key and its value."""
        check = self.special.get(key)
        if check is not None:
            check(self, value, path)
        elif key in self.words:
            self.value(value, path)
        else:
            raise refused(path, value)

    def text(self, value: str, path: str) -> None:
        """Text in any place."""
        if _STYLE_ADDRESS.search(value):
            raise refused(path, value, "may load from an address: write it without brackets")

    def plain(self, value: Any, path: str) -> None:
        """Rows and the like: whatever keys there are, they are data."""
        if isinstance(value, dict):
            for key, entry in value.items():
                self.text(key, path)
                self.plain(entry, path)
        elif isinstance(value, list):
            for entry in value:
                if isinstance(entry, dict | list | str):
                    self.plain(entry, path)
        elif isinstance(value, str):
            self.text(value, path)

    def kind(self, value: Any, path: str) -> None:
        """A ``type``, or a list of them."""
        for one in value if isinstance(value, list) else [value]:
            if one is not None and not (isinstance(one, str) and one in self.types):
                raise refused(path, one)


def _shortened(value: Any) -> str:
    text = _clean(str(value))
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _clean(text: str) -> str:
    return _CONTROL.sub("", text[:2_000])


_COMMAND = re.compile(r"\\([A-Za-z]+)")
_COMMANDS = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi varpi rho varrho sigma
varsigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega
frac dfrac tfrac binom sqrt sum prod int oint lim limsup liminf max min sup inf arg log ln exp sin cos tan cot sec csc
arcsin arccos arctan sinh cosh tanh det dim ker deg gcd Pr
cdot cdots ldots dots vdots ddots times div pm mp ast star circ bullet oplus otimes odot wedge vee cap cup setminus
leq geq le ge neq ne lt gt ll gg approx sim simeq cong equiv propto in notin ni subset supset subseteq supseteq mid
parallel perp forall exists nexists neg land lor emptyset varnothing infty partial nabla hbar ell Re Im aleph angle
to gets mapsto leftarrow rightarrow leftrightarrow Leftarrow Rightarrow Leftrightarrow longrightarrow longleftarrow
uparrow downarrow implies iff left right big Big bigg Bigg lfloor rfloor lceil rceil langle rangle lvert rvert lVert
rVert vert Vert hat bar tilde vec dot ddot widehat widetilde overline underline overbrace underbrace prime dagger
mathrm mathbf mathit mathsf mathtt mathcal mathbb mathfrak boldsymbol operatorname text textbf textit textrm mbox
quad qquad displaystyle textstyle limits nolimits begin end degree top bot
"""
_KNOWN = frozenset(_COMMANDS.split())


NO_TEX = "mathjax_ignore tex2jax_ignore"
"""Classes of HTML that MathJax leaves alone; else it reads all but what is in ``<pre>``, and its safe mode too lets a
style load a cursor from an address."""


def is_plain_tex(text: str) -> bool:
    """Every command in ``text`` is one that only writes; text without a backslash is plain too."""
    return all(name in _KNOWN for name in _COMMAND.findall(text))


def without_tex(text: str) -> str:
    """``text``, which looks the same, without commands where one is not among those that only write."""
    return text if is_plain_tex(text) else text.replace("\\", "\\\u200b")


def html_without_tex(safe: str) -> str:
    """``safe``, HTML that is cleaned already, as MathJax may read it."""
    return safe if is_plain_tex(safe) else f'<div class="{NO_TEX}">{safe}</div>'
