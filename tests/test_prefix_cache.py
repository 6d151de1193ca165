"""Blocks, the states kept under them, and the life of requests: what upstream's worked tables give, and every refusal.

Tables: https://github.com/NVIDIA/Megatron-LM (tests/unit_tests/inference, core/inference/contexts), block size 256.
"""

from __future__ import annotations

import doctest
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

from statescan.reference.host import blocks, prefix_cache, requests
from statescan.reference.host.blocks import BlockTable, hash_blocks
from statescan.reference.host.prefix_cache import StateCache, plan_skip, plan_snapshots
from statescan.reference.host.requests import MOVES, Book, Sizes, run_program
from statescan.spec import snapshot_figures
from statescan.spec.contract import CapacityError, PackingError, ShapeError, SlotError, UnsupportedError


@pytest.mark.parametrize("module", [blocks, prefix_cache, requests, snapshot_figures], ids=lambda m: m.__name__)
def test_docstrings_show_what_happens(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


# ---------------------------------------------------------------------------------------------------------------------
# Upstream's tables
# ---------------------------------------------------------------------------------------------------------------------

RECORDED = [
    # prompt, finished, piece, skip, matched -> (offset, block) inside the piece, block at the prompt's end
    ((300, 0, 300, 0, 0), [[256, 0]], -1), ((800, 0, 800, 0, 0), [[768, 2]], -1),
    ((800, 0, 800, 256, 1), [[512, 2]], -1), ((800, 0, 800, 256, 2), [[256, 1], [512, 2]], -1),
    ((800, 0, 800, 512, 2), [[256, 2]], -1), ((1100, 0, 1100, 768, 3), [[256, 3]], -1),
    ((256, 0, 256, 0, 0), [], 0), ((512, 0, 512, 0, 0), [[256, 0]], 1), ((512, 0, 512, 256, 1), [], 1),
    ((1024, 0, 1024, 512, 4), [[256, 2]], 3), ((896, 0, 896, 512, 3), [[256, 2]], -1), ((800, 0, 256, 0, 0), [], -1),
    ((800, 512, 288, 0, 0), [[256, 2]], -1), ((800, 300, 500, 0, 0), [], -1), ((832, 512, 320, 0, 0), [[256, 2]], -1),
    ((640, 0, 640, 0, 0), [[512, 1]], -1), ((640, 0, 640, 0, 1), [[256, 0], [512, 1]], -1),
    ((257, 0, 257, 0, 0), [[256, 0]], -1), ((1024, 0, 1024, 0, 2), [[512, 1], [768, 2]], 3),
    ((1000, 0, 1000, 0, 1), [[256, 0], [768, 2]], -1), ((768, 0, 767, 0, 0), [[512, 1]], -1),
]  # fmt: skip


@pytest.mark.parametrize(("row", "snapshots", "end"), RECORDED, ids=lambda value: str(value))
def test_positions_are_upstreams(row: tuple[int, ...], snapshots: list[list[int]], end: int) -> None:
    assert plan_snapshots(*row, 256, 128) == {"snapshots": snapshots, "end": end}  # type: ignore[call-arg, arg-type]


def test_a_block_is_on_the_grid_of_its_piece_or_not() -> None:
    assert plan_snapshots(65, 0, 65, 0, 0, 64, 64)["snapshots"] == [[64, 0]]
    assert plan_snapshots(65, 0, 65, 0, 0, 64, 128)["snapshots"] == []


@pytest.mark.parametrize(
    ("given", "skip"),
    [((768, 0, 3, [1]), 256), ((768, 0, 3, [1, 2, 3]), 512), ((768, 0, 3, [1, 3]), 256), ((256, 0, 1, [1]), 0),
     ((773, 0, 3, [3]), 768), ((768, 0, 3, []), 0)],
)  # fmt: skip
def test_skips_are_upstreams(given: tuple[Any, ...], skip: int) -> None:
    assert plan_skip(*given, 256) == skip


def test_where_upstream_leaves_two_tokens_one_is_enough() -> None:
    assert plan_skip(769, 0, 3, [1, 2, 3], 256) == 768
    assert plan_skip(769, 0, 3, [1, 2, 3], 256, least_tokens=2) == 512


def test_where_upstream_skips_on_a_later_piece_nothing_is_skipped() -> None:
    assert plan_skip(1024, 512, 4, [3, 4], 256) == 0


def computed(program: Sequence[Mapping[str, Any]], prompts: Mapping[str, Sequence[int]], **sizes: Any) -> list[int]:
    """Prompt tokens that each step computes."""
    given = {"slots": 8, "block_size": 256, "blocks": 64, "places": 64, "alignment": 128, **sizes}
    log = run_program(given, prompts, program)
    return [sum(len(row["tokens"]) for row in step["prefill"]["rows"]) for step in log["steps"]]


def whole(*names: str, prompts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """A step that admits requests and computes the rest of their prompts."""
    return {"admit": list(names),
            "prefill": [{"request": name, "to": len(prompts[name]), "chosen": [0]} for name in names]}  # fmt: skip


def test_a_shared_prompt_is_computed_as_upstream_computes_it() -> None:
    """Prompts that share 1, 2, 2 and 3 blocks with those before them: 2008 tokens instead of 3800."""
    text = list(range(800))
    prompts = {"0": text[:300], "1": text, "2": [*text[:512], *[-2] * 288], "3": [*text[:512], *[-3] * 288],
               "4": [*text[:768], *[-4] * 332]}  # fmt: skip
    program = [whole(*names, prompts=prompts) for names in (["0"], ["1"], ["2", "4"], ["3"])]
    steps = computed(program, prompts, least_tokens=2)
    assert steps == [300, 544, 876, 288]
    assert (sum(map(len, prompts.values())), sum(steps)) == (3800, 2008)


def test_prompts_of_whole_blocks_back_off_by_one() -> None:
    """A and B of 256 tokens, C and D of 512: 1024 instead of 1536."""
    text = list(range(512))
    prompts = {"A": text[:256], "B": text[:256], "C": text, "D": text}
    steps = computed([whole(*names, prompts=prompts) for names in (["A"], ["B", "C"], ["D"])], prompts)
    assert steps == [256, 256 + 256, 256]
    assert (sum(map(len, prompts.values())), sum(steps)) == (1536, 1024)


def test_a_prompt_in_pieces_is_found_by_the_next_one() -> None:
    """800 tokens in pieces that end with blocks; 868 with 768 of them in common skip 768."""
    text = list(range(868))
    prompts = {"A": text[:800], "B": [*text[:768], *([-1] * 100)]}
    pieces = [{"prefill": [{"request": "A", "to": to}]} for to in (256, 512)]
    pieces[0]["admit"] = ["A"]  # type: ignore[assignment]
    last = {"prefill": [{"request": "A", "to": 800, "chosen": [0]}]}
    assert computed([*pieces, last, whole("B", prompts=prompts)], prompts) == [256, 256, 288, 100]


def test_an_evicted_block_takes_its_state_along() -> None:
    """A table of 3 blocks: another prompt takes the first one's, and the repeat computes everything again."""
    prompts = {"A": [1] * 700, "B": [2] * 700, "C": [1] * 700}
    program = [{**whole(name, prompts=prompts), "finish": [name]} for name in prompts]
    assert computed(program, prompts, blocks=3) == [700, 700, 700]
    assert computed(program, prompts, blocks=4) == [700, 700, 188]


def test_a_budget_of_tokens_is_filled_as_upstream_fills_it() -> None:
    """Prompts of 130, 160 and 24 tokens, 52 tokens a step: the piece of a request goes on while another decodes."""
    prompts = {"1": [1] * 130, "2": [2] * 160, "3": [3] * 24}
    def piece(name: str, to: int) -> dict[str, Any]:
        return {"request": name, "to": to, **({"chosen": [0]} if to == len(prompts[name]) else {})}

    def token(name: str) -> dict[str, Any]:
        return {"request": name, "drafts": [], "chosen": [0]}

    log = run_program({"slots": 3}, prompts, [
        {"admit": ["1"], "prefill": [piece("1", 52)]}, {"prefill": [piece("1", 104)]},
        {"admit": ["2"], "prefill": [piece("1", 130), piece("2", 26)]},
        {"decode": [token("1")], "prefill": [piece("2", 77)]}, {"decode": [token("1")], "prefill": [piece("2", 128)]},
        {"admit": ["3"], "prefill": [piece("2", 160), piece("3", 20)], "finish": ["1"]},
        {"prefill": [piece("3", 24)], "finish": ["2", "3"]},
    ])  # fmt: skip
    rows = [[(row["request"], row["slot"], len(row["tokens"])) for part in ("decode", "prefill")
             for row in step[part]["rows"]] for step in log["steps"]]  # fmt: skip
    assert [sum(count for _, _, count in step) for step in rows] == [52, 52, 52, 52, 52, 52, 4]
    assert {slot for step in rows for name, slot, _ in step if name == "2"} == {1}


# ---------------------------------------------------------------------------------------------------------------------
# Names, blocks, states
# ---------------------------------------------------------------------------------------------------------------------


def test_equal_names_mean_equal_beginnings() -> None:
    names = hash_blocks(list(range(64)), 4)
    assert len(set(names)) == 16
    assert hash_blocks([*range(8), 99], 4) == names[:2]
    assert hash_blocks([-1, *range(1, 8)], 4)[1] != names[1]
    assert all(0 < name < 2**63 for name in names)


def test_a_block_that_nobody_holds_is_found_until_its_room_is_needed() -> None:
    table = BlockTable(2)
    held = table.acquire([1, 2])
    table.fill(held[0], 1)
    table.release(held)
    assert table.match([1, 2]) == [0]
    assert sorted(table.acquire([3, 4])) == [0, 1]
    assert table.match([1]) == []


def test_whatever_a_table_refuses_changes_nothing() -> None:
    table = BlockTable(2)
    table.acquire([1, 2])
    before = (table.free, table.held())
    for refused in (lambda: table.acquire([3]), lambda: table.forget(0), lambda: table.references(2),
                    lambda: table.release([0, 0, 5])):  # fmt: skip
        with pytest.raises((CapacityError, SlotError)):
            refused()
        assert (table.free, table.held()) == before


def test_a_real_attention_cache_needs_four_things() -> None:
    """References, names, last uses, and a call to everyone in `on_forget`: no BlockTable is needed."""

    class Attention:
        def __init__(self) -> None:
            self.on_forget: list[Any] = []
            self.held = {7: 1, 9: 0}

        def references(self, block: int) -> int:
            return self.held[block]

        def name(self, block: int) -> int | None:
            return block

        def last_used(self, block: int) -> int:
            return block

    attention = Attention()
    cache = StateCache(1, attention)
    assert cache.commit([9]) == [0]
    assert cache.commit([7]) == [0]
    for hear in attention.on_forget:
        hear(7)
    assert cache.places == {}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: hash_blocks([1], 0), ShapeError), (lambda: plan_skip(4, 0, 1, [1], 0), ShapeError),
        (lambda: plan_skip(-1, 0, 1, [1], 2), ShapeError), (lambda: plan_snapshots(4, 0, 5, 0, 0, 2, 1), PackingError),
        (lambda: plan_snapshots(4, 0, 4, 0, 0, 2, 0), ShapeError), (lambda: BlockTable(1, "mru"), UnsupportedError),
        (lambda: run_program({"slot": 1}, {}, []), UnsupportedError),
        (lambda: run_program({"slots": 1}, {}, [{"sleep": []}]), UnsupportedError),
    ],
)  # fmt: skip
def test_refusals_have_their_class(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"\([A-Z]+-\d+\)$"):
        call()


