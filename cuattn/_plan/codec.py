"""What `quantize.cu` and `dequantize.cu` are compiled for, and their launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuattn import _params, _tbq4
from cuattn._device import KIB, Device
from cuattn._kinds import Dtype
from cuattn._plan.base import WARP, align, ceil_div

# Blocks of a token that a table of means has place for: a warp's blocks i and i + 8 share a place of the
# smallest, where the blocks of one or several tokens are eight; the next one has twice as many at least.
REPEATED_MEAN_BLOCKS = 8
MIN_MEAN_BLOCKS = 2 * REPEATED_MEAN_BLOCKS


@dataclass(frozen=True, slots=True)
class QuantizeConfig:
    """Compile-time choices of ``quantize.cu``, and of ``dequantize.cu``.

    With a mean, ``quantize.cu`` has a table of `mean_blocks` blocks of means, or none and is slow.
    """

    dtype: Dtype
    head_dim: int
    encode: bool
    with_mean: bool
    ctas_per_sm: int
    mean_blocks: int = 0
    num_warps: int = 4

    @property
    def kernel(self) -> str:
        """Name of the kernel and its file."""
        return "quantize" if self.encode else "dequantize"

    @property
    def block(self) -> int:
        """Values that share a norm."""
        return _tbq4.block_of(self.head_dim)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: entries of 8 bytes, and for every 16 values of a block its signs and operands.

        The entries of the encoder are cells, those of the decoder two levels for each byte. Signs of results are for
        each of four lanes, operands for each of 32. Each warp of the encoder has a stage for its next 16 blocks, which
        begins with a line of 128 bytes. `mean_blocks` blocks of means have their sum of squares each and 8 values of
        padding.
        """
        stages = 16 * self.block * self.dtype.itemsize * self.num_warps if self.encode else 0
        entries = _tbq4.NUM_CELLS if self.encode else 256
        tables = 8 * entries + 16 * (self.block // 16 * (4 + WARP))
        means = self.mean_blocks * 4 * (self.block + 8 + 1)
        return align(tables, 128) + align(means, 128) + stages if self.encode else tables

    @property
    def blocks_per_cta(self) -> int:
        """Blocks of values of one CTA: a warp has 16."""
        return 16 * self.num_warps

    def grid(self, num_blocks: int, device: Device) -> tuple[int, int, int]:
        """CTAs of a launch over `num_blocks` blocks of values: what the device holds at once, or fewer."""
        return (min(ceil_div(num_blocks, self.blocks_per_cta), self.ctas_per_sm * device.num_sms), 1, 1)

    def describe(self) -> str:
        """One line for people."""
        return f"{self.dtype.value} rows, TBQ4, head_dim {self.head_dim}"

    def constants(self) -> dict[str, object]:
        """Values of ``namespace cfg`` in the order printed."""
        return (self._encoder() if self.encode else self._decoder()) | {
            "WITH_MEAN": self.with_mean,
            "HEAD_DIM": self.head_dim,
            "NUM_WARPS": self.num_warps,
            "CTAS_PER_SM": self.ctas_per_sm,
            "SMEM_BYTES": self.smem_bytes,
            "PARAMS_BYTES": (_params.QUANTIZE if self.encode else _params.DEQUANTIZE).itemsize,
            **_tbq4.rotation_constants(self.block),
        }

    def _encoder(self) -> dict[str, object]:
        return {"IN_DTYPE": self.dtype, "MEAN_BLOCKS": self.mean_blocks, **encoder_constants(self.block)}

    def _decoder(self) -> dict[str, object]:
        return {"OUT_DTYPE": self.dtype, "LEVELS": tuple(map(float, _tbq4.codebook(self.block)[8:]))}


def codec_config(
    dtype: Dtype, head_dim: int, device: Device, *, encode: bool, with_mean: bool, num_heads: int = 1
) -> QuantizeConfig:
    """Config of ``quantize.cu`` (`encode`) or ``dequantize.cu`` for a device; `num_heads` counts with a mean only."""
    # A lane has 64 values. The encoder can do with 128 registers: then 16 warps share an SM.
    config = QuantizeConfig(dtype, head_dim, encode, with_mean, ctas_per_sm=4 if encode else 3)
    if encode and with_mean:
        # Few configs serve any number of heads.
        blocks = num_heads * (head_dim // config.block)
        wanted = max(MIN_MEAN_BLOCKS, 1 << (blocks - 1).bit_length())
        if REPEATED_MEAN_BLOCKS % blocks == 0:
            wanted = REPEATED_MEAN_BLOCKS
        with_table = replace(config, mean_blocks=wanted)
        if with_table.smem_bytes <= device.smem_per_block:
            config = with_table
    ctas_per_sm = min(config.ctas_per_sm, device.smem_per_sm // (config.smem_bytes + KIB))
    return replace(config, ctas_per_sm=ctas_per_sm)


def encoder_constants(block: int) -> dict[str, object]:
    """Values of ``namespace cfg`` that kv/tbq4_codec.cuh needs for blocks of 64 or 128 values."""
    offsets, codes = _tbq4.cells(block)
    return {
        "MIN_SQUARE": _tbq4.min_square(),
        "CELLS_PER_UNIT": float(_tbq4.cells_per_unit(block)),
        "CELL_OFFSETS": tuple(map(float, offsets)),
        "CELL_CODES": tuple(map(int, codes)),
        "SQUARE_TERMS": _tbq4.square_terms(block),
    }
