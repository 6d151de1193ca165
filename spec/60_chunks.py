# ---
# jupyter:
#   ruff: noqa:N999
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Chunks: the same numbers by matrix products
#
# The recurrences of the last two chapters are loops, one token after the other, and hardware likes large matrix
# products. Every fast implementation therefore cuts a segment into **chunks** of `L` tokens, does the tokens of a chunk
# together, and passes only the state on from chunk to chunk. This chapter derives that form step by step and checks
# each step against the loop. A chunk length is nobody's business but the kernel's: it may change no result (CHUNK-1).
#
# The grid starts anew at every segment. Below, offsets `[0, 6, 6, 9]` in chunks of 4; the hatched places are filled
# with tokens that do nothing.

# %%
import numpy as np

from statescan.conformance.mutants import mutant
from statescan.reference.delta import gated_delta_rule
from statescan.reference.host.metadata import PREFILL_NAMES, prefill_metadata
from statescan.reference.second import delta as chunked
from statescan.reference.ssd import ssd
from statescan.spec.figures import chunk_grid
from statescan.spec.notation import channels, index, numbers, one_hot, states, tokens, vectors

chunk_grid([0, 6, 6, 9], 4)

# %% [markdown]
# ## What a token writes
#
# Take one chunk of one head that the state $S_0$ enters. Call $u_t$ the row that token $t$ writes under its key, beta
# times the correction. The loop of the delta rule, keeping every $u_t$:

# %%
rng = np.random.default_rng(1)
L, K, V = 5, 3, 2
q, k = rng.normal(size=(2, L, K)) / np.sqrt(K)
v, entering = rng.normal(size=(L, V)), rng.normal(size=(K, V))
g, beta = -rng.random(L), rng.random(L)

state, o, u = entering, np.zeros((L, V)), np.zeros((L, V))
for t in range(L):
    state = np.exp(g[t]) * state
    u[t] = beta[t] * (v[t] - k[t] @ state)
    state = state + np.outer(k[t], u[t])
    o[t] = q[t] @ state


def one_head(*arrays):
    return [array[None, :, None] for array in arrays]


expected, _ = gated_delta_rule(*one_head(q, k, v, g, beta), initial_state=entering[None, None], scale=1.0)
assert np.allclose(o, expected[0, :, 0], rtol=0, atol=1e-14)

# %% [markdown]
# ## 1. Decays between rows
#
# Let $D_{ij} = e^{g_{j+1} + \dots + g_i}$ be what is left at row $i$ of what row $j$ wrote, for $j \le i$, and
# $E_i = e^{g_1 + \dots + g_i}$ what is left there of the entering state. The sums run from row $j$ on: no exponent is
# above 0, and no number is the difference of two long sums. The state is then everything that was written, each as far
# as it has faded:
#
# $$ S_i = E_i S_0 + \sum_{j \le i} D_{ij} \, k_j u_j^\top $$

# %%
def decays(g):
    between = np.full((len(g), len(g)), -np.inf)
    for i in range(len(g)):
        between[i, :i] = between[i - 1, :i] + g[i]
        between[i, i] = 0
    return np.exp(between), np.exp(np.cumsum(g))


D, E = decays(g)
assert np.allclose(E[-1] * entering + (D[-1, :, None] * k).T @ u, state, rtol=0, atol=1e-14)
assert np.allclose(D, np.tril(E[:, None] / E), rtol=1e-14, atol=0)  # the same by quotients, while nothing is 0

# %% [markdown]
# ## 2. A triangular system for the writes
#
# Put this state into the correction of token $i$. What it finds under its key is what the entering state left there,
# and what the tokens before it wrote there:
#
# $$ u_i = \beta_i \big( v_i - E_i S_0^\top k_i \big) - \sum_{j < i} A_{ij} \, u_j, \qquad
#    A_{ij} = \beta_i \, (k_i \cdot k_j) \, D_{ij} $$
#
# $A$ is strictly lower triangular: a token depends on those before it and not on itself. All writes of a chunk at once
# are the solution of $(1 + A) U = \beta (V - E K S_0)$.

