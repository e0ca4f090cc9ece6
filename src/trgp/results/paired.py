"""Student's t-tests: paired over the seeds of two methods, and unpaired for two groups."""

import math
import statistics
from collections.abc import Sequence


def p_value(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p of t = mean(d) / (std(d) / sqrt(n)), d = b - a, with n - 1 degrees of freedom.

    None if t is not defined: for fewer than two pairs, or if all pairs are equal.
    """
    d = [y - x for x, y in zip(a, b, strict=True)]
    if len(d) < 2 or not any(d):
        return None
    mean, error = statistics.fmean(d), statistics.stdev(d) / math.sqrt(len(d))
    return two_sided(abs(mean / error) if error else math.inf, len(d) - 1)


def unpaired(
    mean: float, std: float, n: int, other_mean: float, other_std: float, other_n: int
) -> float:
    """Two-sided p of Student's t for two groups, each given by mean, deviation and size n.

    Equal variances are assumed.
    """
    free = n + other_n - 2
    spread = math.sqrt(((n - 1) * std**2 + (other_n - 1) * other_std**2) / free)
    error = spread * math.sqrt(1 / n + 1 / other_n)
    distance = abs(mean - other_mean)
    return two_sided(distance / error if error else math.inf if distance else 0.0, free)


def two_sided(t: float, n: int) -> float:
    """P(|T| >= t) for Student's T with n degrees of freedom.

    For whole n the incomplete beta function is a finite sum in theta = atan(t / sqrt(n))
    (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    theta = math.atan(t / math.sqrt(n))
    sin, cos = math.sin(theta), math.cos(theta)
    odd = n % 2
    term = cos if odd else 1.0
    total = 0.0
    for k in range(1 + odd, n, 2):  # the terms up to cos^(n-2)
        total += term
        term *= cos * cos * k / (k + 1)
    inside = (theta + sin * total) * 2 / math.pi if odd else sin * total
    return min(1.0, max(0.0, 1 - inside))
