"""Launches that CuPy has no word for: of kernels that overlap with the one before, and of clusters."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ._plan import Config

    Grid = tuple[int, int, int]
    Params = np.ndarray[Any, Any]

# Threads that have the context of their device.
_thread = threading.local()


def launch_config(grid: Grid, block: Grid, smem_bytes: int, cluster: int, *, overlaps: bool) -> Any:  # noqa: ANN401
    """Return the driver's description of a launch on its default stream."""
    from cuda.bindings import driver

    kinds, attributes = driver.CUlaunchAttributeID, []
    if overlaps:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    if cluster > 1:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimensions = attributes[-1].value.clusterDim
        dimensions.x, dimensions.y, dimensions.z = 1, cluster, 1
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = grid
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = block
    launch.sharedMemBytes = smem_bytes
    launch.attrs, launch.numAttrs = attributes, len(attributes)
    return launch


class OverlappingLaunch:
    """Launch of a kernel that may start while the kernel before it ends, which CuPy has no word for."""

    def __init__(  # noqa: PLR0917  those of `bind`
        self, function: int, config: Config, grid: Grid, block: Grid, params: Params, cluster: int
    ) -> None:
        from cuda.bindings import driver
        from cupy.cuda import get_current_stream, runtime

        launch = launch_config(grid, block, config.smem_bytes, cluster, overlaps=True)
        self._config, self._grid, self._block = config, grid, block
        self._params = params, np.array([params.ctypes.data], np.uintp)  # kept alive with what points at them
        self._pointers = self._params[1].ctypes.data
        self._driver, self._launch, self._function = driver, launch, driver.CUfunction(function)
        self._stream, self._runtime = get_current_stream, runtime
        self._last_stream: int | None = None

    def __call__(self) -> None:
        if not hasattr(_thread, "has_context"):
            # The driver's launch, unlike the runtime's calls, does not give a thread the context of its device.
            self._runtime.setDevice(self._runtime.getDevice())
            _thread.has_context = True
        stream = self._stream().ptr
        if stream != self._last_stream:
            self._launch.hStream = self._last_stream = stream
        (status,) = self._driver.cuLaunchKernelEx(self._launch, self._function, self._pointers, 0)
        if status:
            raise RuntimeError(
                f"cannot launch {self._config.kernel}.cu for {self._config.describe()} with grid {self._grid}, block "
                f"{self._block} and {self._config.smem_bytes} bytes of shared memory, or an earlier launch failed: "
                f"{status.name}"
            )
