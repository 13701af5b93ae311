"""What `append.cu` is compiled for, and its launch."""

from __future__ import annotations

from dataclasses import dataclass

from cuattn import _params, _tbq4
from cuattn._device import Device
from cuattn._kinds import Dtype, KvFormat
from cuattn._plan.base import HEAD_DIMS, ceil_div
from cuattn._plan.codec import encoder_constants

# The kernel counts pieces of rows in 32 bits, with room for a step past the end.
MAX_APPEND_ROWS = 2**28
# A warp holds so many pieces of rows, eight lanes each.
_PIECES_PER_WARP = 4


@dataclass(frozen=True, slots=True)
class AppendConfig:
    """Compile-time choices of ``append.cu``: dtypes of new rows and of 16-bit arrays, formats, head_dim, warps."""

    in_dtype: Dtype
    dtype: Dtype
    k_format: KvFormat
    v_format: KvFormat
    head_dim: int
    num_warps: int = 4

    kernel = "append"

    @property
    def encodes(self) -> bool:
        """Whether K or V is encoded."""
        return KvFormat.TBQ4 in (self.k_format, self.v_format)

    @property
    def ctas_per_sm(self) -> int:
        """As `QuantizeConfig` where rows are encoded; a copy takes up to 64 registers."""
        return 3 if self.encodes else 8

    @property
    def piece(self) -> int:
        """Values of a row that eight lanes hold: a block of TBQ4; whole rows of 96 and 192 want smaller ones."""
        return next(n for n in (128, 64, 32) if self.head_dim % n == 0)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: the encoder's table of cells, of 8 bytes each."""
        return _tbq4.NUM_CELLS * 8 if self.encodes else 0

    def grid(self, num_rows: int, device: Device) -> tuple[int, int, int]:
        """CTAs of a launch over `num_rows` rows of K and as many of V: what the device holds at once, or fewer."""
        num_pieces = num_rows * (self.head_dim // self.piece)
        per_cta = _PIECES_PER_WARP * self.num_warps
        return (min(ceil_div(num_pieces, per_cta), ceil_div(self.ctas_per_sm * device.num_sms, 2)), 2, 1)

    def describe(self) -> str:
        """One line for people."""
        caches = f"K {self.k_format.value}, V {self.v_format.value}, 16-bit arrays {self.dtype.value}"
        return f"{self.in_dtype.value} rows, {caches}, head_dim {self.head_dim}"

    def constants(self) -> dict[str, object]:
        """Values of ``namespace cfg`` in the order printed."""
        # A head_dim that TBQ4 lacks never meets the codec, which is compiled all the same.
        block = _tbq4.block_of(self.head_dim) if self.head_dim in _tbq4.HEAD_DIMS else _tbq4.BLOCK
        return {
            "IN_DTYPE": self.in_dtype,
            "DTYPE": self.dtype,
            "K_FORMAT": self.k_format,
            "V_FORMAT": self.v_format,
            "HEAD_DIM": self.head_dim,
            "PIECE": self.piece,
            "NUM_WARPS": self.num_warps,
            "CTAS_PER_SM": self.ctas_per_sm,
            "SMEM_BYTES": self.smem_bytes,
            "PARAMS_BYTES": _params.APPEND.itemsize,
            **_tbq4.rotation_constants(block),
            **encoder_constants(block),
        }


def append_configs() -> list[AppendConfig]:
    """Every pair of formats at one head_dim, equal formats at every other, and conversions of the rows at two."""
    raw, tbq4, fp8 = KvFormat.RAW16, KvFormat.TBQ4, KvFormat.FP8
    configs = []
    for dtype in (Dtype.FP16, Dtype.BF16):
        configs += [AppendConfig(dtype, dtype, k, v, _tbq4.BLOCK) for k in (raw, tbq4, fp8) for v in (raw, tbq4, fp8)]
        configs += [AppendConfig(dtype, dtype, f, f, head_dim) for f in (raw, fp8) for head_dim in HEAD_DIMS]
        configs += [AppendConfig(dtype, dtype, tbq4, tbq4, head_dim) for head_dim in _tbq4.HEAD_DIMS]
        for in_dtype in Dtype:
            configs += [AppendConfig(in_dtype, dtype, raw, raw, head_dim) for head_dim in (96, 128)]
            configs += [AppendConfig(in_dtype, dtype, f, f, _tbq4.BLOCK) for f in (tbq4, fp8)]
    return list(dict.fromkeys(configs))
