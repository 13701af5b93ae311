"""What `merge.cu` is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from cuattn import _params
from cuattn._kinds import Dtype, Parts


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """Compile-time choices of ``merge.cu``: dtypes and kind of the parts, head_dim, warps, parts of a warp at once."""

    in_dtype: Dtype
    out_dtype: Dtype
    head_dim: int
    parts: Parts = Parts.LSE
    num_warps: int = 4
    parts_at_once: int = 4
    ctas_per_sm: int = 4  # 128 registers: a part takes head_dim / 32 and two more

    kernel = "merge"

    def describe(self) -> str:
        """One line for people."""
        parts = f"{self.in_dtype.value} parts with {self.parts.value}"
        return f"{parts}, {self.out_dtype.value} result, head_dim {self.head_dim}"

    @property
    def smem_bytes(self) -> int:
        """``sizeof(Smem)`` in merge.cu, which asserts it: o, max and sum of every warp."""
        return self.num_warps * (self.head_dim + 2) * 4

    def constants(self) -> dict[str, object]:
        """Values of ``namespace cfg`` in the order printed."""
        return {
            "IN_DTYPE": self.in_dtype,
            "OUT_DTYPE": self.out_dtype,
            "PARTS": self.parts,
            "HEAD_DIM": self.head_dim,
            "NUM_WARPS": self.num_warps,
            "PARTS_AT_ONCE": self.parts_at_once,
            "CTAS_PER_SM": self.ctas_per_sm,
            "SMEM_BYTES": self.smem_bytes,
            "PARAMS_BYTES": _params.MERGE.itemsize,
        }


# Of a block, by the number of parts: a warp takes its parts one after the other, four at the cost of a trip to memory,
# and what more warps have found takes longer to add up (docs/decode.md).
_FEW_PARTS, _MANY_WARPS = 16, 16


def merge_config(in_dtype: Dtype, out_dtype: Dtype, head_dim: int, parts: Parts, num_parts: int) -> MergeConfig:
    """Config for `num_parts` parts."""
    if num_parts <= _FEW_PARTS:
        return MergeConfig(in_dtype, out_dtype, head_dim, parts)
    return MergeConfig(in_dtype, out_dtype, head_dim, parts, _MANY_WARPS, ctas_per_sm=1)


def merge_configs(head_dim: int, dtype: Dtype) -> list[MergeConfig]:
    """Every config whose result has `dtype`: parts of its own dtype, or of float32, of few and of many."""
    counts = (1, _FEW_PARTS + 1)
    configs = [merge_config(dtype, dtype, head_dim, Parts.LSE, n) for n in counts]
    configs += [merge_config(Dtype.FP32, dtype, head_dim, parts, n) for parts in Parts for n in counts]
    return list(dict.fromkeys(configs))
