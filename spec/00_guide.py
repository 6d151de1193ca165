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
# # How to read this
#
# This is the specification of recurrent-state sequence mixers (Mamba2, Gated Delta Net, Gated Delta Product, Kimi Delta
# Attention) on packed sequences and in serving. Each chapter is a Python file: its text is what you read here, and its
# code computes every number in the text. A number that is not computed does not get in.
#
# | you are | read | then |
# |---|---|---|
# | new to this, or settling an argument | the chapters in order; each rule has numbers to check it with | each "Why" |
# | writing a kernel | the operation table below, then the clauses that apply to your operations | run the suite on it |
# | building an engine | pools, slots and rows; the errors below | the import of the fast path |
# | changing the specification | how a clause is read, below | the lint in the tests |
#
# | chapter | says |
# |---|---|
# | [Packed sequences](10_packed.py) | where one sequence ends and the next begins, and what must not cross |
# | [The short convolution](20_conv.py) | the window before every recurrence |
# | [Pools, slots and rows](30_pools.py) | serving: who reads and writes which memory, for windows and states alike |
# | [Gates and norms](40_gates.py) | how much is forgotten, and how much is written |
# | [The delta rule](50_delta.py) | GDN, GDP and KDA, as drawers that are opened and filled |
# | [Mamba2](55_ssd.py) | a running sum that fades |
# | [Chunks](60_chunks.py) | the same numbers by matrix products, derived step by step |
# | [Numbers and gradients](70_numerics.py) | what is rounded, what the gradients are, how a result is judged |
# | [Installed versions](90_versions.py) | what has to be installed |

# %%
import re

from statescan.reference.arrays import round_to
from statescan.reference.conv import causal_conv1d
from statescan.reference.delta import gated_delta_rule
from statescan.spec.clauses import parse_chapters
from statescan.spec.contract import ERRORS, OPERATIONS
from statescan.spec.notation import Markdown, ids, index, numbers, one_hot, refusal, runs, taps, tokens, vectors

# %% [markdown]
# ## How a clause is read
#
# A rule is called a clause and has a label that never changes, such as PACK-3. It is written in one form:
#
# - **the box**: how binding it is, since which version, the public text it comes from, the operations it applies to
#   (`*_update` is every operation with that ending), and what shows whether it is kept;
# - **the rule**, one sentence with one word in capitals;
# - **Example**, small enough to check by eye;
# - **Not this**, the result of a known fault on the same example, and the fault's name. If your kernel gives this
#   number, you know what it does wrong;
# - **Why**, the reason, or what happens in the field without the rule;
# - **the cell**, which runs the example on the reference and the wrong one on a model that has the fault.
#
# The word in capitals is the level. The two strict ones, for what is required and for what is forbidden, are tested;
# the two loose ones, for what is advised and for what is allowed, are written down so that nobody takes them for
# required. Statements without such a word explain.
#
# The public texts named in the boxes are the pages of Megatron-Core on
# [packed_seq_helpers](https://docs.nvidia.com/megatron-core/developer-guide/latest/apidocs/core/core.ssm.packed_seq_helpers.html)
# and
# [ssm_inference](https://docs.nvidia.com/megatron-core/developer-guide/latest/apidocs/core/core.ssm.ssm_inference.html).
# "Decision" means that no public text settles the point.
#
# | observed by | what a test looks at |
# |---|---|
# | value | numbers, compared exactly where an exact example exists |
# | bits | the bytes of a result |
# | untouched | the bytes of everything that is not a result |
# | error | that a call is refused, and the class of the error |
# | shape | sizes and element type |
# | relation | two calls of one implementation, and what holds between them |
# | metadata | index arrays made for kernels |
# | text | words that are part of an interface |
#
# The middle of PACK-3, for instance, as a program can ask for it:

# %%
clause = parse_chapters()["PACK-3"]
Markdown(f"{clause.sentence}\n\nExample. {clause.example}\n\nNot this. {clause.neighbour}")

