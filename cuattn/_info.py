"""``python -m cuattn info``: what is installed, which GPUs there are, and what would be compiled for them."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from . import _arrays, _jit, _nvrtc, _plan
from ._version import __version__

_PACKAGES = ("numpy", "scipy", "ml_dtypes", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings")


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def devices() -> tuple[list[tuple[int, _plan.Device]], str]:
    """Return ordinal and description of the GPUs that kernels can run on, and why there are no others."""
    try:
        cupy = _arrays.import_cupy()
    except ImportError as error:
        return [], str(error)
    if not cupy.cuda.is_available():
        return [], "CuPy sees no CUDA device"
    found, reasons = [], []
    for ordinal in range(cupy.cuda.runtime.getDeviceCount()):
        try:
            found.append((ordinal, _arrays.device(ordinal)))
        except RuntimeError as error:
            reasons.append(str(error))
    return found, "; ".join(reasons)


def _kernels(device: _plan.Device) -> list[str]:
    lines = []
    for config in dict.fromkeys(_plan.shipped_configs(device)):
        try:
            stored = _jit.cubin_path(config, device.arch).exists()
        except ImportError as error:
            return [f"    {error}"]
        lines.append(f"    {'compiled' if stored else 'at first use':<12}  {config.kernel}: {config.describe()}")
    return lines


def run() -> int:
    """Print the report and return the exit status."""
    write = sys.stdout.write
    write(f"cuattn {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}\n")
    for package in _PACKAGES:
        write(f"  {package:<14} {_installed(package)}\n")
    try:
        nvrtc = "{}.{}".format(*_nvrtc.version())
    except ImportError as error:
        nvrtc = str(error)
    write(f"  {'NVRTC':<14} {nvrtc}\n")
    write(f"  {'sources':<14} {_jit.CUDA_SRC}\n  {'cache':<14} {_jit.cache_dir()}\n")
    found, reason = devices()
    if not found:
        write(f"no GPU: {reason}\n  NumPy arrays run the reference on the CPU\n")
        write("kernels that an NVIDIA H200 (sm_90a) would use:\n")
        write("\n".join(_kernels(_plan.DEVICES["sm_90a"])) + "\n")
    if found and reason:
        write(f"other GPUs: {reason}\n")
    for ordinal, device in found:
        write(
            f"cuda:{ordinal}  {device.name} ({device.arch}), {device.num_sms} SMs, "
            f"{device.smem_per_block // 1024} KiB of shared memory a block, {device.bandwidth / 1e12:.2f} TB/s\n"
        )
        write("\n".join(_kernels(device)) + "\n")
    return 0