# %%
A = np.tril(beta[:, None] * (k @ k.T) * D, -1)
right = beta[:, None] * (v - E[:, None] * (k @ entering))
assert np.allclose(u + A @ u, right, rtol=0, atol=1e-14)

# %% [markdown]
# In drawers: three tokens write 4, 6 and 10 to one drawer, nothing fades, beta is 1. Then $A$ is 1 everywhere below the
# diagonal, and what the tokens write are the differences, 4, 2 and 4.

# %%
same_drawer = np.tril(np.ones((3, 3)), -1)
assert numbers(np.linalg.solve(np.eye(3) + same_drawer, [4, 6, 10])) == [4, 2, 4]

# %% [markdown]
# ## 3. Its inverse
#
# $T = (1 + A)^{-1}$ is lower triangular with a diagonal of 1, and its rows follow from the top: row $i$ is minus row
# $i$ of $A$ times the rows above. It is also the sum of the powers of $-A$, which ends because the `L`-th power of a
# strictly triangular matrix is 0. Cut off after the first power it is no inverse (CHUNK-1 shows what that gives).

# %%
def invert(A):
    T = np.eye(len(A))
    for i in range(1, len(A)):
        T[i, :i] = -A[i, :i] @ T[:i, :i]
    return T


T = invert(A)
assert np.allclose(T @ right, u, rtol=0, atol=1e-14)
assert np.allclose(T, sum(np.linalg.matrix_power(-A, n) for n in range(L)), rtol=0, atol=1e-14)
assert not np.allclose(T, np.eye(L) - A, rtol=0, atol=1e-3)
assert numbers(invert(same_drawer)) == [[1, 0, 0], [-1, 1, 0], [0, -1, 1]]

# %% [markdown]
# ## 4. Outputs, and the state that leaves
#
# $$ o_i = E_i S_0^\top q_i + \sum_{j \le i} (q_i \cdot k_j) D_{ij} \, u_j, \qquad
#    S_L = E_L S_0 + \sum_j D_{Lj} \, k_j u_j^\top $$
#
# In the sum of the outputs $j = i$ takes part, since a token reads after its own write (GDN-4).

# %%
reads = np.tril((q @ k.T) * D)
assert np.allclose(E[:, None] * (q @ entering) + reads @ u, o, rtol=0, atol=1e-14)

# %% [markdown]
# ## 5. Only the state is passed on
#
# $S_0$ enters the right side and nothing else. With $W = T \beta E K$ the writes are $U = T \beta V - W S_0$, so that
# $T$, $T \beta V$ and $W$ of all chunks are made at once, and the chain from chunk to chunk is two products:
#
# $$ U = T \beta V - W S_0, \qquad S_L = E_L S_0 + (D_L K)^\top U $$

# %%
ready, W = T @ (beta[:, None] * v), T @ (beta[:, None] * E[:, None] * k)
assert np.allclose(ready - W @ entering, u, rtol=0, atol=1e-14)

# %% [markdown]
# ## 6. Many chunks, many segments
#
# A segment is its chunks in a row, and a pack is its segments side by side: each begins with its own entering state,
# and with it decays and grid begin anew (CHUNK-3). For the drawers of 4, 6 and 10 every chunk length gives the loop's
# numbers bit for bit; for arbitrary numbers it gives them up to rounding, which differs with the order of the sums.

# %%
def scan(pack, lengths, chunk):
    outputs = []
    for n, end in enumerate(np.cumsum(lengths)):
        state = pack["entering"][n]
        for low in range(end - lengths[n], end, chunk):
            q, k, v, g, beta = (pack[name][low : min(low + chunk, end)] for name in ("q", "k", "v", "g", "beta"))
            D, E = decays(g)
            T = invert(np.tril(beta[:, None] * (k @ k.T) * D, -1))
            u = T @ (beta[:, None] * (v - E[:, None] * (k @ state)))
            outputs.append(E[:, None] * (q @ state) + np.tril((q @ k.T) * D) @ u)
            state = E[-1] * state + (D[-1, :, None] * k).T @ u
    return np.concatenate(outputs)


