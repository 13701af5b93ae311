"""One prefix for many users: its keys are read once for all, each user's suffix alone, and `merge` joins the two.

Attention over disjoint sets of keys merges exactly, given the log-sum-exp (lse) of each part.
"""

import numpy as np
from array_module import WHERE, to_host, xp

import cuattn

USERS, PREFIX, Q_HEADS, KV_HEADS, HEAD_DIM = 5, 200, 8, 2, 64
SUFFIXES = (3, 40, 1, 17, 0)  # the last user has said nothing yet


def main() -> None:
    """Compare merged results with attention over prefix and suffix in one cache."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float16)

    prefix = [normal(1, PREFIX, KV_HEADS, HEAD_DIM) for _ in "kv"]
    suffix = [normal(USERS, max(SUFFIXES), KV_HEADS, HEAD_DIM) for _ in "kv"]
    q = xp.asarray(normal(USERS, Q_HEADS, HEAD_DIM))
    suffix_len = xp.asarray(SUFFIXES, dtype=np.int32)

    # To the prefix the users are query tokens of one sequence, up to 16 of them (`prefill` takes more); all of its keys
    # lie before each of them, so nothing is causal.
    shared, shared_lse = cuattn.decode(q[None], *map(xp.asarray, prefix), PREFIX, causal=False, return_lse=True)
    own, own_lse = cuattn.decode(q, *map(xp.asarray, suffix), suffix_len, return_lse=True)
    out, _ = cuattn.merge(xp.stack([shared[0], own]), xp.stack([shared_lse[0], own_lse]))

    whole = [np.concatenate((np.repeat(x, USERS, 0), y), 1) for x, y in zip(prefix, suffix, strict=True)]
    expected = cuattn.decode(q, *map(xp.asarray, whole), suffix_len + PREFIX)
    difference = np.abs(to_host(out).astype(np.float32) - to_host(expected)).max()
    # Parts and results are rounded to float16, which has 11 bits, and so are probabilities.
    limit = 6 * 2.0**-11 * max(np.abs(x[1]).max() for x in (prefix, suffix))
    read, copied = PREFIX + sum(SUFFIXES), USERS * PREFIX + sum(SUFFIXES)
    print(f"on the {WHERE}: {USERS} users read {read} keys a KV head, not {copied}; difference {difference:.1e}")
    np.testing.assert_array_less(difference, limit)


if __name__ == "__main__":
    main()
