"""Draw each kind of figure into axes that already have title and labels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from .model import Chart, Kind
from .styles import styles

FEW = 40  # most points that get a marker each
NUMBERED = 12  # most rows or columns of a heat map that get numbers
BANDS = 3  # most series whose deviations can be distinguished
TICKS = 20
GAP = float("nan")
Handles = list[Any]
"""Legend handles, one per series; empty without a legend."""


def size(chart: Chart) -> tuple[float, float]:
    """Return width and height in inches."""
    if chart.kind in ("heat", "grid"):
        columns = len(chart.series[0].x)
        widest = max(len(text) for row in chart.texts or ((),) for text in (*row, "1234"))
        name = max(len(each.name) for each in chart.series)
        width = 1.6 + 0.08 * name + columns * max(0.3, 0.09 * widest)
        return max(5.0, width), max(2.4, 1.3 + 0.28 * len(chart.series))
    if chart.boundaries:
        return 9.0, 3.4
    return 6.0 + legend_width(chart), max(4.2, 0.5 + 0.2 * len(chart.series))


def legend_width(chart: Chart) -> float:
    """Return the width that the legend needs next to the axes, in inches."""
    several = chart.kind not in ("heat", "grid") and len(chart.series) > 1
    return 0.7 + 0.08 * max(len(each.name) for each in chart.series) if several else 0.0


def lines(axes: Axes, chart: Chart) -> Handles:
    """Draw lines, with markers and bands of deviations if there are few."""
    places = _along(axes, chart)
    handles: Handles = []
    for each, style in zip(chart.series, styles(chart.series), strict=True):
        x = [places(at) for at in each.x]
        y = _with_gaps(each.y)
        few = len(x) <= FEW
        handles += axes.plot(
            x,
            y,
            color=style.colour,
            linestyle=style.dashes,
            marker=style.marker if few else None,
            markersize=4.5,
            linewidth=1.3,
        )
        if each.error and len(chart.series) <= BANDS:
            error = _with_gaps(each.error)
            low = [v - e for v, e in zip(y, error, strict=True)]
            high = [v + e for v, e in zip(y, error, strict=True)]
            axes.fill_between(x, low, high, color=style.colour, alpha=0.15, linewidth=0)
    if chart.boundaries:
        _boundaries(axes, chart)
    return handles


def bars(axes: Axes, chart: Chart) -> Handles:
    """Draw bars side by side, with deviations."""
    places = _along(axes, chart)
    width = 0.8 / len(chart.series)
    handles: Handles = []
    for i, (each, style) in enumerate(zip(chart.series, styles(chart.series), strict=True)):
        shift = (i - (len(chart.series) - 1) / 2) * width
        drawn = axes.bar(
            [places(at) + shift for at in each.x],
            _with_gaps(each.y),
            width,
            yerr=_with_gaps(each.error) if each.error else None,
            color=style.colour,
            edgecolor="white",
            hatch=style.hatch,
            error_kw={"elinewidth": 0.8, "ecolor": "0.3"},
        )
        handles.append(drawn)
    return handles


def stacked(axes: Axes, chart: Chart) -> Handles:
    """Draw stacked bars."""
    places = _along(axes, chart)
    bottom = [0.0] * len(chart.series[0].x)
    handles: Handles = []
    for each, style in zip(chart.series, styles(chart.series), strict=True):
        y = [value or 0.0 for value in each.y]
        x = [places(at) for at in each.x]
        drawn = axes.bar(
            x,
            y,
            0.8,
            bottom,
            color=style.colour,
            edgecolor="white",
            hatch=style.hatch,
            linewidth=0.5,
        )
        handles.append(drawn)
        bottom = [low + value for low, value in zip(bottom, y, strict=True)]
    return handles


def points(axes: Axes, chart: Chart) -> Handles:
    """Draw one marker per point, with deviations."""
    places = _along(axes, chart)
    handles: Handles = []
    for each, style in zip(chart.series, styles(chart.series), strict=True):
        drawn = axes.errorbar(
            [places(at) for at in each.x],
            _with_gaps(each.y),
            yerr=_with_gaps(each.error) if each.error else None,
            color=style.colour,
            marker=style.marker,
            markersize=6,
            elinewidth=0.8,
            linestyle="none",
        )
        handles.append(drawn)
    return handles


def heat(axes: Axes, chart: Chart) -> Handles:
    """Draw a heat map that reads in grey too, with numbers where they fit, else a scale."""
    values = [_with_gaps(each.y) for each in chart.series]
    image = axes.imshow(values, cmap="cividis", aspect="auto")
    _cells(axes, chart)
    if max(len(values), len(values[0])) > NUMBERED:
        axes.figure.colorbar(image, ax=axes, label=chart.z_label).outline.set_visible(False)
        return []
    known = [value for row in values for value in row if value == value]
    middle = (min(known) + max(known)) / 2 if known else 0.0
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value == value:
                _inside(axes, j, i, f"{value:.1f}", "white" if value < middle else "black")
    return []


def grid(axes: Axes, chart: Chart) -> Handles:
    """Draw short texts in cells; darker means a larger value, with a scale if values differ."""
    values = [_with_gaps(each.y) for each in chart.series]
    known = [value for row in values for value in row if value == value]
    largest = max(known, default=1.0)
    # Light enough for the text in every cell to be readable.
    image = axes.imshow(values, cmap="Greys", vmin=0, vmax=2.5 * largest, aspect="auto")
    _cells(axes, chart)
    for i, row in enumerate(chart.texts):
        for j, text in enumerate(row):
            _inside(axes, j, i, text, "black")
    if len({*known}) > 1:
        bar = axes.figure.colorbar(image, ax=axes, label=chart.z_label)
        bar.outline.set_visible(False)
        bar.ax.set_ylim(0, largest)
    return []


PLOTS: Mapping[Kind, Callable[[Axes, Chart], Handles]] = {
    "bars": bars,
    "lines": lines,
    "heat": heat,
    "grid": grid,
    "stacked": stacked,
    "points": points,
}


def _along(axes: Axes, chart: Chart) -> Callable[[float | str], float]:
    """Return the position on the x axis of a number or a name, names in order of occurrence."""
    names = list(dict.fromkeys(at for s in chart.series for at in s.x if isinstance(at, str)))
    if names:
        step = -(-len(names) // TICKS)
        axes.set_xticks(range(0, len(names), step), names[::step])
    order = {name: float(i) for i, name in enumerate(names)}
    return lambda at: order[at] if isinstance(at, str) else at


def _boundaries(axes: Axes, chart: Chart) -> None:
    """Draw vertical lines at the boundaries, with names above them."""
    start = 0.5
    for end, name in chart.boundaries:
        axes.axvline(end, color="0.6", linewidth=0.6)
        short = name.removeprefix("task ") if len(chart.boundaries) > NUMBERED else name
        above = axes.get_xaxis_transform()
        middle = (start + end) / 2
        axes.text(middle, 1.0, short, transform=above, ha="center", va="bottom", fontsize=7)
        start = end
    axes.set_xlim(0.5, start)
    axes.set_title(axes.get_title(loc="left"), pad=14)  # room for the names


def _cells(axes: Axes, chart: Chart) -> None:
    """Draw the names of rows and columns, and white lines between cells."""
    x = [str(at) for at in chart.series[0].x]
    axes.set_xticks(range(len(x)), x)
    axes.set_yticks(range(len(chart.series)), [each.name for each in chart.series])
    right, bottom = len(x) - 0.5, len(chart.series) - 0.5
    axes.vlines([i - 0.5 for i in range(1, len(x))], -0.5, bottom, "white", linewidth=1)
    axes.hlines([i - 0.5 for i in range(1, len(chart.series))], -0.5, right, "white", linewidth=1)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _inside(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """Draw a text in a cell; excluded from the layout, which is faster."""
    axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=7.5, in_layout=False)


def _with_gaps(values: Sequence[float | None]) -> list[float]:
    return [GAP if value is None else value for value in values]