lengths = [6, 0, 3]
pack = {"q": rng.normal(size=(9, K)), "k": rng.normal(size=(9, K)) / K, "v": rng.normal(size=(9, V)),
        "g": -rng.random(9), "beta": rng.random(9), "entering": rng.normal(size=(3, K, V))}  # fmt: skip
inputs = one_head(*(pack[name] for name in ("q", "k", "v", "g", "beta")))
loop, _ = gated_delta_rule(*inputs, index(0, 6, 6, 9), pack["entering"][:, None], scale=1.0)
for chunk in (1, 2, 4, 9, 64):
    assert np.allclose(scan(pack, lengths, chunk), loop[0, :, 0], rtol=0, atol=1e-13)

# %% [markdown]
# ## 7. The siblings
#
# - **GDP**: a token of `M` copies is `M` rows, the gate on the first, log-decay 0 on the others, and the query on the
#   last. The grid counts rows.
# - **KDA**: a decay per channel stands inside the products of keys: $A_{ij} = \beta_i \sum_c k_{ic} D_{ijc} k_{jc}$.
#   There is no matrix $D$ to multiply by any more, and kernels split it at a reference row, which is where their
#   precision goes (NUM-4).
# - **Mamba2** corrects nothing: what a token writes, $\Delta_t x_t$, is known beforehand, and the system is gone. A
#   chunk is summed on its own, the state is passed on, and the outputs are read from both.
#
# Mamba2's running sum of 1 to 6 in chunks of 4: the chunks add up to 10 and 11, the state passed on is 0, 10, 21, and
# the outputs of the second chunk are its own sums, 5 and 11, on top of 10.

# %%
x = np.arange(1, 7)
added = [int(x[:4].sum()), int(x[4:].sum())]
passed = [0, added[0], added[0] + added[1]]
assert (added, passed) == ([10, 11], [0, 10, 21])
outputs = [*np.cumsum(x[:4]), *(passed[1] + np.cumsum(x[4:]))]
assert numbers(np.cumsum(x[4:])) == [5, 11]

ones = np.ones((1, 6, 1, 1), np.float32)
by_loop, final = ssd(vectors(*x), ones[..., 0], channels(0), ones, ones, dt_softplus=False, output_final_state=True)
assert (numbers(by_loop), numbers(final)) == (outputs, [21])
assert outputs == [1, 3, 6, 10, 15, 21]

# %% [markdown]
# (CHUNK-1)=
# ## CHUNK-1  Every chunk length gives the recurrence
#
# :::{clause} CHUNK-1
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2406.06484; https://arxiv.org/abs/2405.21060, section 6
# :applies: gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_delta_*_prefill, ssd_prefill
# :observable: value
# :::
#
# For every chunk length the result MUST be that of the recurrence, bit for bit where every step of both is exact.
#
# Example. Tokens write `4, 6, 10` to one drawer and read it -> `4, 6, 10`, in chunks of 1, 2, 3 and 64.
#
# Not this. The inverse cut off after its first power: the third token subtracts both writes before it in full, and
# `4, 6, 6` comes out. Fault: solve-cut-to-one-step.
#
# Why. Where keys are nearly orthogonal, as random ones are, the higher powers are small. Repeated words repeat their
# keys.

# %%
k, v = one_hot(0, 0, 0), vectors(4, 6, 10)
writes = {"q": k, "k": k, "v": v, "g": tokens(0, 0, 0), "beta": tokens(1, 1, 1), "scale": 1.0}
assert numbers(gated_delta_rule(**writes)[0]) == [4, 6, 10]
for chunk in (1, 2, 3, 64):
    assert numbers(chunked.gated_delta_rule(**writes, chunk=chunk)[0]) == [4, 6, 10]

wrong = mutant("solve-cut-to-one-step")["gated_delta_rule"]
assert numbers(wrong(**writes)[0]) == [4, 6, 6]

