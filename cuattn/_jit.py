"""From a config to a kernel that runs: prelude, compile, disk cache, load, launch.

The cubin of a config is stored under a hash of what it depends on (all of ``cuda_src``, prelude, options, architecture,
NVRTC's major and minor version), so an edited header or another release of the compiler never gives a stale kernel.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _nvrtc
from ._nvrtc import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._plan import Config

    Grid = tuple[int, int, int]
    Params = np.ndarray[Any, Any]


def _find_sources() -> Path:
    """Folder of the CUDA sources: in a wheel inside the package, in a checkout beside it."""
    here = Path(__file__).resolve().parent
    folders = (here / "cuda_src", here.parent / "cuda_src")
    for folder in folders:
        if (folder / "decode.cu").is_file():
            return folder
    raise FileNotFoundError(f"the CUDA sources of cuattn are in neither of {', '.join(map(str, folders))}")


CUDA_SRC = _find_sources()

# Larger requests need the function's attribute to be raised first.
_DEFAULT_DYNAMIC_SMEM = 48 * 1024
# Programmatic dependent launches exist from Hopper on, and graphs capture them from CUDA 12.3 on.
_FIRST_ARCH_WITH_OVERLAP = 90
_FIRST_DRIVER_WITH_OVERLAP = 12030
# A temporary file is private; a cache folder may be shared.
_MODE = 0o644


def _number_of(arch: str) -> int:
    """90 of ``"sm_90a"``."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def _literal(value: object) -> tuple[str, str]:
    """C++ type and literal of one constant of the prelude."""
    if isinstance(value, Enum):
        return type(value).__name__, f"{type(value).__name__}::{value.name}"
    if isinstance(value, bool):
        return "bool", str(value).lower()
    if isinstance(value, float):
        return "float", f"{value!r}f"
    return "int", str(value)


def _constant(name: str, value: object) -> str:
    """Definition of one constant of the prelude; a tuple is an array of floats or of 32-bit words."""
    if isinstance(value, tuple):
        if isinstance(value[0], float):
            return f"constexpr float {name}[{len(value)}] = {{{', '.join(f'{x!r}f' for x in value)}}};"
        return f"constexpr u32 {name}[{len(value)}] = {{{', '.join(f'{x:#010x}u' for x in value)}}};"
    kind, text = _literal(value)
    return f"constexpr {kind} {name} = {text};"


def prelude(config: Config) -> str:
    """Text in front of a kernel: the config as ``namespace cfg``."""
    constants = config.constants()
    # The format's headers are read only where there are its constants.
    lines = [f"// {config!r}", f"#define CUATTN_TBQ4 {int('BLOCK' in constants)}"]
    lines += ['#include "common/types.cuh"', "namespace cfg {"]
    lines += [_constant(name, value) for name, value in constants.items()]
    return "\n".join([*lines, "}  // namespace cfg", ""])


def source(config: Config) -> str:
    """Return the translation unit of a config."""
    return prelude(config) + f'#include "{config.kernel}.cu"\n'


def fingerprint(folder: Path = CUDA_SRC) -> str:
    """SHA-256 of the names and contents of all CUDA sources."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.cu*")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cache_dir() -> Path:
    """Folder of the compiled kernels: ``CUATTN_CACHE_DIR``, else ``cuattn`` in the user's cache folder."""
    if folder := os.environ.get("CUATTN_CACHE_DIR"):
        return Path(folder).expanduser()
    user = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not user.is_absolute():  # unset, or to be ignored by the XDG specification
        try:
            user = Path.home() / ".cache"
        except RuntimeError:  # a user without a home, as in many containers
            return _private_dir()
    return user / "cuattn"


