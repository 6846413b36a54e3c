"""Terminal colours as HTML, and text without them."""

import re
from html import escape

_ESCAPE = re.compile(r"\x1b\[([0-9;:?]*)[ -/]*([@-~])|\x1b.?|[\x00-\x08\x0b-\x1f\x7f]")
_NORMAL = ("#3e424d", "#e75c58", "#00a250", "#ddb62b", "#208ffb", "#d160c4", "#60c6c8", "#c5c1b4")
_INTENSE = ("#282c36", "#b22b31", "#007427", "#b27d12", "#0065ca", "#a03196", "#258f8f", "#a1a6b2")
"""JupyterLab's own palette, so that a node's traceback looks like one of the notebook."""


def without_escapes(text: str) -> str:
    """``text`` without escape sequences and control characters; newlines and tabs stay."""
    if text.isprintable():
        return text
    return _ESCAPE.sub("", text)


def to_html(text: str) -> str:
    """``text`` with everything escaped for HTML and its colours as ``<span style=...>``."""
    if "\x1b" not in text:
        return escape(without_escapes(text), quote=False)
    parts: list[str] = []
    style: dict[str, str] = {}
    end = 0
    for found in _ESCAPE.finditer(text):
        _append(parts, text[end : found.start()], style)
        end = found.end()
        if found[2] == "m":
            _change(style, found[1])
    _append(parts, text[end:], style)
    return "".join(parts)


def _append(parts: list[str], text: str, style: dict[str, str]) -> None:
    if not text:
        return
    safe = escape(text, quote=False)
    if style:
        safe = f'<span style="{";".join(f"{name}:{value}" for name, value in style.items())}">{safe}</span>'
    parts.append(safe)


_SWITCHES = {1: ("font-weight", "bold"), 3: ("font-style", "italic"), 4: ("text-decoration", "underline")}
_RESETS = {22: "font-weight", 23: "font-style", 24: "text-decoration", 39: "color", 49: "background-color"}


def _change(style: dict[str, str], codes: str) -> None:
    """Apply the numbers of one SGR sequence (ECMA-48, 8.3.117) to ``style``."""
    numbers = [int(code) if code.isdigit() and len(code) < 4 else 0 for code in codes.replace(":", ";").split(";")]
    while numbers:
        code = numbers.pop(0)
        if code == 0:
            style.clear()
        elif code in _SWITCHES:
            name, value = _SWITCHES[code]
            style[name] = value
        elif code in _RESETS:
            style.pop(_RESETS[code], None)
        elif code in (38, 48):
            colour = _extended(numbers)
            if colour:
                style["color" if code == 38 else "background-color"] = colour
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style["color"] = (_NORMAL if code < 90 else _INTENSE)[code % 10]
        elif 40 <= code <= 47 or 100 <= code <= 107:
            style["background-color"] = (_NORMAL if code < 100 else _INTENSE)[code % 10]


def _extended(numbers: list[int]) -> str:
    """The colour after 38 or 48: ``5;N`` of the 256-colour table or ``2;R;G;B``. Takes its numbers off the list."""
    kind = numbers.pop(0) if numbers else 0
    if kind == 2 and len(numbers) >= 3:
        red, green, blue = (min(numbers.pop(0), 255) for _ in range(3))
        return f"rgb({red},{green},{blue})"
    if kind != 5 or not numbers:
        numbers.clear()
        return ""
    index = min(numbers.pop(0), 255)
    if index < 16:
        return (_NORMAL if index < 8 else _INTENSE)[index % 8]
    if index >= 232:
        level = 8 + 10 * (index - 232)
        return f"rgb({level},{level},{level})"
    index -= 16
    levels = (0, 95, 135, 175, 215, 255)
    return f"rgb({levels[index // 36]},{levels[index // 6 % 6]},{levels[index % 6]})"
