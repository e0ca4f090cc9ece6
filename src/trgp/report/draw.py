"""Draw figures with matplotlib as SVG and PNG; equal data give equal bytes."""

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
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, not paths
    "svg.hashsalt": "trgp",
    "text.parse_math": False,
}
DPI = 130
LETTERS = 12  # of a title per inch


def drawn(chart: Chart) -> dict[str, bytes]:
    """Draw a figure; return its files by extension."""
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes; that needs no warning.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = _figure(chart)
        about = {"Date": None, "Creator": None, "Identifier": checksum(chart)}
        # The canvases directly, because savefig would draw everything twice.
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
        # Explicit names, because matplotlib omits labels that begin with an underscore.
        names = [each.name for each in chart.series]
        figure.legend(handles, names, loc="outside right upper")
    engine = figure.get_layout_engine()
    assert engine is not None  # the figure is made with one
    engine.execute(figure)
    figure.set_layout_engine("none")  # laying out once is enough and halves the time
    return figure


def _written(write: Callable[..., None], about: Mapping[str, str | None]) -> bytes:
    out = io.BytesIO()
    write(out, metadata=about)
    return out.getvalue()
