"""Build CUDA C files for the CPU and run their kernels on NumPy arrays.

A build compiles the kernel file together with `ptx_sm90.h`, which stands in for the PTX headers, and caches the
library under a hash of everything that went into it.
"""

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
CUDA_SRC = HERE.parents[1] / "cuda_src"
SANITIZE = bool(os.environ.get("CUATTN_SIMT_SANITIZE"))
CXX = os.environ.get("CXX", "g++")

# NVRTC does not mind signed against unsigned, and g++ sees uninitialized values where a register array is filled by a
# reference. Sums must not be contracted, so that every machine gives the same bits.
FLAGS = (
    *("-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-ffp-contract=off"),
    *("-Wall", "-Wshadow", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi"),
    *("-Wno-sign-compare", "-Wno-maybe-uninitialized"),
)
# Compiling takes longer than running, so little optimization makes the fastest tests.
OPTIMIZE = ("-O1",)
INSTRUMENT = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

_DRIVER = """
#include "ptx_sm90.h"
{prelude}
#include "{source}"
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT const char* simt_launch(const char* kernel, const simt::Launch* launch) {{
  static std::string message;
  try {{
{cases}
    return "the build names no such kernel";
  }} catch (const simt::Error& e) {{
    message = e.text;
    return message.c_str();
  }}
}}
EXPORT const char* simt_tensor_map(void* out, const void* base, int bytes, int rank, const u64* dim, const u64* stride,
                                   const u32* box, int swizzle) {{
  return simt::encode_tensor_map(out, base, bytes, rank, dim, stride, box, swizzle);
}}
"""
_CASE = '    if (!strcmp(kernel, "{0}")) return simt::launch(*launch, {0}), nullptr;'


class KernelError(RuntimeError):
    """The harness found an error in a kernel (a deadlock, a bad address, a misused barrier), or g++ did."""


class _Launch(ctypes.Structure):
    """simt::Launch of fibers.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_size_t),
        ("seed", ctypes.c_int),
        ("args", ctypes.POINTER(ctypes.c_void_p)),
        ("arg_bytes", ctypes.POINTER(ctypes.c_size_t)),
        ("num_args", ctypes.c_int),
        ("memory", ctypes.POINTER(ctypes.c_size_t)),
        ("num_memory", ctypes.c_int),
    )


class Module:
    """Kernels of one build."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.simt_launch.restype = ctypes.c_char_p
        self._library.simt_tensor_map.restype = ctypes.c_char_p

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[object],
        *,
        smem: int = 0,
        seed: int = 0,
        memory: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Run a kernel, as cuLaunchKernel would.

        Parameters
        ----------
        kernel : str
            One of the kernels named in the build.
        grid, block : int or sequence of int
            Up to three dimensions.
        args : sequence
            Arrays travel as pointers. NumPy scalars, arrays of a structured dtype with one element, and bytes travel
            by value.
        smem : int
            Bytes of dynamic shared memory.
        seed : int
            Chooses the schedule, see fibers.h.
        memory : sequence of numpy.ndarray, optional
            What ``cp_async16``, ``cp_async_small``, ``ld_global_nc_v4`` and ``bulk_load`` may read, besides the arrays
            in `args`. Default: everything.

        Raises
        ------
        KernelError
            If the harness finds an error in the kernel.
        """
        values = [_pack(a) for a in args]
        ranges = []
        if memory is not None:
            arrays = [*memory, *(a for a in args if isinstance(a, np.ndarray))]
            ranges = [x for a in arrays for x in np.lib.array_utils.byte_bounds(a)]
        launch = _Launch(
            grid=_dim3(grid),
            block=_dim3(block),
            smem_bytes=smem,
            seed=seed,
            args=(ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values)),
            arg_bytes=(ctypes.c_size_t * len(values))(*(ctypes.sizeof(v) for v in values)),
            num_args=len(values),
            memory=(ctypes.c_size_t * max(1, len(ranges)))(*ranges) if memory is not None else None,
            num_memory=len(ranges) // 2,
        )
        error = self._library.simt_launch(kernel.encode(), ctypes.byref(launch))
        if error:
            raise KernelError(f"{kernel}: {error.decode()}")

    def tensor_map(self, array: np.ndarray, box: Sequence[int], swizzle: int) -> bytes:
        """Return the 128 bytes of a tiled tensor map.

        Parameters
        ----------
        array : numpy.ndarray
            Contiguous in its last dimension; it must outlive the map.
        box : sequence of int
            Elements a copy takes, innermost dimension first.
        swizzle : {0, 32, 64, 128}
        """
        if array.strides[-1] != array.itemsize:
            raise ValueError(f"the last dimension must be contiguous, got strides {array.strides}")
        return self.tensor_map_of(array.ctypes.data, array.shape, array.strides[:-1], box, swizzle, array.itemsize)

    def tensor_map_of(
        self,
        pointer: int,
        shape: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
        itemsize: int = 2,
    ) -> bytes:
        """Return the same of an address, the array's shape, and the strides of all axes but the last."""
        rank = len(shape)
        out = ctypes.create_string_buffer(128)
        error = self._library.simt_tensor_map(
            out,
            ctypes.c_void_p(pointer),
            itemsize,
            rank,
            (ctypes.c_ulonglong * rank)(*reversed(shape)),
            (ctypes.c_ulonglong * rank)(*reversed(strides)),
            (ctypes.c_uint * rank)(*box),
            swizzle,
        )
        if error:
            raise ValueError(error.decode())
        return out.raw


def _dim3(n: int | Sequence[int]) -> ctypes.Array:
    dims = (n,) if isinstance(n, int) else tuple(n)
    return (ctypes.c_uint * 3)(*(*dims, 1, 1)[:3])


def _pack(a: object) -> ctypes.Array | ctypes.c_void_p:
    by_value = isinstance(a, np.generic) or (isinstance(a, np.ndarray) and a.dtype.names and a.size == 1)
    if by_value or isinstance(a, bytes):
        raw = a if isinstance(a, bytes) else a.tobytes()
        return ctypes.create_string_buffer(raw, len(raw))
    if isinstance(a, np.ndarray):
        return ctypes.c_void_p(a.ctypes.data)
    raise TypeError(f"a kernel argument must be an array, a NumPy scalar or bytes, got {type(a).__name__}")


@functools.cache
def _compiler() -> str:
    return subprocess.run([CXX, "--version"], capture_output=True, text=True, check=True).stdout


def _sources(source: Path, patches: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """Return the patched texts of `source` and of all that it includes, by their names in the build folder."""
    root = source.parent if not source.is_relative_to(CUDA_SRC) else CUDA_SRC
    texts: dict[str, str] = {}
    queue = [source, CUDA_SRC / "common/types.cuh"]
    while queue:
        path = queue.pop()
        name = str(path.relative_to(CUDA_SRC if path.is_relative_to(CUDA_SRC) else root))
        if name in texts:
            continue
        texts[name] = path.read_text()
        for include in re.findall(r'^#include "(.+)"', texts[name], re.MULTILINE):
            found = [p for p in (path.parent / include, CUDA_SRC / include) if p.exists()]
            queue += [p.resolve() for p in found[:1]]
    for name, old, new in patches:
        if name not in texts:
            raise ValueError(f"{name} is not part of {source.name}")
        if texts[name].count(old) != 1:
            raise ValueError(f"{name} must contain {old!r} once, found {texts[name].count(old)}")
        texts[name] = texts[name].replace(old, new)
    return texts


def build(
    source: str | Path,
    *,
    kernels: Sequence[str],
    prelude: str = "",
    patches: Sequence[tuple[str, str, str]] = (),
    sanitize: bool = SANITIZE,
) -> Module:
    """Compile a kernel file for the CPU, or load it from the cache.

    Parameters
    ----------
    source : str or Path
        Relative to cuda_src, or the absolute path of a test kernel.
    kernels : sequence of str
        The ``extern "C"`` kernels that can be launched.
    prelude : str
        Text in front of the source: the constants of a config.
    patches : sequence of (file, old, new)
        Replacements in copies of the sources, to plant faults. `file` is relative to cuda_src, or the name of the test
        kernel; `old` must occur exactly once.
    sanitize : bool
        Instrument with AddressSanitizer and UBSan. Needs libasan preloaded, see `run_with_sanitizers`.

    Raises
    ------
    ValueError
        If a patch does not fit.
    KernelError
        If g++ refuses; with its messages.
    """
    source = (CUDA_SRC / source).resolve()
    texts = _sources(source, patches)
    flags = (*FLAGS, *(INSTRUMENT if sanitize else OPTIMIZE))
    name = str(source.relative_to(CUDA_SRC)) if source.is_relative_to(CUDA_SRC) else source.name
    driver = _DRIVER.format(prelude=prelude, source=name, cases="\n".join(_CASE.format(k) for k in kernels))
    headers = [h.read_text() for h in sorted(HERE.glob("*.h"))]
    key = hashlib.sha256(repr((driver, sorted(texts.items()), headers, flags, _compiler())).encode()).hexdigest()
    cache = Path(os.environ.get("CUATTN_SIMT_CACHE") or Path(tempfile.gettempdir()) / f"cuattn-simt-{os.getuid()}")
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = cache / f"{source.stem}-{key[:20]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            for file, text in texts.items():
                path = Path(folder) / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            command = [CXX, *flags, "-I.", f"-I{HERE}", "-x", "c++", "-", "-o", "kernel.so"]
            run = subprocess.run(command, input=driver, text=True, cwd=folder, capture_output=True, check=False)
            if run.returncode:
                raise KernelError(f"{source.name} does not compile\n{run.stderr}")
            (Path(folder) / "kernel.so").replace(library)
    return Module(library)


def run_with_sanitizers(arguments: Sequence[str]) -> subprocess.CompletedProcess:
    """Run Python with AddressSanitizer preloaded, as instrumented builds need; every build in it is instrumented."""
    # libstdc++ too: AddressSanitizer looks for its __cxa_throw at the start.
    names = ("libasan.so", "libstdc++.so.6")
    find = [subprocess.run([CXX, f"-print-file-name={n}"], capture_output=True, text=True, check=True) for n in names]
    env = os.environ | {
        "LD_PRELOAD": " ".join(f.stdout.strip() for f in find),
        "CUATTN_SIMT_SANITIZE": "1",
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)
