"""Figures by matplotlib, as SVG and PNG, with the same bytes for the same data."""

import io
import textwrap
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from .checksum import checksum
from .model import Chart
from .plots import PLOTS, legend_width, size

SETTINGS: dict[Any, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.family": "DejaVu Sans",  # which matplotlib brings along
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "svg.fonttype": "none",  # texts stay texts
    "svg.hashsalt": "trgp",
    "text.parse_math": False,
}
DPI = 130
LETTERS = 12  # of a title in an inch


def drawn(chart: Chart) -> dict[str, bytes]:
    """The figure's files by their endings."""
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # A name in letters that the font lacks is shown by boxes, and no reason to complain.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = _figure(chart)
        about = {"Date": None, "Creator": None, "Identifier": checksum(chart)}
        # By the canvases themselves: savefig would draw everything twice.
        svg = _written(FigureCanvasSVG(figure).print_svg, about)
        figure.dpi = DPI
        return {"svg": svg, "png": _written(FigureCanvasAgg(figure).print_png, {"Software": None})}


def _figure(chart: Chart) -> Figure:
    width, height = size(chart)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(textwrap.fill(chart.title, int((width - legend_width(chart)) * LETTERS)))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    handles = PLOTS[chart.kind](axes, chart)
    if len(handles) > 1:
        # By name: matplotlib by itself leaves out those that begin with an underscore.
        names = [each.name for each in chart.series]
        figure.legend(handles, names, loc="outside right upper")
    engine = figure.get_layout_engine()
    assert engine is not None  # or the figure would not have been made with one
    engine.execute(figure)
    figure.set_layout_engine("none")  # once laid out is enough, and half of the time
    return figure


def _written(write: Callable[..., None], about: Mapping[str, str | None]) -> bytes:
    out = io.BytesIO()
    write(out, metadata=about)
    return out.getvalue()
