"""What the topic decode measures, and why. Arrays are made in `inputs`."""

from __future__ import annotations

from .cases import SHAPES, DecodeCase

# Sequences, and keys of each: all of 34 MB to 8.6 GB of K and V that others measure. One sequence and four are few CTAs
# without splits; 16 and 64 fill the GPU by themselves. What is left out has the bytes of others or more.
SIZES = (
    *((batch, kv_len) for batch in (1, 4) for kv_len in (8192, 32768, 131072, 262144)),
    *((16, kv_len) for kv_len in (8192, 32768, 131072)),
    *((64, kv_len) for kv_len in (8192, 32768)),
)
# With --all: 17 to 69 GB, calls of 4 to 29 ms.
LARGE_SIZES = ((16, 262144), (64, 131072), (64, 262144))
# Short contexts of one sequence: launches, the first loads and the merge are most of the time, which is to be 8 us at
# most. A KV head of 32/4 heads has all eight query rows of a tile.
SHORT_SHAPES, SHORT_CONTEXTS = (SHAPES[0], (32, 4, 128), SHAPES[1]), (1024, 2048, 4096)
# Keys of one sequence, and formats, whose caches of 4 to 17 MB each half of L2 holds: as where a layer's keys have just
# been written or read.
WARM = ((1024, "raw16"), (4096, "raw16"), (8192, "fp8"), (8192, "tbq4"))
# Drafted tokens: as many query tokens read the keys once, and are to take 1.15 times as long as one at most.
DRAFT_BATCHES, DRAFT_CONTEXT, DRAFT_TOKENS = (1, 4), 32768, (2, 4, 8, 16)
# Unequal lengths, as served batches have them: evenly spread in their logarithm, and a long one among short ones.
GEOMETRIC = tuple(round(16 * 8192 ** (i / 15)) for i in range(16))
ONE_LONG = (131072, *(1024,) * 15)
PAGE_SIZE = 64
# Splits of a fixed size make a result independent of the batch: what that costs many sequences, which would have few
# splits, and one, whose keys would be cut to fill the GPU.
INVARIANT_SIZES, SPLIT_SIZES = ((16, 8192), (1, 131072)), (2048, 1024)


def decode_cases(
    dtype: str = "bfloat16", page_size: int | None = None, *, include_large: bool = False
) -> list[DecodeCase]:
    """Return the cases, equal lengths in pages of one size or dense.

    Parameters
    ----------
    dtype : {"bfloat16", "float16"}
    page_size : int, optional
    include_large : bool, default False
        Whether those of `LARGE_SIZES` are among them.
    """
    sizes = (*SIZES, *(LARGE_SIZES if include_large else ()))
    first = SHAPES[0]
    equal = [
        DecodeCase(batch, kv_len, *heads, dtype, page_size)
        for heads in dict.fromkeys((*SHORT_SHAPES, *SHAPES))
        for batch, kv_len in (
            *((1, kv_len) for kv_len in SHORT_CONTEXTS if heads in SHORT_SHAPES),
            *sorted(sizes if heads in SHAPES else ()),
        )
    ]
    drafts = [
        DecodeCase(batch, DRAFT_CONTEXT, *first, dtype, page_size, seqlen_q=tokens)
        for batch in DRAFT_BATCHES
        for tokens in DRAFT_TOKENS
    ]
    unequal = [
        DecodeCase(len(lengths), max(lengths), *first, dtype, page_size or PAGE_SIZE, lengths=lengths)
        for lengths in (GEOMETRIC, ONE_LONG)
    ]
    warm = [
        DecodeCase(1, kv_len, *heads, dtype, page_size, formats=formats, warm=True)
        for heads in SHAPES
        for kv_len, formats in WARM
    ]
    return [*equal, *drafts, *unequal, *warm]