# %% [markdown]
# (CHUNK-2)=
# ## CHUNK-2  Every token once, at the edges too
#
# :::{clause} CHUNK-2
# :level: MUST
# :since: 0.1
# :source: decision; https://arxiv.org/abs/2405.21060, section 6
# :applies: gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_delta_*_prefill, ssd_prefill
# :observable: value
# :::
#
# Every token MUST take part in exactly one chunk, those of a row's last and partial chunk included.
#
# Example. A running sum of 1 to 6: `1, 3, 6, 10, 15, 21`, and the state is `21`.
#
# Not this. In chunks of four the partial one is left out: `1, 3, 6, 10, 0, 0`, and the state is `10`. Fault:
# last-partial-chunk-dropped.
#
# Why. Lengths in tests are multiples of 64. Lengths of prompts are not.

# %%
total = {"x": vectors(1, 2, 3, 4, 5, 6), "dt": ones[..., 0], "A": channels(0), "B": ones, "C": ones,
         "dt_softplus": False, "output_final_state": True}  # fmt: skip
assert list(map(numbers, ssd(**total))) == [[1, 3, 6, 10, 15, 21], [21]]

wrong = mutant("last-partial-chunk-dropped")["ssd"]
assert list(map(numbers, wrong(**total))) == [[1, 3, 6, 10, 0, 0], [10]]

# %% [markdown]
# (CHUNK-3)=
# ## CHUNK-3  Decays are measured from the row's start
#
# :::{clause} CHUNK-3
# :level: MUST
# :since: 0.1
# :source: https://github.com/fla-org/flash-linear-attention, chunk_local_cumsum with cu_seqlens; decision
# :applies: gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_delta_*_prefill, ssd_prefill
# :observable: value
# :::
#
# The chunk grid and every sum of log-decays MUST start anew at the first token of each row.
#
# Example. Offsets `[0, 1, 3]`, entering states of one drawer `5` and `8`. Token 0 forgets; the other two keep, and
# write nothing -> `0, 8, 8`.
#
# Not this. The entering state of the second segment fades by all that the pack has summed up so far: `0, 0, 0`. Fault:
# decay-measured-from-the-pack.
#
# Why. A running sum over the whole pack is one call of a library. It is right for the first segment, and for every pack
# with one.

# %%
still = {"q": one_hot(0, 0, 0), "k": one_hot(0, 0, 0), "v": vectors(0, 0, 0), "g": tokens(-1024, 0, 0),
         "beta": tokens(0, 0, 0), "cu_seqlens": index(0, 1, 3), "scale": 1.0}  # fmt: skip
start = states([5, 0], [8, 0])
assert numbers(gated_delta_rule(**still, initial_state=start)[0]) == [0, 8, 8]

wrong = mutant("decay-measured-from-the-pack")["gated_delta_rule"]
assert numbers(wrong(**still, initial_state=start)[0]) == [0, 0, 0]

# %% [markdown]
# (CHUNK-5)=
# ## CHUNK-5  An entering state enters once, and fades
#
# :::{clause} CHUNK-5
# :level: MUST
# :since: 0.1
# :source: https://github.com/state-spaces/mamba, state passing with initial states
# :applies: gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_delta_*_prefill, ssd_prefill
# :observable: value
# :::
#
# An entering state MUST fade by the decays of its row's first chunk and enter that chunk alone, later ones receiving it
# as part of the state that is passed on.
#
# Example. A drawer holds `16` and five tokens halve it -> `8, 4, 2, 1, 0.5`.
#
# Not this. In chunks of four it is added again at the second, where it finds 1 and makes it 17: `8, 4, 2, 1, 8.5`.
# Fault: entering-state-at-every-chunk.
#
# Why. With an entering state of zeros nothing is wrong, and most tests enter with zeros. In serving that is the first
# piece of a prompt only.

# %%
halves = {"q": one_hot(*[0] * 5), "k": one_hot(*[0] * 5), "v": vectors(*[0] * 5), "g": tokens(*[-0.6931472] * 5),
          "beta": tokens(*[0] * 5), "scale": 1.0, "initial_state": states([16, 0])}  # fmt: skip
assert numbers(gated_delta_rule(**halves)[0]) == [8, 4, 2, 1, 0.5]

wrong = mutant("entering-state-at-every-chunk")["gated_delta_rule"]
assert numbers(wrong(**halves)[0]) == [8, 4, 2, 1, 8.5]
assert 1 + 16 == 17 == 2 * 8.5