# ---------------------------------------------------------------------------------------------------------------------
# Moves
# ---------------------------------------------------------------------------------------------------------------------


def in_state(state: str) -> Book:
    """A book with request A in a state."""
    book = Book(Sizes(slots=2))
    book.add("A", [1])
    for moves in {"waiting": (), "running": ("admit",), "paused": ("admit", "pause"), "away": ("admit", "run", "save"),
                  "finished": ("admit", "finish")}[state]:  # fmt: skip
        if moves == "run":
            book.plan(prefill={"A": 1})
            book.close({"A": [2]})
        else:
            getattr(book, moves)("A")
    return book


@pytest.mark.parametrize("state", ["waiting", "running", "paused", "away", "finished"])
@pytest.mark.parametrize("move", [move for move in MOVES if move != "run"])
def test_a_move_is_made_or_refused_by_state(state: str, move: str) -> None:
    book = in_state(state)
    if state in MOVES[move] and not (move == "save" and state in ("running", "paused")):
        getattr(book, move)("A")
        return
    before = (book.requests["A"].state, book.requests["A"].slot, book.pool.free)
    with pytest.raises(SlotError, match=r"LIFE-[27]"):
        getattr(book, move)("A")
    assert (book.requests["A"].state, book.requests["A"].slot, book.pool.free) == before


def test_a_full_pool_admits_nobody_and_takes_no_block() -> None:
    book = Book(Sizes(slots=1, block_size=1, blocks=4))
    for name in "AB":
        book.add(name, [1, 2])
    book.admit("A")
    with pytest.raises(CapacityError, match="LIFE-1"):
        book.admit("B")
    assert len(book.table.free) == 2
    assert book.requests["B"].state == "waiting"
