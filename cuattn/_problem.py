"""The sizes of a call, from which it is planned."""

from __future__ import annotations

from dataclasses import dataclass

from ._kinds import Dtype, KvFormat


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """Sizes of one decode call; `max_kv_len` is the capacity of a sequence: its length is known to the device only."""

    dtype: Dtype
    kv_format: KvFormat
    batch: int
    seqlen_q: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    max_kv_len: int

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
        return 2 * self.batch * self.num_kv_heads * self.max_kv_len * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two, for full sequences and without masks."""
        return 4 * self.batch * self.seqlen_q * self.num_qo_heads * self.head_dim * self.max_kv_len
