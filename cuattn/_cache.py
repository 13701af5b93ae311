"""A checked KV cache of any format, as the checks hand it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from ._arrays import Array, dtype_name, pointer
from ._kinds import Dtype, KvFormat


class Planes(NamedTuple):
    """Rows in TBQ4, as `Tbq4Array` holds them."""

    codes: Array
    norms: Array
    mean: Array | None


class Codes(NamedTuple):
    """Rows in fp8, as `Fp8Array` holds them."""

    codes: Array
    scale: Array | float


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys or values, in pages or dense; dense caches have a page a sequence.

    Attributes
    ----------
    rows : array, shape (num_pages, page_size, num_kv_heads, head_dim), or with head_dim / 2 codes of uint8
        Elements, or the codes of rows in TBQ4 or, head_dim of uint8, in fp8.
    norms : array, shape (num_pages, page_size, num_kv_heads, head_dim / block), float16, or None
        None unless the format is TBQ4.
    mean : array, shape (num_kv_heads, head_dim), float32, or None
        Contiguous. Stored rows are without it.
    kv_format : KvFormat
    scale : array, shape (num_kv_heads,), float32, or float, or None
        Contiguous. None unless the format is fp8.
    """

    rows: Array
    norms: Array | None = None
    mean: Array | None = None
    kv_format: KvFormat = KvFormat.RAW16
    scale: Array | float | None = None

    @classmethod
    def of_elements(cls, rows: Array) -> Self:
        """Take rows of elements, whose dtype is the format."""
        is_float = dtype_name(rows) == Dtype.FP32.value
        return cls(rows, kv_format=KvFormat.RAW32 if is_float else KvFormat.RAW16)

    def map(self, of: Callable[[str, Array | None], Array | None], name: str) -> Self:
        """Return a cache of what `of` makes of the arrays, called `name`, or with ``_norms`` and so on behind."""
        norms, mean = of(f"{name}_norms", self.norms), of(f"{name}_mean", self.mean)
        scale = self.scale if self.scales is None else of(f"{name}_scales", self.scales)
        return replace(self, rows=of(name, self.rows), norms=norms, mean=mean, scale=scale)

    @property
    def scales(self) -> Array | None:
        """The scale, if each KV head has its own."""
        return None if isinstance(self.scale, float) else self.scale

    @property
    def num_pages(self) -> int:
        """Pages, or sequences of a dense cache."""
        return int(self.rows.shape[0])

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.rows.shape[1])

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return int(self.rows.shape[2])

    @property
    def head_dim(self) -> int:
        """Elements of a row."""
        return int(self.rows.shape[-1]) * (2 if self.kv_format is KvFormat.TBQ4 else 1)

    @property
    def ndim(self) -> int:
        """Axes; the checks leave only caches with four."""
        return int(self.rows.ndim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows as elements."""
        return (*self.rows.shape[:-1], self.head_dim)

    @property
    def has_elements(self) -> bool:
        """Whether rows are elements, whose dtype is the format, rather than codes."""
        return self.kv_format in {KvFormat.RAW16, KvFormat.RAW32}

    @property
    def given(self) -> Array | Planes | Codes:
        """What `cuattn.reference` takes: the rows, the planes of TBQ4, or the codes of fp8 and their scale."""
        if self.scale is not None:
            return Codes(self.rows, self.scale)
        return self.rows if self.norms is None else Planes(self.rows, self.norms, self.mean)

    @property
    def adjacent_heads(self) -> int:
        """KV heads, 1, 2 or 4 that divide all, whose rows stand side by side, and whose norms are one aligned word.

        1 for rows of elements, which are long enough by themselves.
        """
        if self.norms is None:
            return 1
        norm_bytes = self.norms.shape[-1] * self.norms.dtype.itemsize
        if self.rows.strides[2] != self.rows.shape[-1] or self.norms.strides[2] != norm_bytes:
            return 1
        places = (self.num_kv_heads * norm_bytes, pointer(self.norms), *self.norms.strides[:2])
        return next((n for n in (4, 2) if all(place % (n * norm_bytes) == 0 for place in places)), 1)
