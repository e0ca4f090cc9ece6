"""The paired t-test: do two methods differ over the seeds that both were run with?"""

import math
import statistics
from collections.abc import Sequence


def p_value(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p of t = mean(d) / (std(d) / sqrt(n)), d = b - a, with n - 1 degrees of freedom.

    None where t is not defined: for less than two pairs, and where all pairs are equal.
    """
    d = [y - x for x, y in zip(a, b, strict=True)]
    if len(d) < 2 or not any(d):
        return None
    mean, error = statistics.fmean(d), statistics.stdev(d) / math.sqrt(len(d))
    return two_sided(abs(mean / error) if error else math.inf, len(d) - 1)


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
