"""The bookkeeping of a serving engine: slots, the arrays of a step, what a stack shares."""

from __future__ import annotations

import doctest
import itertools
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from statescan.reference.host import drafts, metadata, shards, slots, stack, tables
from statescan.reference.host.drafts import accept_drafts
from statescan.reference.host.metadata import PREFILL_NAMES, decode_metadata, prefill_metadata
from statescan.reference.host.slots import SlotPool
from statescan.reference.host.stack import layer_map, ssm_chunking
from statescan.reference.host.tables import edit_tables
from statescan.reference.second import host as second
from statescan.spec.contract import (
    OPERATIONS,
    CapacityError,
    ContractError,
    HeterogeneousStackError,
    PackingError,
    ShapeError,
    SlotError,
    SSMChunking,
    UnsupportedError,
)


@pytest.mark.parametrize("module", [drafts, metadata, shards, slots, stack, tables], ids=lambda module: module.__name__)
def test_docstrings_show_what_happens(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


# ---------------------------------------------------------------------------------------------------------------------
# Slots
# ---------------------------------------------------------------------------------------------------------------------


def test_slots_come_in_the_order_upstream_gives_them() -> None:
    pool = SlotPool(3)
    assert [pool.allocate(), pool.allocate()] == [2, 1]
    pool.reset()
    pool.allocate()
    assert pool.allocate_many(2) == [0, 1]


def test_an_exhausted_pool_fails_without_effect() -> None:
    pool = SlotPool(2)
    pool.allocate()
    before = pool.free
    with pytest.raises(CapacityError, match=r"LIFE-1"):
        pool.allocate_many(2)
    assert pool.free == before
    assert isinstance(CapacityError("x"), RuntimeError)


def test_a_slot_is_freed_once() -> None:
    pool = SlotPool(2)
    slot = pool.allocate()
    pool.release(slot)
    before = pool.free
    with pytest.raises(SlotError, match=rf"slot={slot} is free already.*LIFE-6"):
        pool.release(slot)
    for outside in (-1, 2):
        with pytest.raises(SlotError, match="SLOT-5"):
            pool.release(outside)
    assert pool.free == before


def test_a_slot_that_is_taken_cannot_be_taken_by_name() -> None:
    pool = SlotPool(3)
    assert pool.take(1) == 1
    with pytest.raises(CapacityError, match="LIFE-1"):
        pool.take(1)
    assert (pool.allocate(), pool.allocate()) == (2, 0)


@pytest.mark.parametrize("size", [-1, 2.0, True, None])
def test_a_pool_has_a_whole_number_of_slots(size: object) -> None:
    with pytest.raises(SlotError):
        SlotPool(size)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Arrays of a step
# ---------------------------------------------------------------------------------------------------------------------


def named(*given: object, **more: object) -> dict[str, list[int]]:
    """The arrays of the prefill partition by name, as lists."""
    arrays = prefill_metadata(*given, **more)  # type: ignore[arg-type]
    return {name: array.tolist() for name, array in zip(PREFILL_NAMES, arrays, strict=True)}


def test_worked_example_a_of_upstream() -> None:
    found = named([5, 0, 9], [0, 1, 2], None, None, 5, 20, 4)
    assert found["cu_seqlens"] == [0, 5, 5, 14, 14, 14]
    assert found["cu_chunk_seqlens"] == [0, 4, 5, 5, 9, 13, 14, 14, 14, 14, 14]
    assert found["last_chunk_indices"] == [1, 2, 5, 6, 7]
    assert found["seq_idx_for_varlen"] == [0, 0, 1, 2, 2, 2, 3, 4, 0, 0]
    assert found["seq_idx"] == [[0] * 5 + [2] * 9 + [-1] * 6]


def test_worked_example_b_of_upstream() -> None:
    found = named([300, 128, 5], [2, 0, 5], [0, 0], [128, 256], 4, 448, 128, 1, 6)
    assert decode_metadata([7], 2).tolist() == [7, -1]
    assert found["batch_indices_prefill"] == [2, 0, 5, -1]
    assert found["cu_seqlens"] == [0, 300, 428, 433, 433]
    assert found["cu_chunk_seqlens"] == [0, 128, 256, 300, 428, 433, 433, 433]
    assert found["last_chunk_indices"] == [2, 3, 4, 5]
    assert found["seq_idx_for_varlen"] == [0, 0, 0, 1, 2, 3, 0]
    assert found["device_decode_prefill"] == [1, 433]
    assert found["intermediate_chunk_indices"] == [0, 1, 0, 0, 0, 0]
    assert found["intermediate_abs_positions"] == [128, 256, 4, 4, 4, 4]
    assert found["intermediate_real_count"] == [2]


def test_worked_example_c_of_upstream() -> None:
    found = named([260, 512], [0, 1], [0, 1, 1, 1], [256, 128, 256, 384], 2, 1024, 128)
    assert found["cu_chunk_seqlens"][:8] == [0, 128, 256, 260, 388, 516, 644, 772]
    assert set(found["cu_chunk_seqlens"][7:]) == {772}
    assert found["last_chunk_indices"] == [2, 6]
    assert found["intermediate_chunk_indices"] == [1, 3, 4, 5]
    assert found["intermediate_abs_positions"] == [256, 388, 516, 644]


def test_worked_examples_d_to_f_of_upstream() -> None:
    none = named([3], [0], None, None, 1, 4, 2, None, 2)
    assert (none["intermediate_chunk_indices"], none["intermediate_abs_positions"]) == ([0, 0], [4, 4])
    assert none["intermediate_real_count"] == [0]
    padding = named([], [], None, None, 2, 4, 2, 3)
    assert (padding["cu_seqlens"], padding["device_decode_prefill"]) == ([0, 0, 0], [3, 0])
    assert padding["cu_chunk_seqlens"] == [0, 0, 0, 0, 0]
    assert decode_metadata([0, 1], 4).tolist() == [0, 1, -1, -1]
    assert named([10, 20], [0, 1], None, None, 4, 64, 64)["cu_seqlens"] == [0, 10, 30, 30, 30]
    assert named([50, 10], [0, 1], None, None, 2, 64, 64, 1)["device_decode_prefill"] == [1, 60]


def test_delta_tables_give_an_empty_row_one_empty_chunk() -> None:
    found = named([70, 0, 33, 0], [0, 1, 2, 3], None, None, 4, 128, 64, num_householder=2)
    assert found["chunk_offsets"] == [0, 2, 3, 4, 5]
    assert found["chunk_indices"] == [[0, 0], [0, 1], [1, 0], [2, 0], [3, 0], [-1, 0]]
    assert found["chunk_indices_dp"] == [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [2, 1], [3, 0], [-1, 0]]


def test_types_are_those_of_the_table() -> None:
    arrays = prefill_metadata([3], [2], None, None, 2, 4, 2)
    types = [str(array.dtype).replace("int", "i") for array in arrays]
    assert types == [result.like for result in OPERATIONS["prefill_metadata"].results]
    assert [result.name for result in OPERATIONS["prefill_metadata"].results] == list(PREFILL_NAMES)
    assert decode_metadata([1], 1).dtype == np.int64


def test_both_definitions_agree_on_random_steps() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        n = int(rng.integers(0, 4))
        sizes, chunk = rng.integers(0, 7, n), int(rng.integers(1, 5))
        snaps = sorted({(int(r), int(rng.integers(1, sizes[r] + 1))) for r in rng.integers(0, max(n, 1), 3)
                        if n and sizes[r]})  # fmt: skip
        rows, offsets = [s[0] for s in snaps], [s[1] for s in snaps]
        given = (sizes, rng.permutation(6)[:n], rows, offsets, n + int(rng.integers(0, 3)),
                 int(sizes.sum() + rng.integers(0, 4)), chunk, int(rng.integers(0, 3)),
                 len(snaps) + int(rng.integers(0, 2)), 3, int(rng.integers(1, 4)))  # fmt: skip
        for name, one, two in zip(PREFILL_NAMES, prefill_metadata(*given), second.prefill_metadata(*given),
                                  strict=True):  # fmt: skip
            assert one.dtype == two.dtype, name
            assert one.tolist() == two.tolist(), name


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (([3], [0, 1], None, None, 2, 4, 2), ShapeError, "META-2"),
        (([3, -1], [0, 1], None, None, 2, 4, 2), PackingError, r"lengths\[1\]=-1.*META-1"),
        (([3, 1], [0, 0], None, None, 2, 4, 2), SlotError, r"slots\[1\]=0.*SLOT-4"),
        (([3], [-1], None, None, 2, 4, 2), SlotError, r"slots\[0\]=-1.*META-2"),
        (([3, 1], [0, 1], None, None, 1, 4, 2), CapacityError, r"padded_requests=1.*PAD-3"),
        (([3, 2], [0, 1], None, None, 2, 4, 2), CapacityError, r"padded_tokens=4.*PAD-3"),
        (([3], [0], [0, 0], [1, 2], 1, 4, 2, 0, 1), CapacityError, r"snapshot_capacity=1"),
        (([3], [0], [0], [4], 1, 4, 2), PackingError, r"snapshot_offsets\[0\]=4.*META-9"),
        (([3], [0], [1], [1], 1, 4, 2), ShapeError, r"snapshot_rows\[0\]=1.*META-9"),
        (([3], [0], [0, 0], [2, 1], 1, 4, 2), PackingError, "META-9"),
        (([3], [0], [0], [], 1, 4, 2), ShapeError, "META-9"),
        (([3], [0], None, None, 1, 4, 0), ShapeError, "chunk_size=0"),
        (([1.5], [0], None, None, 1, 4, 2), ShapeError, "lengths"),
    ],
)  # fmt: skip
def test_a_step_that_does_not_fit_is_refused(given: tuple, error: type[ContractError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        prefill_metadata(*given)
    assert type(caught.value) is error


def test_decode_has_rules_of_its_own() -> None:
    for slots_, room, error in (([1, 1], 2, SlotError), ([-1], 2, SlotError), ([0, 1, 2], 2, CapacityError)):
        with pytest.raises(error):
            decode_metadata(slots_, room)


# ---------------------------------------------------------------------------------------------------------------------
# Stacks
# ---------------------------------------------------------------------------------------------------------------------


def thing(**more: object) -> SimpleNamespace:
    return SimpleNamespace(**more)


def mamba(chunk: int = 128, **more: object) -> SimpleNamespace:
    return thing(mixer=thing(chunk_size=chunk, **more))


def test_upstreams_cases_of_a_stack() -> None:
    gdp = mamba(128, ssm_inference_chunk_size=64, num_householder=3)
    assert ssm_chunking(["M", "M", "M"], [mamba()] * 3) == (128, 128, 0)
    assert ssm_chunking(["M", "*"], [gdp, thing()]) == SSMChunking(128, 64, 3)
    assert ssm_chunking(["G"], [thing(self_attention=thing(chunk_size=64))]) == (64, 64, 0)
    assert ssm_chunking(["*", "-"], [thing(), thing()]) is None
    assert ssm_chunking(["M", "M"], [thing(mixer=None), thing()]) is None
    with pytest.raises(HeterogeneousStackError, match=r"layer 0 has .* but layer 2 has"):
        ssm_chunking(["M", "M", "M"], [mamba(), mamba(), gdp])
    for other in (mamba(64), gdp):
        for layers in ([mamba(), other], [other, mamba()]):
            with pytest.raises(HeterogeneousStackError):
                ssm_chunking(["M", "M"], layers)


def test_equal_chunks_of_two_kinds_are_a_mixed_stack() -> None:
    with pytest.raises(AssertionError, match=r"layer 0 has M .* layer 1 has G .*STACK-3"):
        ssm_chunking(["M", "G"], [mamba(64), thing(self_attention=thing(chunk_size=64))])


def test_unequal_lists_and_silent_mixers_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"2 symbols and layers 1.*STACK-4"):
        ssm_chunking(["M", "M"], [mamba()])
    with pytest.raises(UnsupportedError, match=r"layers\[0\].*STACK-5"):
        ssm_chunking(["M"], [thing(mixer=thing(ssm_inference_chunk_size=64))])


def test_slabs_are_counted_over_recurrent_layers_alone() -> None:
    assert layer_map(["*", "M", "-", "M", "E", "M"]) == [None, 0, None, 1, None, 2]
    assert layer_map([]) == []


# ---------------------------------------------------------------------------------------------------------------------
# Between steps
# ---------------------------------------------------------------------------------------------------------------------


def test_drafts_stand_up_to_the_first_mismatch_in_every_small_case() -> None:
    """All rows of up to three drafts over two tokens, by two definitions; and by the word of the rule."""
    pairs = [(given, chosen) for given in itertools.product((0, 1), repeat=4)
             for chosen in itertools.product((0, 1), repeat=4)]  # fmt: skip
    tokens, model = (np.array(side) for side in zip(*pairs, strict=True))
    for count in range(5):
        counts = np.full(len(pairs), count)
        accepted, behind = accept_drafts(tokens, model, counts)
        for found, again in zip((accepted, behind), second.accept_drafts(tokens, model, counts), strict=True):
            assert found.dtype == again.dtype
            assert found.tolist() == again.tolist()
        for a, base, (given, chosen) in zip(accepted.tolist(), behind.tolist(), pairs, strict=True):
            assert count or (a, base) == (-1, -1)
            assert not count or (given[1 : a + 1] == chosen[:a] and base == chosen[a])
            assert a + 1 >= count or given[a + 1] != chosen[a]


def test_no_rows_accept_nothing() -> None:
    accepted, behind = accept_drafts(np.zeros((0, 3), np.int64), np.zeros((0, 3), np.int64))
    assert (accepted.shape, accepted.dtype, behind.shape, behind.dtype) == ((0,), np.int32, (0,), np.int64)


def test_drafts_of_other_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"tokens have shape \[1, 2\] and chosen \[1, 1\].*SPEC-8"):
        accept_drafts([[1, 2]], [[1]])
    with pytest.raises(ShapeError, match=r"num_tokens has shape \[2\]: \[1\] is needed \(SPEC-6\)"):
        accept_drafts([[1, 2]], [[1, 2]], [1, 1])
    with pytest.raises(UnsupportedError, match=r"num_tokens\[0\]=3: 0 to 2 \(SPEC-6\)"):
        accept_drafts([[1, 2]], [[1, 2]], [3])


def test_rows_of_all_tables_stay_together() -> None:
    """Whatever is edited, row n is the same request in each group; and what was given is as it was."""
    given = {"recurrent": [0, 1, 2], "attention": ["a0", "a1", "a2"]}
    edits = [("swap", 0, 1), ("swap", 1, 1), ("drop", 0), ("drop", 1), ("add", {"recurrent": 7, "attention": "a7"})]
    for events in itertools.product(edits, repeat=2):
        found = edit_tables(given, events)
        assert [f"a{slot}" for slot in found["recurrent"]] == found["attention"]
        assert given == {"recurrent": [0, 1, 2], "attention": ["a0", "a1", "a2"]}
    assert edit_tables(given, [("drop", 2)])["recurrent"] == [0, 1]
    with pytest.raises(ShapeError, match=r"row 3 of 3 is not there \(LAYER-3\)"):
        edit_tables(given, [("swap", 0, 3)])
