"""Samples of a time until they agree, at the clock that the GPU can have."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import clock as sm_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Sampling:
    """When to stop.

    Attributes
    ----------
    at_least, at_most : int
        Samples.
    relative_error : float
        Enough, as the median's standard error over the median.
    sample_us : float
        Microseconds that one sample lasts, by repeating the calls; long against the resolution of an event.
    pause_s : float
        A sample at a fallen clock of the SMs is left out, and the GPU gets a pause to recover. Seconds of the first;
        in a row, each is twice as long as the one before, up to 8 times this.
    patience_s : float
        Seconds of pauses in all, after which samples count whatever the clock.
    """

    at_least: int = 30
    at_most: int = 200
    relative_error: float = 0.005
    sample_us: float = 8000.0
    pause_s: float = 0.02
    patience_s: float = 3.0


FULL = Sampling()
QUICK = Sampling(at_least=5, at_most=5, sample_us=2000.0, patience_s=0.0)
_MOST_DOUBLINGS = 3
# What is left of the patience that is no pause any more.
_SHORTEST_S = 1e-3


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: median, 5th and 95th percentile; `noisy` if the samples did not agree in the end.

    `left_out` samples were at a fallen clock, and `us_left_out` is their median; `fallen_mhz` is the median clock of
    the others if that had fallen too.
    """

    us: float
    us_p5: float
    us_p95: float
    samples: int
    noisy: bool
    left_out: int = 0
    us_left_out: float | None = None
    fallen_mhz: float | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the times must know."""
        found = ["noisy"] if self.noisy else []
        if self.us_left_out is not None:
            found.append(f"{self.left_out} samples at lower clocks left out, {self.us_left_out:.1f} us")
        if self.fallen_mhz is not None:
            found.append(f"SMs at {self.fallen_mhz:.0f} MHz")
        return tuple(found)


def median_error(samples: Sequence[float]) -> float:
    """Return the standard error of the median, from order statistics: outliers do not count.

    The rank of the true median is binomial with a standard deviation of ``sqrt(n) / 2``, whatever the distribution.
    """
    ordered, n = sorted(samples), len(samples)
    low = max(0, math.floor((n - 1 - math.sqrt(n)) / 2))
    high = min(n - 1, math.ceil((n - 1 + math.sqrt(n)) / 2))
    return (ordered[high] - ordered[low]) / 2


def sample(
    measure: Callable[[], float],
    sampling: Sampling,
    clock: sm_clock.SmClock | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Timing:
    """Take samples until the median is known well enough.

    Parameters
    ----------
    measure : callable
        Returns the microseconds of one call.
    sampling : Sampling
    clock : SmClock, optional
        Which `measure` reads.
    pause : callable
        Waits for so many seconds.

    Returns
    -------
    Timing
    """
    samples: list[float] = []
    clocks: list[float] = []
    left_out: list[float] = []
    in_a_row, patience_s = 0, sampling.patience_s
    while True:
        us = measure()
        if clock is not None and clock.fell and patience_s > _SHORTEST_S:
            pause_s = min(sampling.pause_s * 2 ** min(in_a_row, _MOST_DOUBLINGS), patience_s)
            pause(pause_s)
            patience_s -= pause_s
            left_out.append(us)
            in_a_row += 1
            continue
        in_a_row = 0
        samples.append(us)
        if clock is not None and clock.mhz is not None:
            clocks.append(clock.mhz)
        if len(samples) < sampling.at_least:
            continue
        noisy = median_error(samples) > sampling.relative_error * float(np.median(samples))
        if not noisy or len(samples) >= sampling.at_most:
            break
    low, median, high = (float(x) for x in np.percentile(samples, (5, 50, 95)))
    fallen = None
    if clock is not None and clocks and np.median(clocks) < (1 - sm_clock.FALLEN) * clock.top_mhz:
        fallen = float(np.median(clocks))
    us_left_out = float(np.median(left_out)) if left_out else None
    return Timing(median, low, high, len(samples), noisy, len(left_out), us_left_out, fallen)