# %% [markdown]
# ## How numbers are written
#
# Ids in runs, id x length: `0x3 1x2` is three rows of id 0, then two of id 1. Tensors of one channel as the row of
# their numbers. Convolutions with the weight 1000, 100, 10, 1, so that the digits of an output spell the tokens it
# read: with tokens 1, 2, 3 the outputs are `1, 12, 123`. States of the delta rules as lists of drawers, opened by keys
# that are 1 at one place: 4 written to drawer 0 and 6 to drawer 1 leave `4, 6`.

# %%
assert runs(ids(0, 0, 0, 1, 1)) == "0x3 1x2"
assert numbers(causal_conv1d(tokens(1, 2, 3), taps(1000, 100, 10, 1))[0]) == [1, 12, 123]
k, v = one_hot(0, 1), vectors(4, 6)
assert numbers(gated_delta_rule(k, k, v, tokens(0, 0), tokens(1, 1), output_final_state=True)[1]) == [4, 6]

# %% [markdown]
# ## Axes
#
# One letter, one meaning, in every shape of every page.
#
# | letter | size of | letter | size of |
# |---|---|---|---|
# | `T` | tokens in the pack | `K` | key dim |
# | `N` | rows: segments, or requests of a step | `V` | value dim |
# | `J` | tokens of a row in one decode call, 1 + drafts | `M` | Householder copies |
# | `C` | convolution channels | `P` | headdim (Mamba2) |
# | `W` | convolution width | `R` | d_state (Mamba2) |
# | `H` | query and key heads, or heads (Mamba2) | `L` | chunk length |
# | `HV` | value heads, a multiple of `H` | `I` | entries of an intermediate buffer, at least `J` |
# | `G` | groups (Mamba2's B and C) | `X` | snapshots |
# | `slots` | slots of a pool | `D`, `group` | last axis of a norm, and a group of it |
# | `batch` | batch rows of a call without packing | | |
#
# Packed tensors have a leading axis of 1, `[1, T, ...]`; decode tensors are `[N, J, ...]`. The `M` copies of a token
# lie next to each other: copy `m` of token `t` is row `t*M + m`. Head `h` of `heads` uses group
# `h // (heads // groups)`.

# %%
LETTERS = set(re.findall(r"\w+", "T N J C W H HV G slots batch K V M P R L I X D group"))
arguments = [argument for operation in OPERATIONS.values() for argument in operation.tensors]
shapes = [size for argument in arguments for shape in argument.alternatives for size in shape]
assert {letter for size in shapes for letter in re.findall("[A-Za-z]+", size)} <= LETTERS

# %% [markdown]
# ## Glossary
#
# | symbol | code name | shape | meaning |
# |---|---|---|---|
# | $c$ | `cu_seqlens` | `[N+1]` | offsets: where each segment of a pack starts, and where the last one ends |
# | | `seq_idx` | `[1, T]` | ids: the segment of each row; -1 outside every segment |
# | $x$ | `x` | `[1, T, C]` | inputs of the convolution; of Mamba2 `[1, T, H, P]` |
# | $w$, $b$ | `weight`, `bias` | `[C, W]`, `[C]` | taps of the convolution, oldest first, and what is added |
# | | `initial_windows`, `conv_pool` | `[N, C, W]`, `[slots, C, W]` | windows: the last `W` raw inputs, newest last |
# | $q$, $k$ | `q`, `k` | `[1, T, H, K]` | queries and keys |
# | $v$, $o$ | `v`, `o` | `[1, T, HV, V]` | values, and outputs of the delta rules |
# | $g$ | `g` | `[1, T, HV]` | log-decay, at most 0: the state is multiplied by $e^g$; per key channel `[1, T, HV, K]` |
# | $\beta$ | `beta` | `[1, T, HV]` | how much of the correction is written |
# | $S$ | `initial_state`, `state_pool` | `[N, HV, K, V]`, `[slots, HV, K, V]` | the state; of Mamba2 `[..., H, P, R]` |
# | $\Delta$ | `dt` | `[1, T, H]` | step size of Mamba2 |
# | $A$, $B$, $C$, $D$, $z$ | the same | see the table | Mamba2's decay rate, write and read vectors, skip, gate |
# | | `read_slots`, `write_slots` | `[N]` | the slot a row resumes from, and the one it stores to |
# | | `num_accepted` | `[N]` | accepted drafts, the base token not counted |
# | | `num_tokens` | `[N]` | real tokens of a row |
# | | `snapshot_positions` | `[X]` | numbers of tokens after which the window or state is recorded |
#
# **Pack**: sequences laid end to end. **Segment**: one of them. **Row**: a segment or a request as one call sees it.
# **Piece**: part of a prompt that one step runs. **Slot**: the place of one request in a pool. **Draft**: a token that
# was proposed and not yet accepted.

