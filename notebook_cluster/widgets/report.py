"""The report of a run: one HTML page that needs no network and no script, for reading after the cluster is gone. Its
charts are in :mod:`.report_charts`, its tables in :mod:`.report_tables`.
"""

from collections.abc import Sequence
from pathlib import Path

from notebook_cluster.client.curve_rows import MeasuredRun
from notebook_cluster.protocol.clock import dated
from notebook_cluster.protocol.state import ClusterView, RunHistory, Series
from notebook_cluster.values.handed_out import whole_file
from notebook_cluster.widgets.curves import Curves
from notebook_cluster.widgets.formatting import escaped, integer
from notebook_cluster.widgets.model import panel_model
from notebook_cluster.widgets.report_charts import charts
from notebook_cluster.widgets.report_tables import (
    cells_part,
    checkpoints_part,
    events_part,
    nodes_part,
    results_part,
    rounds_part,
    settings_part,
    versions_part,
)
from notebook_cluster.widgets.static_html import block, fact_block, style, text_block

_HERE = Path(__file__).parent


def write_report(run: MeasuredRun, path: str, *, overwrite: bool = False, ended: str = "") -> Path:
    """Write the report of ``run`` as it is now to ``path``; returns the file. It appears whole or not at all.

    ``ended`` says why the cluster is no more, where that is so.

    Raises:
        OSError: ``path`` is a folder, is there already (without ``overwrite``), or cannot be written; one line.
        ValueError: it is no ``.html`` file.
    """
    file = Path(path).expanduser()
    check_place(file, overwrite=overwrite)
    write_page(file, render_report(run.state(), run.series(), run.history(), ended=ended), overwrite=overwrite)
    return file


def write_page(file: Path, page: str, *, overwrite: bool) -> None:
    """``page`` in ``file``, whole or not at all; OSError: it cannot be written, or is there already."""
    try:
        with whole_file(file, overwrite=overwrite) as stream:
            stream.write(page.encode("utf-8", errors="replace"))
    except FileExistsError:
        raise _there_already(file) from None
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error.strerror or error}") from None


def check_place(file: Path, *, overwrite: bool) -> None:
    """Raise what :func:`write_report` does for a file that must not be written."""
    if file.is_dir():
        raise OSError(f"{file} is a folder: name a file in it, for example {file / 'report.html'}")
    if file.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{file} would be an HTML page: give it a name that ends in .html")
    if not file.parent.is_dir():
        raise OSError(f"folder {file.parent} does not exist: make it first, or name another file")
    if file.exists() and not overwrite:
        raise _there_already(file)


def _there_already(file: Path) -> OSError:
    return OSError(f"{file} exists already: --overwrite replaces it")


def render_report(state: ClusterView, series: Sequence[Series], history: RunHistory, *, ended: str = "") -> str:
    """The page. Every text is escaped; there is no script and nothing is loaded from elsewhere."""
    model, curves = panel_model(state, ended), Curves(series)
    moment, began = dated(state.now), dated(state.started)
    facts = [
        *model["facts"],
        {"label": "Cells", "value": integer(history.cells_seen), "note": ""},
        {"label": "Checkpoints", "value": integer(len(history.checkpoints)), "note": ""},
    ]
    body = [
        block(
            "nbc-row nbc-wrap",
            [f"<h1>{escaped(model['name'])}</h1>", text_block(f"nbc-pill nbc-{model['level']}", model["status"])],
        ),
        text_block("nbc-muted", f"Report of {moment}; the cluster was started {began}"),
        block("nbc-facts", [fact_block(fact) for fact in facts]),
        *_section("Curves", charts(state, curves, history.rounds)),
        *_section("Results", results_part(curves)),
        *_section("Settings", settings_part(state)),
        *_section("Nodes", nodes_part(state, model)),
        *_section("Rounds", rounds_part(state, history)),
        *_section("Checkpoints", checkpoints_part(history, state.now)),
        *_section("Cells", cells_part(history)),
        *_section("Versions", versions_part(history)),
        *_section("Events", events_part(model)),
    ]
    title = f"{model['name']}: report of {moment}"
    return whole_page(title, "report.css", block("nbc-panel", body, role="main"))


def whole_page(title: str, sheet: str, body: str, scripts: str = "") -> str:
    """A page that loads nothing; ``sheet``: a file of this folder with the rules that it has besides those of the
    panel, ``body``: markup, ``scripts``: which of those in it may run, in the words of a policy (default: none)."""
    policy = f"default-src 'none'; style-src 'unsafe-inline'{scripts and f'; {scripts}'}"
    sheets = style() + "".join((_HERE / name).read_text("utf-8") for name in ("page.css", sheet))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escaped(title)}</title><style>{sheets}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def _section(title: str, content: list[str]) -> list[str]:
    return [f"<h2>{escaped(title)}</h2>", *content] if content else []
