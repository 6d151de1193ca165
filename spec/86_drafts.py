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
# # Drafts in a step
#
# A speculative engine guesses the next tokens, lets the model read the base token and all drafts in one step, and keeps
# those that the model would have chosen itself. A cache of keys and values is cut back; a state is a point value and
# cannot be cut. So every token of the step leaves its window and state in the **intermediates** of its slot, and the
# entry of the last accepted token becomes the slot's content: the **rollback**. What holds for the operations (buffers,
# entries, counts) stands with the pools, in SPEC-1, SPEC-2, SPEC-3 and SPEC-6; here is what holds for a step.

# %%
from statescan.conformance.mutants import mutant
from statescan.reference.host.drafts import accept_drafts
from statescan.spec.serving_figures import drafts_and_rollback
from statescan.spec.steps import Desk, Toy, step, toy_context

desk = Desk()
desk.edit("zero", slot=2)
desk.prefill((2, [1, 2, 3, 4, 5]))
assert desk.decode((2, [6, 7, 8]), entries=True) == [2260, 3025, 3901]
assert [desk.entry(2, j) for j in range(3)] == [2260, 3025, 3901]
desk.edit("rollback", slot=2, entry=1)
assert (desk.window(2), desk.state(2)) == ([5, 6, 7], 3025)

drafts_and_rollback(["6", "7", "8"], ["2260", "3025", "3901"], accepted=1)

# %% [markdown]
# (SPEC-4)=
# ## SPEC-4  A step without drafts leaves the entries
#
# :::{clause} SPEC-4
# :level: MUST
# :since: 0.1
# :source: ssm_inference, speculative decoding
# :applies: ssm_dynamic_inference
# :observable: value, untouched
# :::
#
# A step without drafts MUST hand no intermediates to the decode hook, so that every entry stays as it is.
#
# Example. The hook of a plain step gets 4 arguments: rows, two pools, slots.
#
# Not this. It gets the buffers all the same, 6 arguments, and writes entry 0 of each slot. Fault:
# plain-step-writes-entries.
#
# Why. An engine may roll back one step late, from the entries of the last verify step. A plain step in between must not
# have touched them.

# %%
class Counting(Toy):
    def ssm_decode(self, *given):
        self.given = len([one for one in given if one is not None])
        return super().ssm_decode(*given)


def handed(by=None):
    toy = Counting()
    step([1, 2], by=by, toy=toy, decode=[0, 1])
    return toy.given


assert handed() == 4

wrong = mutant("plain-step-writes-entries")
assert handed(wrong) == 6
assert toy_context(2, decode=[0, 1]).intermediates[0][0].shape[1] > 0  # there is an entry 0

# %% [markdown]
# (SPEC-5)=
# ## SPEC-5  A short prompt is not a verify step
#
# :::{clause} SPEC-5
# :level: MUST
# :since: 0.1
# :source: ssm_inference, speculative decoding
# :applies: ssm_dynamic_inference, ssm_prefill
# :observable: value, untouched
# :::
#
# A prompt of at most `J` tokens MUST be run by prefill and write no entry of its slot.
#
# Example. Beside a verify row of 2 tokens a prompt of 2 tokens enters slot 3: its entries stay `0, 0`.
#
# Not this. It is taken for a verify row, and entry 1 is what its slot holds: `0, 1`. Fault:
# short-prompt-writes-entries.
#
# Why. Counting tokens does not tell a prompt from drafts. Rolled back, a prompt loses tokens that nobody guessed.

# %%
def beside_a_verify_row(by=None):
    context = toy_context(4, decode=[1], lengths=[2], slots=[3], tokens=2)
    step([1, 2, 3, 4], by=by, context=context)
    return context.intermediates[0][1][3].ravel().tolist()


assert beside_a_verify_row() == [0, 0]

wrong = mutant("short-prompt-writes-entries")
assert beside_a_verify_row(wrong) == [0, 1]

# %% [markdown]
# (SPEC-7)=
# ## SPEC-7  Refused before anything is written
#
# :::{clause} SPEC-7
# :level: MUST
# :since: 0.1
# :source: ssm_inference, variants without speculative decoding
# :applies: ssm_dynamic_inference
# :observable: error, untouched
# :::
#
# A mixer without speculation MUST refuse a step with drafts before any pool is written, which is why decode runs before
# prefill.
#
# Example. Drafts and a prompt for slot 3 -> `zxBCdt has 2 tokens a request: this mixer takes 1 (SPEC-7)`, and slot 3
# holds `0`.
#
# Not this. Prefill has run by then: slot 3 holds `1`. Fault: prefill-before-the-refusal.
#
# Why. The engine catches the refusal and runs the step again without drafts. A prompt that has entered its state would
# enter it twice.

# %%
def refused(by=None):
    context = toy_context(4, decode=[1], lengths=[2], slots=[3], tokens=2)
    try:
        step([1, 2, 3, 4], by=by, toy=Toy(single=True), context=context)
    except AssertionError as error:
        return str(error), context.pools[0][1][3].item()


assert refused() == ("zxBCdt has 2 tokens a request: this mixer takes 1 (SPEC-7)", 0)

wrong = mutant("prefill-before-the-refusal")
assert refused(wrong)[1] == 1

# %% [markdown]
# (SPEC-8)=
# ## SPEC-8  Drafts stand from the first on
#
# :::{clause} SPEC-8
# :level: MUST
# :since: 0.1
# :source: ssm_inference, speculative decoding
# :applies: accept_drafts
# :observable: value, error
# :::
#
# The accepted drafts MUST be those before the first one that is not what the model chose behind the token before it,
# and the next base token what it chose behind the last accepted one.
#
# Example. Base token 4 and drafts `5, 7, 9`; the model chose `5, 8, 9, 6`: 1 draft stands, and 8 comes next.
#
# Not this. Agreements are counted: 5 and 9 agree, 2 drafts stand, and 9 comes next. Fault:
# matches-counted-behind-a-mismatch.
#
# Why. What the model chose behind a wrong draft it chose after reading it. The state of entry 2 has read 7, which the
# answer does not contain. How the model chooses, by the largest logit or by chance, is the engine's business.

# %%
given, chosen = [[4, 5, 7, 9]], [[5, 8, 9, 6]]
assert (given[0][0], given[0][1:]) == (4, [5, 7, 9])
assert [found.tolist() for found in accept_drafts(given, chosen)] == [[1], [8]]
assert accept_drafts([[4, 5, 0, 0]], chosen, [2])[0].tolist() == [1]
assert accept_drafts([[0, 0, 0, 0]], chosen, [0])[0].tolist() == [-1]  # padding

wrong = mutant("matches-counted-behind-a-mismatch")
assert [found.tolist() for found in wrong["accept_drafts"](given, chosen)] == [[2], [9]]
