"""Kernels of this folder on the current device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from cuattn import _arrays, _jit, _nvrtc

_FOLDER = Path(__file__).resolve().parent


def compiled(name: str, arch: str, prelude: str = "") -> _nvrtc.Compiled:
    """Compile ``name.cu`` for an architecture, with a text in front."""
    path = _FOLDER / f"{name}.cu"
    return _nvrtc.compile_cubin(prelude + path.read_text(), name=path.name, arch=arch, include=_jit.CUDA_SRC)


def loaded(name: str, cubin: bytes) -> Any:  # noqa: ANN401  CuPy has no types
    """Load ``name_kernel`` of a cubin."""
    # CuPy loads a cubin when the function is first needed, here for its number of registers.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.cubin"
        path.write_bytes(cubin)
        function = _arrays.import_cupy().RawModule(path=str(path)).get_function(f"{name}_kernel")
        _ = function.num_regs
    return function
