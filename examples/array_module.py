"""CuPy where it sees a GPU, else NumPy: what the examples of this folder run on."""

from typing import Any

import numpy as np

try:
    import cupy

    xp: Any = cupy if cupy.cuda.is_available() else np
except ImportError:
    xp = np

WHERE = "GPU" if xp is not np else "CPU, by the NumPy reference"


def to_host(x: Any) -> np.ndarray:  # noqa: ANN401  an array of either module
    """Return a NumPy array with the values of `x`."""
    return x if isinstance(x, np.ndarray) else x.get()
