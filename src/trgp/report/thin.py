"""Thin out long curves, so that a page of many runs stays small."""

from dataclasses import replace
from math import ceil

from .model import Chart, Report, Series

ROOM = 150_000  # most points of curves on a page


def thinned(report: Report) -> Report:
    """Return the report with every n-th epoch of its curves; n is 1 if all points fit."""
    curves = [chart for chart in report.charts if chart.boundaries]
    step = ceil(sum(len(each.x) for chart in curves for each in chart.series) / ROOM)
    if step <= 1:
        return report
    return replace(report, charts=tuple(_thinned(chart, step) for chart in report.charts))


def _thinned(chart: Chart, step: int) -> Chart:
    if not chart.boundaries:
        return chart
    said = f"Shown: one of {step} epochs and the last of every task; the files have all."
    series = tuple(_some(each, step) for each in chart.series)
    return replace(chart, series=series, note=f"{chart.note} {said}".strip())


def _some(series: Series, step: int) -> Series:
    """Keep every n-th point from the first on, and those at a gap, which end a task."""
    y = series.y
    ends = {i for i in range(len(y)) if y[i] is None or i + 1 == len(y) or y[i + 1] is None}
    kept = sorted({*range(0, len(y), step), *ends})
    return replace(
        series,
        x=tuple(series.x[i] for i in kept),
        y=tuple(y[i] for i in kept),
        error=tuple(series.error[i] for i in kept) if series.error else (),
    )
