"""Kernels of this folder on the current device."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuattn import CompileError, _arrays, _jit, _nvrtc

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cuattn._plan import Config

_FOLDER = Path(__file__).resolve().parent


def compiled(name: str, arch: str, prelude: str = "") -> _nvrtc.Compiled:
    """Compile ``name.cu`` for an architecture, with a text in front."""
    path = _FOLDER / f"{name}.cu"
    return _nvrtc.compile_cubin(prelude + path.read_text(), name=path.name, arch=arch, include=_jit.CUDA_SRC)


def _build(config: Config, arch: str) -> None:
    with suppress(CompileError):
        _jit.build(config, arch)


def build_missing(configs: Iterable[Config], arch: str) -> None:
    """Compile kernels of cuattn that the disk cache lacks, each in a process: together they take long.

    What does not compile is left to its case to say.

    Parameters
    ----------
    configs : iterable of Config
    arch : str
    """
    missing = [config for config in configs if not _jit.cubin_path(config, arch).exists()]
    if missing:
        workers = min(len(missing), os.cpu_count() or 1)
        # The context of the GPU does not survive a fork. Without processes this one compiles when it comes to a case.
        with (
            suppress(BrokenExecutor, OSError),
            ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
        ):
            list(pool.map(_build, missing, repeat(arch)))


def loaded(name: str, cubin: bytes) -> Any:  # noqa: ANN401  CuPy has no types
    """Load ``name_kernel`` of a cubin."""
    # CuPy loads a cubin when the function is first needed, here for its number of registers.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.cubin"
        path.write_bytes(cubin)
        function = _arrays.import_cupy().RawModule(path=str(path)).get_function(f"{name}_kernel")
        _ = function.num_regs
    return function
