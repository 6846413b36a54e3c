"""A run played again: one HTML page with the panel itself, what it showed at each moment, and a bar to play it.

The page needs no kernel, no network and no other file. ``panel.js`` draws it, from the same models as in a notebook;
its buttons are left out, for there is nobody to ask. Curves are the pictures of :mod:`.drawn_curves`.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.client import ClusterError, led_from, read_past_views, read_run
from notebook_cluster.journal.kept_runs import is_locked
from notebook_cluster.journal.moments import PastViews, until
from notebook_cluster.protocol.clock import dated
from notebook_cluster.protocol.state import ClusterView, Series
from notebook_cluster.widgets.curves import Curves
from notebook_cluster.widgets.formatting import escaped, node_colours
from notebook_cluster.widgets.model import panel_model
from notebook_cluster.widgets.report import check_place, whole_page, write_page
from notebook_cluster.widgets.static_html import block, charts, text_block

_HERE = Path(__file__).parent
_NOBODY_ASKS: dict[str, Any] = {"answers": [], "notice": "", "board": None, "curves": None}
"""What a panel's state says beside its model."""
_PICTURES, _FEW_PICTURES, _PICTURE_BYTES = 60, 12, 3_000_000
"""Of the curves, in the whole page: so many, and fewer where they are large, which they are with many nodes."""
_LEFT_OUT = (
    "As the journal of the run has it. Loads, temperatures, threads and links are in no journal: only the last moment "
    "shows them."
)
_SHORTENED = "The journal does not reach back to the start of this run: what was before is left out."
_SPEEDS = (1, 2, 4, 8, 16)
_SECONDS = 45
"""That a run takes at the speed that is set at first, where one of them is enough."""
_LONGEST_PAUSE = 2.0
"""Seconds: where nothing happened for longer nobody waits."""


def write_replay(folder: Path, path: str, *, overwrite: bool = False) -> Path:
    """Write the page that plays the run in ``folder`` to ``path``; returns the file. It appears whole or not at all.
    Of a cluster that is still there it ends now.

    Raises:
        ClusterError: what the run has left is damaged, gone, or on the machine from which it is led.
        OSError: ``path`` is a folder, is there already (without ``overwrite``), or cannot be written; one line.
        ValueError: it is no ``.html`` file.
    """
    file = Path(path).expanduser()
    check_place(file, overwrite=overwrite)
    lives = is_locked(folder)
    if lives and (head := led_from(folder)):
        raise ClusterError(
            f"the journal of {folder.name!r} is on {head}, from where it is led: stop it, or hand it over"
        )
    run = read_run(folder)
    page = render_replay(read_past_views(folder, run), run.curves, "" if lives else run.ended)
    write_page(file, page, overwrite=overwrite)
    return file


def render_replay(past: PastViews, series: Sequence[Series], ended: str = "") -> str:
    """The page. ``ended`` says why the cluster is no more, where that is so.

    Every text is escaped where it becomes markup, nothing is loaded, and no script runs but that of the page.
    """
    views = past.views
    moments = _moments(views, series, ended)
    name = panel_model(views[-1])["name"]
    title = f"{name}: {dated(views[0].now)} to {dated(views[-1].now)}"
    data = json.dumps({"moments": moments, "pause": _LONGEST_PAUSE}, ensure_ascii=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    drawing = (_HERE / "panel.js").read_text("utf-8").replace("export default { render };", "")
    script = f"{drawing}\n{(_HERE / 'replay.js').read_text('utf-8')}"
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    notes = [_LEFT_OUT] if past.whole else [_SHORTENED, _LEFT_OUT]
    player = block("nbc-panel nbc-player", [f"<h1>{escaped(title)}</h1>", _bar(views), *map(_note, notes)])
    body = (
        f'<main>{player}<div id="panel"></div><div class="nbc-panel nbc-drawn" id="curves"></div></main>'
        f'<script type="application/json" id="run">{data}</script><script type="module">{script}</script>'
    )
    return whole_page(title, "replay.css", body, f"img-src data:; script-src 'sha256-{allowed}'")


def _note(text: str) -> str:
    return text_block("nbc-small nbc-muted", text)


def _bar(views: Sequence[ClusterView]) -> str:
    gaps = (min(after.now - before.now, _LONGEST_PAUSE) for before, after in pairwise(views))
    whole = sum(gaps)
    chosen = next((speed for speed in _SPEEDS if whole / speed <= _SECONDS), _SPEEDS[-1])
    speeds = "".join(
        f'<option value="{speed}"{" selected" if speed == chosen else ""}>{speed}\u00d7</option>' for speed in _SPEEDS
    )
    return block(
        "nbc-bar",
        [
            '<button class="nbc-button nbc-primary" id="play" type="button">Play</button>',
            '<input id="slider" type="range" min="0" value="0" aria-label="Moment of the run">',
            '<span id="clock"></span>',
            f'<label>Speed <select class="nbc-input" id="speed">{speeds}</select></label>',
        ],
    )


def _moments(views: Sequence[ClusterView], series: Sequence[Series], ended: str) -> list[dict[str, Any]]:
    """Of each view its time, how the panel's state differs from that before, and sometimes a picture of the curves."""
    moments: list[dict[str, Any]] = []
    before: Any = None
    last = charts(Curves(series), node_colours(views[-1].nodes), views[-1].started)
    pictures = min(_PICTURES, max(_PICTURE_BYTES // max(len(last), 1), _FEW_PICTURES))
    every = max(len(views) // pictures, 1)
    picture = ""
    for place, view in enumerate(views):
        is_last = place == len(views) - 1
        view = msgspec.structs.replace(view, invitation="")
        state = json.loads(json.dumps(panel_model(view, ended if is_last else "") | _NOBODY_ASKS))
        moment = {"time": view.now, "state": _difference(before, state)}
        if is_last or place % every == 0:
            drawn = charts(Curves(until(series, view.now)), node_colours(view.nodes), view.started)
            if drawn != picture:
                moment["curves"] = picture = drawn
        moments.append(moment)
        before = state
    return moments


def _difference(before: Any, after: Any) -> Any:
    """How ``after`` comes out of ``before``: ``[after]`` in place of it, or a difference for each member that is
    another one, where both have the same members."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        return {key: _difference(before[key], value) for key, value in after.items() if before[key] != value}
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = zip(before, after, strict=True)
        return {str(place): _difference(*pair) for place, pair in enumerate(pairs) if pair[0] != pair[1]}
    return [after]
