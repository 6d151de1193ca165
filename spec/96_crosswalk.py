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
# # Crosswalk
#
# What the operations here are called elsewhere, and where a convention differs. Each table below is about one subject.
# "Same" means that tensors can be handed over as they are; a name in italics is a converter, shown further down with
# the pair of numbers that it is tested with, there and back.
#
# The texts and sources named were read; those of installed packages are also run by the tests, with the converters of
# their lines and nothing else.

# %%
import numpy as np

from statescan.reference.delta import gated_delta_product, gated_delta_rule
from statescan.spec.crosswalk import CONVERTERS, LINES, SUBJECTS, product_as_rule
from statescan.spec.notation import Markdown, numbers, one_hot, tokens, vectors


# %% tags=["remove-input"]
def bridge(line):
    if isinstance(line.how, str):
        return line.how
    return "; ".join(f"*{name}*" for name in line.how)


def table(subject):
    lines = [line for line in LINES if line.subject == subject]
    rows = [f"| [{line.package}]({line.source}) | {line.there} | {bridge(line)} |" for line in lines]
    return "\n".join([f"**{subject.capitalize()}**", "", "| package | there | bridge |", "|---|---|---|", *rows])


Markdown("\n\n".join(map(table, SUBJECTS)))

# %% [markdown]
# ## Converters
#
# Each changes one convention. What does not survive the way there and back is said.

# %% tags=["remove-input"]
def shown(values):
    return ", ".join(f"{name} `{np.asarray(value).tolist()}`" for name, value in values.items())


def told(one):
    lost = f" Lost: {one.loses}." if one.loses else ""
    pair = f"Here {shown(one.example)}; there {shown(one.converted)}."
    return f"- *{one.name}*: {one.says}. {pair}{lost}"


Markdown("\n".join(map(told, CONVERTERS.values())))

# %%
for one in CONVERTERS.values():
    here = {name: np.asarray(value) for name, value in one.example.items()}
    there = one.to(here)
    assert {name: value.tolist() for name, value in there.items()} == one.converted, one.name
    assert {name: value.tolist() for name, value in one.back(there).items()} == one.example, one.name

# %% [markdown]
# ## A product where only the rule is at hand
#
# Most packages have no delta product. It is a delta rule over all copies: the decay stands at the first copy of a token
# and the query at its last. Two tokens of two copies, decay off, write 1, 2 and then 3, 4 to drawers 0, 1, 0, 1. Read
# at drawer 1, the product gives `2, 4`; the rule gives four outputs, of which the second and the fourth count.

# %%
k, v, q = one_hot(0, 1, 0, 1), vectors(1, 2, 3, 4), one_hot(1, 1)
g, beta = tokens(0, 0), tokens(1, 1, 1, 1)
o, state = gated_delta_product(q, k, v, g, beta, num_householder=2, scale=1, output_final_state=True)
assert numbers(o) == [2, 4]
wide = product_as_rule({"q": q, "k": k, "v": v, "g": g, "beta": beta}, 2)
o_wide, state_wide = gated_delta_rule(**wide, scale=1, output_final_state=True)
assert numbers(o_wide[:, 1::2]) == [2, 4]
assert numbers(state_wide) == numbers(state)