# %% [markdown]
# ## Checks and errors
#
# A *shape rule* needs ranks, sizes, element types and settings; it is checked always, everywhere. A *value rule* needs
# the numbers in an index tensor: offsets that decrease, a slot out of range. It is checked always where the numbers are
# at hand, and on a device only with `check=True`, because looking at them makes the host wait.
#
# A call that breaks a rule raises the class of the rule's family before anything is written (ERR-1, ERR-3), and says
# which rule, where and with which value (ERR-2). Unchecked values on a device are never unsafe: a row whose slot or
# offset is out of range is treated as padding, and of two rows that write one slot that slot alone is undefined.
#
# Each class is a ValueError; those on the right are kinds of other built-in errors as well, because code written for
# Megatron-Core expects these.

# %% tags=["remove-input"]
def error_row(error):
    also = ", ".join(base.__name__ for base in error.__bases__ if base.__module__ == "builtins")
    return f"| {error.__name__} | {error.__doc__} | {also} |"


Markdown("\n".join(["| class | raised for | also a |", "|---|---|---|", *map(error_row, ERRORS)]))

# %% [markdown]
# Offsets `[0, 3, 2]`, for instance, are refused like this:

# %%
refusal(causal_conv1d, tokens(1, 2, 3), taps(10, 1), cu_seqlens=index(0, 3, 2))

# %% [markdown]
# ## Rounding
#
# 1. Everything is computed in float32 or wider (NUM-1).
# 2. State and window are not rounded inside a call; they are rounded once, when they are stored, to the pool's type.
# 3. Outputs are rounded once, to the type of `x` or `v`. Every rounding is to nearest, ties to even (NUM-2).
# 4. Between convolution, gates, norm and scan an implementation may round or not; both are right.
# 5. The same tokens cut into other calls give the same bits on exact inputs, and results within the stated error on
#    others where pools are float32; a 16-bit pool is compared with a run of the same cuts.
#
# Once is not twice. 1 + 2^-8 + 2^-30 lies just above the middle between 1 and 1 + 2^-7, its neighbours in bfloat16, and
# rounds up to `1.0078125`. By way of float32 it first becomes the middle itself, and then `1`.

# %%
number = 1 + 2.0**-8 + 2.0**-30
assert float(round_to(number, "bf16")) == 1.0078125
assert float(round_to(float(round_to(number, "f32")), "bf16")) == 1

# %% [markdown]
# ## Operations
#
# Generated from the table that signatures, vectors and adapters are made from. `?` marks what may be left out, `!` what
# is changed in place. Settings are given by keyword; every operation also takes `check=None`.

# %% tags=["remove-input"]
def shown(item):
    shapes = " or ".join(f"[{', '.join(shape)}]" for shape in item.alternatives if shape)
    marks = "!" * getattr(item, "inout", False) + "?" * getattr(item, "optional", False)
    return f"`{item.name}{marks}{' ' * bool(shapes)}{shapes}`"


def setting(item, operation):
    required = operation.family in ("packed", "host") or item.kind == "pools"
    return shown(item) if required else f"`{item.name}={item.default!r}`"


def operation_row(operation):
    takes = [shown(argument) for argument in operation.tensors]
    takes += [setting(argument, operation) for argument in operation.settings]
    gives = ", ".join(shown(result) for result in operation.results)
    said = [operation.doc, f"Takes {', '.join(takes)}." * bool(takes), f"Returns {gives}." * bool(gives)]
    return f"| `{operation.name}` | {' '.join(said)} |"


Markdown("\n".join(["| operation | |", "|---|---|", *map(operation_row, OPERATIONS.values())]))