@cache
def _private_dir() -> Path:
    """Folder of this process, for machines whose cache folder cannot be written."""
    folder = tempfile.mkdtemp(prefix="cuattn-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled config on disk.

    Attributes
    ----------
    path : Path
        The cubin; its name holds the hash.
    report : Report
        Registers, spills and shared memory, kept beside it as JSON.
    compiled : bool
        Whether this call compiled it, rather than finding it.
    """

    path: Path
    report: Report
    compiled: bool


def _write(path: Path, data: bytes) -> None:
    """Write a file in one step: readers see all of it or none."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), _MODE)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read(path: Path) -> Report | None:
    """Report of a stored cubin, or None unless both files are there, whole and of one compilation."""
    try:
        record = json.loads(path.with_suffix(".json").read_text())
        if record["sha256"] != hashlib.sha256(path.read_bytes()).hexdigest():
            return None
        return Report(**record["report"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cubin_path(config: Config, arch: str, sources: str | None = None) -> Path:
    """Where the cubin of a config lies, or would lie, in the cache."""
    key = "\0".join(
        (source(config), sources or fingerprint(), *_nvrtc.options(), arch, ".".join(map(str, _nvrtc.version())))
    )
    return cache_dir() / arch / f"{config.kernel}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"


def build(config: Config, arch: str) -> Cubin:
    """Return the cubin of a config, compiled unless the cache has it.

    Safe between threads and processes: whoever comes second replaces a file by an equal one. With ``CUATTN_DUMP`` it is
    compiled in any case, and source, log and cubin are written to that folder too.

    Parameters
    ----------
    config : DecodeConfig or MergeConfig
    arch : str
        Architecture, such as ``"sm_90a"``.

    Returns
    -------
    Cubin

    Raises
    ------
    CompileError
        If NVRTC refuses the source.
    """
    path = cubin_path(config, arch)
    dump = os.environ.get("CUATTN_DUMP")
    if not dump and (report := _read(path)) is not None:
        return Cubin(path, report, compiled=False)
    text = source(config)
    result = _nvrtc.compile_cubin(
        text, name=f"{config.kernel}.config.cu", arch=arch, include=CUDA_SRC, config=repr(config)
    )
    record = {
        "config": repr(config),
        "arch": arch,
        "nvrtc": _nvrtc.version(),
        "sha256": hashlib.sha256(result.cubin).hexdigest(),
        "report": result.report.as_dict(),
    }
    if dump:
        _store(Path(dump) / arch / path.name, result, record, extra={".cu": text, ".log": result.log})
    try:
        _store(path, result, record)
    except OSError:
        path = _private_dir() / path.name
        _store(path, result, record)
    return Cubin(path, result.report, compiled=True)


def _store(
    path: Path, result: _nvrtc.Compiled, record: Mapping[str, object], extra: Mapping[str, str] | None = None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in (extra or {}).items():
        _write(path.with_suffix(suffix), text.encode())
    _write(path, result.cubin)
    _write(path.with_suffix(".json"), json.dumps(record, indent=1).encode())


class Kernel:
    """A kernel loaded on one device.

    Attributes
    ----------
    config : DecodeConfig or MergeConfig
    report : Report
        Registers, spills and static shared memory.
    """

    def __init__(self, config: Config, cubin: Cubin, arch: str) -> None:
        import cupy

        self.config = config
        self.report = cubin.report
        module = cupy.RawModule(path=str(cubin.path))
        function = module.get_function(f"{config.kernel}_kernel")
        if config.smem_bytes > _DEFAULT_DYNAMIC_SMEM:
            function.max_dynamic_shared_size_bytes = config.smem_bytes
        self._function = function
        self._overlapping: int | None = None
        if (
            _number_of(arch) >= _FIRST_ARCH_WITH_OVERLAP
            and cupy.cuda.runtime.driverGetVersion() >= _FIRST_DRIVER_WITH_OVERLAP
        ):
            self._overlapping = function.kernel.ptr

    def bind(self, grid: Grid, block: Grid, params: Params) -> Callable[[], None]:
        """Return what launches on the current stream of the current device.

        The kernels wait by themselves for the grids before them, so they may start while those end: the launch, and
        what a kernel does before it touches global memory, take no time then.

        Parameters
        ----------
        grid, block : tuple of int
        params : numpy.ndarray, size 1, a dtype of `_params`
            Passed by value, as it is when a launch is made.

        Returns
        -------
        callable
            For one thread at a time.
        """
        if self._overlapping is None:
            function, smem_bytes = self._function, self.config.smem_bytes
            return lambda: function(grid, block, (params,), shared_mem=smem_bytes)
        return _OverlappingLaunch(self._overlapping, self.config, grid, block, params)

    def launch(self, grid: Grid, block: Grid, params: Params) -> None:
        """Launch once; see `bind`."""
        self.bind(grid, block, params)()


# Threads that have the context of their device.
_thread = threading.local()


class _OverlappingLaunch:
    """Launch of a kernel that may start while the kernel before it ends, which CuPy has no word for."""

    def __init__(self, function: int, config: Config, grid: Grid, block: Grid, params: Params) -> None:
        from cuda.bindings import driver
        from cupy.cuda import get_current_stream, runtime

        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        launch = driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = grid
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = block
        launch.sharedMemBytes = config.smem_bytes
        launch.attrs, launch.numAttrs = [attribute], 1
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


_kernels: dict[tuple[Config, int], Kernel] = {}
_lock = threading.Lock()
_building: dict[tuple[Config, int], threading.Lock] = {}


def kernel(config: Config, device: int, arch: str) -> Kernel:
    """Return the kernel of a config on the current device, compiling and loading it the first time.

    Parameters
    ----------
    config : DecodeConfig or MergeConfig
    device : int
        Ordinal of the current device; a loaded module belongs to one device.
    arch : str
        Its architecture.

    Returns
    -------
    Kernel
    """
    key = (config, device)
    if (found := _kernels.get(key)) is not None:
        return found
    with _lock:
        lock = _building.setdefault(key, threading.Lock())
    with lock:  # one thread builds, the others wait for it; other kernels are not held up
        if (found := _kernels.get(key)) is None:
            found = _kernels[key] = Kernel(config, build(config, arch), arch)
    return found
