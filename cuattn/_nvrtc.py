"""CUDA C source text to a cubin, through NVRTC. Needs no GPU and no driver; the only module that knows NVRTC."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

_OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")
# From this version on NVRTC has a cache of its own, whose answers come without ptxas' report; ours keeps both.
_FIRST_WITH_CACHE = (12, 9)

_INSTALL = "pip install 'cuattn[cuda13]' (or 'cuattn[cuda12]' for a CUDA 12 driver) installs it"


class CompileError(RuntimeError):
    """A kernel did not compile.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    config : str
        Its compile-time choices.
    log : str
        What the compiler said.
    """

    def __init__(self, kernel: str, config: str, log: str) -> None:
        self.kernel = kernel
        self.config = config
        self.log = log
        super().__init__(f"{kernel} does not compile\nconfig: {config}\n{log}")

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str, str]]:
        return type(self), (self.kernel, self.config, self.log)


@dataclass(frozen=True, slots=True)
class Report:
    """What ptxas says of one kernel.

    Attributes
    ----------
    registers : int
        Registers of a thread.
    spill_bytes : int
        Bytes of spill stores and loads.
    stack_bytes : int
        Bytes of local memory of a thread.
    smem_bytes : int
        Bytes of static shared memory.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int

    def as_dict(self) -> dict[str, int]:
        """Return the fields as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code of one source, and the compiler's log."""

    cubin: bytes
    log: str

    @property
    def report(self) -> Report:
        """Resources of the kernel; of the largest one if the source has several."""

        def largest(pattern: str) -> int:
            numbers = (m if isinstance(m, tuple) else (m,) for m in re.findall(pattern, self.log))
            return max((sum(map(int, m)) for m in numbers), default=0)

        return Report(
            registers=largest(r"Used (\d+) registers"),
            spill_bytes=largest(r"(\d+) bytes spill stores, (\d+) bytes spill loads"),
            stack_bytes=largest(r"(\d+) bytes stack frame"),
            smem_bytes=largest(r"(\d+) bytes smem"),
        )


@cache
def _nvrtc() -> Any:  # noqa: ANN401  cuda-bindings has no types
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        msg = f"compiling kernels needs cuda-bindings: {_INSTALL}"
        raise ImportError(msg) from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        msg = f"cuda-bindings finds no NVRTC library: {_INSTALL}"
        raise ImportError(msg) from error
    return nvrtc


def _check(result: tuple[Any, ...], what: str) -> Any:  # noqa: ANN401
    error, *values = result
    if error.value:
        msg = f"NVRTC failed in {what}: {error.name}"
        raise RuntimeError(msg)
    return values[0] if values else None


def version() -> tuple[int, int]:
    """Return the version of the NVRTC library, such as (13, 0)."""
    error, major, minor = _nvrtc().nvrtcVersion()
    _check((error,), "nvrtcVersion")
    return major, minor


def options() -> tuple[str, ...]:
    """Return the options of every compilation, architecture and include path aside."""
    return (*_OPTIONS, "-no-cache") if version() >= _FIRST_WITH_CACHE else _OPTIONS


def compile_cubin(source: str, *, name: str, arch: str, include: Path, config: str = "") -> Compiled:
    """Compile CUDA C to a cubin.

    Parameters
    ----------
    source : str
        Text of the translation unit.
    name : str
        Its name in messages.
    arch : str
        Architecture, such as ``"sm_90a"``.
    include : Path
        Folder of the headers.
    config : str, optional
        Shown in the error.

    Returns
    -------
    Compiled

    Raises
    ------
    CompileError
        If the source does not compile.
    ImportError
        If cuda-bindings or NVRTC are not installed.
    """
    nvrtc = _nvrtc()
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []), "nvrtcCreateProgram")
    try:
        given = [o.encode() for o in (*options(), f"-arch={arch}", f"-I{include}")]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        # Buffers are bytearrays: NVRTC writes into them, and a bytes object of length 1 is shared by all of Python.
        log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize"))
        _check(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        text = log.rstrip(b"\0 ").decode(errors="replace")
        if status.value:
            raise CompileError(name, config, text or f"NVRTC: {status.name}")
        cubin = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize"))
        _check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return Compiled(bytes(cubin), text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
