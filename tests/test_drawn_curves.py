"""The curves of a panel in an environment without plotly: pictures, and one line that says how to get more."""

import sys
from pathlib import Path

import pytest

from notebook_cluster.protocol.state import Series
from notebook_cluster.widgets.curves import CurveChoice, Curves
from notebook_cluster.widgets.drawn_curves import HINT, DrawnCurves, new_figure
from notebook_cluster.widgets.figure import CurvesFigure
from tests.fake_cluster import series_until

AS_IT_IS = CurveChoice(smooth=False)


def reported(name: str, values: list[float]) -> Series:
    steps = list(range(len(values)))
    return Series(node="mini", name=name, step=steps, time=[float(step) for step in steps], value=values)


def put_in_front(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str) -> None:
    """What pip notes of a plotly of ``version`` is found before the one that is installed."""
    metadata = folder / f"plotly-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: plotly\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))


def test_plotly_draws_where_it_is_installed() -> None:
    assert isinstance(new_figure(), CurvesFigure)


def test_a_plotly_whose_figures_need_an_extension_of_their_own_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_in_front(monkeypatch, tmp_path, "5.24.1")
    assert isinstance(new_figure(), DrawnCurves)


def test_without_plotly_the_curves_are_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    packages = [path for path in sys.path if not any(Path(path).glob("plotly-*.dist-info"))]
    monkeypatch.setattr(sys, "path", packages)
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("plotly")
    assert isinstance(new_figure(), DrawnCurves)


def test_pictures_show_what_nodes_told_and_how_to_get_plotly() -> None:
    drawn = DrawnCurves()
    assert drawn.draw(Curves(), {}, 0.0, AS_IT_IS) is False
    assert drawn.widget.value == ""
    curves = Curves(series_until(1400, 0.0))
    assert drawn.draw(curves, {"laptop": "#112233"}, 0.0, AS_IT_IS) is True
    assert drawn.draw(curves, {"laptop": "#112233"}, 0.0, AS_IT_IS) is False
    shown = drawn.widget.value
    assert shown.count("<svg") == 3
    assert shown.count('stroke="#112233"') == 3
    assert HINT.replace('"', "&quot;").replace(">", "&gt;") in shown


def test_pictures_show_the_number_that_was_chosen_smoothed_and_on_a_logarithmic_axis() -> None:
    drawn = DrawnCurves()
    curves = Curves([reported("loss", [2.0] * 5), reported("<b>rate", [0.001, 1.0] * 100)])
    drawn.draw(curves, {}, 0.0, CurveChoice("<b>rate", smooth=False, log=True))
    logarithmic = drawn.widget.value
    assert 'aria-label="&lt;b&gt;rate"' in logarithmic
    assert "<b>" not in logarithmic
    assert ">0.001</text>" in logarithmic
    drawn.draw(curves, {}, 0.0, CurveChoice("<b>rate", smooth=True, log=False))
    assert ">0.001</text>" not in drawn.widget.value
    assert drawn.widget.value.count("<path") == 2
