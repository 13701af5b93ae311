"""The sizes of a call, from which it is planned."""

from __future__ import annotations

from dataclasses import dataclass

from . import _tbq4
from ._kinds import Dtype, KvFormat


def row_bytes(kv_format: KvFormat, dtype: Dtype, head_dim: int) -> int:
    """Bytes of one K or V row: its elements or codes, without norms."""
    bits = {KvFormat.TBQ4: 4, KvFormat.FP8: 8}.get(kv_format, 8 * dtype.itemsize)
    return head_dim * bits // 8


def norm_bytes(kv_format: KvFormat, head_dim: int) -> int:
    """Bytes of the norms of one K or V row."""
    return head_dim // _tbq4.block_of(head_dim) * _tbq4.NORM_BYTES if kv_format is KvFormat.TBQ4 else 0


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """Sizes of one decode call.

    `max_kv_len` is the capacity of a sequence: its length is known to the device only. Of `adjacent_heads` KV heads, in
    K and in V, the rows stand side by side and can be read together, and so of each divisor of that number.
    """

    dtype: Dtype
    k_format: KvFormat
    v_format: KvFormat
    batch: int
    seqlen_q: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    max_kv_len: int
    adjacent_heads: int = 1

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Query rows per KV head."""
        return self.seqlen_q * self.group

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of full sequences."""
        token = sum(
            row_bytes(f, self.dtype, self.head_dim) + norm_bytes(f, self.head_dim)
            for f in (self.k_format, self.v_format)
        )
        return self.batch * self.num_kv_heads * self.max_kv_len * token

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two, for full sequences and without masks."""
        return 4 * self.batch * self.seqlen_q * self.num_qo_heads * self.head_dim * self.max_kv_len


@dataclass(frozen=True, slots=True)
class PrefillProblem:
    """Sizes of one prefill call.

    `num_tokens` is the number of query tokens of a sequence, or of all `batch` sequences together where they are
    `ragged`: then their lengths are known to the device only, as are those of the keys, of which a sequence has
    `max_kv_len` at most.
    """

    dtype: Dtype
    k_format: KvFormat
    v_format: KvFormat
    batch: int
    num_tokens: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    max_kv_len: int
    ragged: bool = False
    page_size: int = 0  # tokens; 0: keys are not in pages
    softcap: bool = False
    visible_keys: int | None = None  # the most that a token sees, where a window bounds them on both sides

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def total_tokens(self) -> int:
        """Query tokens of all sequences."""
        return self.num_tokens * (1 if self.ragged else self.batch)

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two, for the longest sequences and without masks."""
        return 2 * self.total_tokens * self.num_qo_heads * (self.head_dim + self.value_dim) * self.max_kv_len