# %% [markdown]
# ## Chunk tables
#
# A kernel that runs all chunks at once finds its own in a table: for each chunk the row it belongs to and its number in
# that row. `chunk_offsets` counts the chunks up: rows of 70, 0, 33 and 0 tokens in chunks of 64 have `0, 2, 3, 4, 5`.
# Entries that pad a table to a fixed size are (-1, 0), and no kernel acts on them. The tables of a step of serving, and
# why an empty row is in them, stand in META-10.

# %%
def chunk_tables(lengths, by=None, **more):
    build = prefill_metadata if by is None else by["prefill_metadata"]
    slots = np.arange(len(lengths))
    found = build(np.array(lengths), slots, None, None, len(lengths), **more)
    return dict(zip(PREFILL_NAMES, (array.tolist() for array in found), strict=True))


step = chunk_tables([70, 0, 33, 0], padded_tokens=128, chunk_size=64)
assert step["chunk_indices"] == [[0, 0], [0, 1], [1, 0], [2, 0], [3, 0], [-1, 0]]
assert step["chunk_offsets"] == [0, 2, 3, 4, 5]

# %% [markdown]
# (CHUNK-4)=
# ## CHUNK-4  As many chunks as the stream of the kernel fills
#
# :::{clause} CHUNK-4
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: prefill_metadata
# :observable: value, metadata
# :::
#
# A row of `n` tokens MUST have `ceil(n / L)` chunks in a table of tokens and `ceil(n * M / L)` in a table of copies,
# and one where that is none.
#
# Example. Rows of 5 and 4 tokens of 2 copies, chunks of 4: 2 and 1 chunks of tokens, 3 and 2 of copies; the table of
# copies is `[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]` and one entry of padding.
#
# Not this. Chunks of tokens times copies, 4 and 2: `[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]`. Fault:
# copies-chunked-by-tokens.
#
# Why. The last entry of the first row lies past its 10 rows of copies, where those of the second row are. Tables are
# made for the longest batch, so one entry too many takes another row's place in a full one.

# %%
given = {"padded_tokens": 9, "chunk_size": 4, "num_householder": 2}
assert [-(-n // 4) for n in (5, 4)] == [2, 1]
assert [-(-n * 2 // 4) for n in (5, 4)] == [3, 2]
assert chunk_tables([5, 4], **given)["chunk_indices_dp"] == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [-1, 0]]

wrong = mutant("copies-chunked-by-tokens")
assert [2 * -(-n // 4) for n in (5, 4)] == [4, 2]
assert chunk_tables([5, 4], wrong, **given)["chunk_indices_dp"] == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]
assert 5 * 2 == 10

# %% [markdown]
# ## Where precision goes
#
# The loop rounds a sum of two numbers a token. The chunked form has four places more:
#
# - **differences of long sums.** With $D_{ij}$ as $e^{c_i - c_j}$ a decay of -1024 earlier in the chunk takes the
#   digits of all that follow: near 1024 neighbours in float32 are 1/8192 apart, and a decay of -0.001 becomes
#   -0.0009765625;
# - **positive exponents.** $e^{-c_j}$ on its own is infinite where $e^{c_i}$ is 0, and their product is no number
#   (NUM-4);
# - **the inverse.** With keys of length 1 and beta up to 2 no entry of it passes 2. With longer keys, so that beta
#   times the squared length is 3, entries double from row to row: this is what the keys are normalised for;
# - **operands.** Kernels round what they multiply to 16 bits. An implementation declares this, and is judged by it
#   (see the score in the next chapter); the state itself it carries in float32 (NUM-2).

# %%
c = np.cumsum(np.array([-1024, -0.001], np.float32), dtype=np.float32)
assert float(c[1] - c[0]) == -0.0009765625
assert np.spacing(np.float32(1024)) == 1 / 8192

assert numbers(invert(2 * np.tril(np.ones((4, 4)), -1))[3]) == [-2, 2, -2, 1]
assert numbers(invert(3 * np.tril(np.ones((4, 4)), -1))[3]) == [-12, 6, -3, 1]
