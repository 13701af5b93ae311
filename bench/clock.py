"""The mean clock of the SMs while a sample is taken: a GPU that draws too much power lowers it within milliseconds."""

from __future__ import annotations

from functools import cache

import numpy as np

from cuattn import _arrays

from . import kernels

# A clock below the highest one of the run by more than this fraction has fallen. An H200 has 1.98 GHz with little to
# do, 1.77 to 1.9 in the first hundred milliseconds of any of these kernels, and then 1.6 with those that keep the SMs
# busy (bench/results/h200-2026-11-30-tbq4-clocks.json).
FALLEN = 0.13


class SmClock:
    """Reads the SMs' cycle counter on the current device.

    Attributes
    ----------
    mhz : float or None
        Mean clock of the last interval; None if it cannot be true.
    top_mhz : float
        Highest so far.
    """

    def __init__(self) -> None:
        cupy = _arrays.import_cupy()
        arch = _arrays.device(cupy.cuda.Device().id).arch
        self._function = kernels.loaded("clock", kernels.compiled("clock", arch).cubin)
        self._cycles = cupy.zeros(2, cupy.int64)
        self.mhz: float | None = None
        self.top_mhz = 0.0

    def mark(self, which: int) -> None:
        """Launch the reading of the begin (0) or the end (1) of an interval on the current stream."""
        self._function((1,), (1,), (np.uint64(self._cycles.data.ptr + 8 * which),))

    def read(self, us: float) -> None:
        """Find the mean clock of the interval of so many microseconds that is between the marks, and done."""
        begin, end = map(int, self._cycles.get())
        self.update((end - begin) / us)

    def update(self, mhz: float) -> None:
        """Take a mean clock; one that no GPU has is of counters of two SMs."""
        self.mhz = mhz if 100 < mhz < 4000 else None  # noqa: PLR2004  MHz
        self.top_mhz = max(self.top_mhz, self.mhz or 0.0)

    @property
    def fell(self) -> bool:
        """Whether the last interval had a lower clock than the GPU can have."""
        return self.mhz is not None and self.mhz < (1 - FALLEN) * self.top_mhz


@cache
def of_device(_ordinal: int) -> SmClock:
    """Return the clock of a device, the current one, which all samples share for its highest reading."""
    return SmClock()
