"""Quick start: a prompt through `prefill`, then one token through `decode`, which must agree with the prompt's end.

Run it with ``python examples/quick_start.py``; on a machine without a GPU the same calls run the NumPy reference.
"""

import numpy as np
from array_module import WHERE, to_host, xp

import cuattn

BATCH, TOKENS, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 160, 8, 2, 64


def main() -> None:
    """Attend to a prompt twice."""
    rng = np.random.default_rng(0)
    q, k, v = (
        xp.asarray(rng.standard_normal((BATCH, TOKENS, heads, HEAD_DIM)).astype(np.float16))
        for heads in (Q_HEADS, KV_HEADS, KV_HEADS)
    )

    prompt = cuattn.prefill(q, k, v, causal=True)  # [batch, tokens, q_heads, head_dim]
    # The keys and values are the cache. The second sequence ends earlier; what lies behind its end is not read.
    kv_len = xp.asarray([TOKENS, TOKENS - 60], dtype=np.int32)
    newest = xp.stack([q[0, TOKENS - 1], q[1, TOKENS - 61]])
    out, lse = cuattn.decode(newest, k, v, kv_len, return_lse=True)  # [batch, q_heads, head_dim], [batch, q_heads]

    print(f"on the {WHERE}: out {out.shape} {out.dtype}, lse {lse.shape} {lse.dtype}")
    print(cuattn.plan_decode(newest, k, v, kv_len))
    expected = np.stack([to_host(prompt)[0, TOKENS - 1], to_host(prompt)[1, TOKENS - 61]])
    difference = np.abs(to_host(out).astype(np.float32) - expected).max()
    # Each of the two rounds probabilities and results to float16, which has 11 bits.
    limit = 4 * 2.0**-11 * np.abs(to_host(v).astype(np.float32)).max()
    print(f"decode and the prompt's end differ by {difference:.1e}, at most {limit:.1e} expected")
    np.testing.assert_array_less(difference, limit)


if __name__ == "__main__":
    main()
