"""What `quantize.cu` and `dequantize.cu` are compiled for, and their launches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuattn import _params, _tbq4
from cuattn._device import Device
from cuattn._kinds import Dtype
from cuattn._plan.base import WARP, ceil_div


@dataclass(frozen=True, slots=True)
class QuantizeConfig:
    """Compile-time choices of ``quantize.cu``, and of ``dequantize.cu``: dtype of the rows, head_dim, warps, CTAs."""

    dtype: Dtype
    head_dim: int
    encode: bool
    # A thread keeps 32 signs and 16 values: 170 registers for each of twelve warps.
    num_warps: int = 4
    ctas_per_sm: int = 3

    @property
    def kernel(self) -> str:
        """Name of the kernel and its file."""
        return "quantize" if self.encode else "dequantize"

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: a table of 8 squares of levels, or of 16 levels, with a copy for each lane."""
        return (8 if self.encode else 16) * WARP * 4

    @property
    def blocks_per_cta(self) -> int:
        """Blocks of values of one CTA: a warp holds four, eight lanes each."""
        return 4 * self.num_warps

    def grid(self, num_blocks: int, device: Device) -> tuple[int, int, int]:
        """CTAs of a launch over `num_blocks` blocks of values: what the device holds at once, or fewer."""
        return (min(ceil_div(num_blocks, self.blocks_per_cta), self.ctas_per_sm * device.num_sms), 1, 1)

    def describe(self) -> str:
        """One line for people."""
        return f"{self.dtype.value} rows, TBQ4, head_dim {self.head_dim}"

    def constants(self) -> dict[str, object]:
        """Values of ``namespace cfg`` in the order printed."""
        levels = _tbq4.codebook(_tbq4.block_of(self.head_dim))[8:]
        ends: dict[str, object] = (
            {"IN_DTYPE": self.dtype} if self.encode else {"OUT_DTYPE": self.dtype, "LEVELS": tuple(map(float, levels))}
        )
        return {
            **ends,
            "HEAD_DIM": self.head_dim,
            "NUM_WARPS": self.num_warps,
            "CTAS_PER_SM": self.ctas_per_sm,
            "PARAMS_BYTES": (_params.QUANTIZE if self.encode else _params.DEQUANTIZE).itemsize,
            **codec_constants(_tbq4.block_of(self.head_dim)),
        }


def codec_constants(block: int) -> dict[str, object]:
    """Values of ``namespace cfg`` that kv/tbq4_codec.cuh needs for blocks of 64 or 128 values."""
    return {
        **_tbq4.rotation_constants(block),
        "MIN_NORM": _tbq4.MIN_NORM,
        "LEVELS_SQUARED": tuple(map(float, np.square(_tbq4.codebook(block)[8:]))),
        "BOUNDARIES": tuple(map(float, _tbq4.midpoints(block)[8:])),
    }
