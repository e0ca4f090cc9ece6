"""Long curves with fewer points, so that a page of many runs stays small."""

from dataclasses import replace
from math import ceil

from .model import Chart, Report, Series

ROOM = 150_000  # points of curves that a page has room for


def thinned(report: Report) -> Report:
    """The report with every so many-th epoch of its curves, or all of them where there is room."""
    curves = [chart for chart in report.charts if chart.boundaries]
    step = ceil(sum(len(each.x) for chart in curves for each in chart.series) / ROOM)
    if step <= 1:
        return report
    return replace(report, charts=tuple(_thinned(chart, step) for chart in report.charts))


def _thinned(chart: Chart, step: int) -> Chart:
    if not chart.boundaries:
        return chart
    said = f"Of {step} epochs one is shown here, and the last of every task; the files have all."
    series = tuple(_some(each, step) for each in chart.series)
    return replace(chart, series=series, note=f"{chart.note} {said}".strip())


def _some(series: Series, step: int) -> Series:
    """Every so many-th point from the first on, and those at a gap, which end a task."""
    y = series.y
    ends = {i for i in range(len(y)) if y[i] is None or i + 1 == len(y) or y[i + 1] is None}
    kept = sorted({*range(0, len(y), step), *ends})
    return replace(
        series,
        x=tuple(series.x[i] for i in kept),
        y=tuple(y[i] for i in kept),
        error=tuple(series.error[i] for i in kept) if series.error else (),
    )
