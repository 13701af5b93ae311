"""Limits and arithmetic that every plan shares."""

from __future__ import annotations

HEAD_DIMS = (64, 96, 128, 192, 256, 512)
MAX_GROUP = 64
MAX_SEQLEN_Q = 16
# Bounds the workspace (num_splits float32 copies of the output); 512 splits fill any GPU from a single KV head.
MAX_SPLITS = 512
# Splits of a given size are multiples of this, which every tile of a warp divides.
SPLIT_UNIT = 64
# Key positions are int32 in the kernels, with room for position + window.
MAX_KV_LEN = 2**30
WARP = 32
REGISTERS_PER_SM = 65536
# CUDA's limit on gridDim.y and gridDim.z.
MAX_GRID_YZ = 65535


def align(n: int, to: int) -> int:
    """Round `n` up to a multiple of `to`."""
    return -(-n // to) * to


def ceil_div(a: int, b: int) -> int:
    """Quotient rounded up."""
    return -(-a // b)
