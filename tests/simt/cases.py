"""The kernels of `kernels/` and how to launch a case of one: on the CPU harness, or on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

KERNELS = Path(__file__).resolve().parent / "kernels"
F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Source:
    """A kernel file, as it is built."""

    file: str
    kernels: tuple[str, ...]
    prelude: str = ""
    arch: str = "sm_80"  # the oldest that it runs on

    @property
    def path(self) -> Path:
        return KERNELS / self.file

    @property
    def text(self) -> str:
        """The translation unit for NVRTC, which looks for headers in cuda_src only."""
        return self.prelude + self.path.read_text()


def attention_source(dtype: str, head_dim: int, tile_kv: int, num_stages: int) -> Source:
    prelude = (
        '#include "common/types.cuh"\n'
        f"namespace cfg {{\nconstexpr Dtype DTYPE = Dtype::{dtype};\n"
        f"constexpr int HEAD_DIM = {head_dim}, TILE_KV = {tile_kv}, NUM_STAGES = {num_stages};\n}}\n"
    )
    return Source("attention_sm90.cu", ("attention_sm90",), prelude, "sm_90a")


# Where A lies (shared memory or registers), then whether A and B are K-major or MN-major: every mode for a few shapes,
# every shape once.
WGMMA_MODES = ("ss_kk", "ss_km", "ss_mm", "rs_k", "rs_m")
WGMMA = (
    *(("f16", n, "ss_kk") for n in (8, 16)),
    *(("f16", 64, mode) for mode in WGMMA_MODES),
    *(("bf16", 176, mode) for mode in ("ss_km", "rs_k")),
    *(("f16", 32, "rs_k"), ("bf16", 80, "ss_kk"), ("bf16", 96, "rs_m"), ("bf16", 128, "ss_mm"), ("bf16", 160, "ss_kk")),
    *(("f16", 192, "rs_m"), ("bf16", 256, "ss_kk"), ("f16", 256, "rs_m")),
)
WGMMA_KERNELS = tuple(f"wgmma_{dtype}_{n}_{mode}" for dtype, n, mode in WGMMA)
SOURCES = {
    "warp_ops": Source(
        "warp_ops.cu", ("warp_ops", "permute", "infinities", "multiply_halves", "larger_halves", "convert")
    ),
    "e4m3_ops": Source("e4m3_ops.cu", ("widen", "narrow"), arch="sm_89"),
    "stream_mma": Source("stream_mma.cu", ("stream_mma",)),
    "sm90_ops": Source("sm90_ops.cu", ("tma_2d", "tma_3d", "tma_4d", "bulk", *WGMMA_KERNELS), arch="sm_90a"),
    "attention_f16": attention_source("FP16", 64, 64, 2),
    "attention_bf16": attention_source("BF16", 128, 176, 2),
}


@dataclass(frozen=True)
class Out:
    """An array that the kernel fills; it holds 0xff bytes before."""

    expected: np.ndarray
    bound: float | None = None  # largest error, relative to values above 1; None: equal, and NaN where it is NaN


@dataclass(frozen=True)
class Map:
    """A tensor map of an array; the box is innermost first."""

    array: np.ndarray
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Struct:
    """A by-value parameter; arrays among the fields stand for their addresses."""

    dtype: np.dtype
    fields: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One launch and what it should give."""

    source: str
    kernel: str
    args: tuple[Any, ...]
    name: str = ""
    grid: int = 1
    block: int = 128
    smem: int = 0


class Backend(Protocol):
    """Where cases run."""

    def upload(self, array: np.ndarray) -> Any: ...
    def address(self, array: Any) -> int: ...
    def tensor_map(self, array: Any, box: Sequence[int], swizzle: int) -> bytes: ...
    def launch(self, case: Case, args: tuple[Any, ...]) -> None: ...
    def download(self, array: Any) -> np.ndarray: ...


def run(case: Case, backend: Backend) -> list[tuple[Out, np.ndarray]]:
    """Launch a case; return what its outputs should be, and what they are."""
    outs: list[tuple[Out, Any]] = []
    keep: list[Any] = []  # arrays whose addresses travel

    def place(x: Any) -> Any:
        if isinstance(x, Out):
            poison = np.full(x.expected.nbytes, 0xFF, np.uint8).view(x.expected.dtype)
            array = backend.upload(poison.reshape(x.expected.shape))
            outs.append((x, array))
            return array
        if isinstance(x, Map):
            array = backend.upload(x.array)
            keep.append(array)
            return backend.tensor_map(array, x.box, x.swizzle)
        is_array = isinstance(x, np.ndarray) and not x.dtype.names  # a structured one is a by-value parameter
        return backend.upload(x) if is_array else x

    def bind(x: Any) -> Any:
        if not isinstance(x, Struct):
            return place(x)
        record = np.zeros(1, x.dtype)
        for name, value in x.fields.items():
            placed = place(value)
            keep.append(placed)
            if isinstance(value, np.ndarray | Out):
                placed = backend.address(placed)
            record[name] = np.void(placed) if isinstance(value, Map) else placed
        return record

    backend.launch(case, tuple(bind(x) for x in case.args))
    return [(out, backend.download(array)) for out, array in outs]


def check(case: Case, results: list[tuple[Out, np.ndarray]]) -> None:
    """Assert that the results are what they should be."""
    for i, (out, got) in enumerate(results):
        where = f"{case.kernel} {case.name}, output {i}"
        if out.bound is None:
            np.testing.assert_array_equal(got, out.expected, err_msg=where)
        else:
            error = np.abs(got - out.expected) / np.maximum(1, np.abs(out.expected))
            assert error.max() <= out.bound, f"{where}: error {error.max():.3g}, allowed {out.bound:.3g}"
