"""A serving loop on a paged KV cache: one CUDA graph, captured once, serves every step while sequences grow.

Lengths and page table live on the GPU, so that the graph reads what they hold when it is replayed. Without a GPU the
step is called in its place.
"""

from collections.abc import Callable

import numpy as np
from array_module import WHERE, to_host, xp

import cuattn

PROMPTS, STEPS = np.array([37, 5, 47], np.int32), 12
BATCH, PAGE_SIZE, MAX_PAGES, Q_HEADS, KV_HEADS, HEAD_DIM = 3, 16, 4, 8, 2, 64


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return what repeats a step that ran once already: the replay of its graph, or the step where there is no GPU."""
    if xp is np:
        return step
    stream, pool = xp.cuda.Stream(non_blocking=True), xp.cuda.MemoryPool()
    xp.cuda.Device().synchronize()
    # The workspace of a captured call is the graph's own: it comes from a pool that nothing else uses.
    with stream, xp.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        step()
        graph = stream.end_capture()

    def replay() -> None:
        xp.cuda.Device().synchronize()  # the inputs were written on another stream
        graph.launch(stream)
        stream.synchronize()

    replay.pool = pool  # lives as long as what replays the graph
    return replay


def main() -> None:
    """Serve three sequences for some steps, and compare each with attention over the same tokens in a dense cache."""
    rng = np.random.default_rng(0)
    # What the model would compute: keys and values of all tokens, by their position, and queries of each step.
    k_all, v_all = rng.standard_normal((2, BATCH, MAX_PAGES * PAGE_SIZE, KV_HEADS, HEAD_DIM)).astype(np.float16)
    queries = rng.standard_normal((STEPS, BATCH, Q_HEADS, HEAD_DIM)).astype(np.float16)

    free = iter(rng.permutation(BATCH * MAX_PAGES).tolist())
    k_cache, v_cache = (xp.zeros((BATCH * MAX_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM), np.float16) for _ in "kv")
    page_table, kv_len = xp.zeros((BATCH, MAX_PAGES), np.int32), xp.array(PROMPTS)
    for b, length in enumerate(PROMPTS.tolist()):
        pages = -(-length // PAGE_SIZE)
        page_table[b, :pages] = xp.asarray([next(free) for _ in range(pages)])
    # A step reads and writes these arrays, whatever is in them.
    q, out = (xp.zeros((BATCH, Q_HEADS, HEAD_DIM), np.float16) for _ in range(2))
    k_new, v_new = (xp.zeros((BATCH, KV_HEADS, HEAD_DIM), np.float16) for _ in "kv")

    def step() -> None:
        cuattn.append(k_new, v_new, k_cache, v_cache, kv_len, page_table=page_table)
        cuattn.decode(q, k_cache, v_cache, kv_len, page_table=page_table, out=out)

    step()  # compiles and loads the kernels, which a capture must not do; the prompts overwrite what it appended
    run = captured(step)
    # All prompts in one launch; the shorter ones stand at the end of the axis.
    behind = [np.arange(n - max(PROMPTS), n).clip(0) for n in PROMPTS]
    k_prompt, v_prompt = (xp.asarray(np.stack([x[b, behind[b]] for b in range(BATCH)])) for x in (k_all, v_all))
    cuattn.append(k_prompt, v_prompt, k_cache, v_cache, kv_len, page_table=page_table)

    for index, positions in enumerate(PROMPTS + i for i in range(STEPS)):
        for b in np.flatnonzero(positions % PAGE_SIZE == 0):  # its new token begins a page
            page_table[int(b), int(positions[b]) // PAGE_SIZE] = next(free)
        kv_len += 1
        q[...] = xp.asarray(queries[index])
        k_new[...], v_new[...] = (xp.asarray(x[np.arange(BATCH), positions]) for x in (k_all, v_all))
        run()
        expected = cuattn.decode(queries[index], k_all, v_all, positions + 1)  # NumPy arrays: the reference
        # Probabilities and results are rounded to float16, which has 11 bits.
        np.testing.assert_allclose(to_host(out), expected, rtol=0, atol=4 * 2.0**-11 * np.abs(v_all).max())
    print(f"on the {WHERE}: {STEPS} steps, lengths now {to_host(kv_len).tolist()}; all agree with a dense cache")


if __name__ == "__main__":
    main()
