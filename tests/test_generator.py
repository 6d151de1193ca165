"""The generator gives the words and values that the rules print, and nothing depends on order."""

import numpy as np
import pytest

from statescan.goldens import generator as g

VALUES = [
    ({"kind": "int", "lo": -4, "hi": 4}, [-1, 4, -4, 2, -3, 2, 1, -2]),
    ({"kind": "flat", "bits": 8}, [-67, 227, -233, 143, -143, 141, 65, -129]),
    ({"kind": "bell", "bits": 7}, [-94, 82, 122, -130, -20, -15, -107, -39]),
    ({"kind": "neg", "bits": 6}, [-24, -61, -3, -50, -15, -50, -41, -16]),
    ({"kind": "pick", "of": [0, 1, 2, 3, 4]}, [1, 4, 0, 3, 1, 3, 3, 1]),
    ({"kind": "perm", "size": 8}, [2, 5, 0, 3, 7, 6, 4, 1]),
    ({"kind": "const", "value": 5}, [5] * 8),
]


def test_words():
    assert [hex(int(w)) for w in g.word(1, 0, np.arange(4))] == [
        "0x5e41ab087439611e", "0xf18d6ce93d6cf1ee", "0xb95f66d327e8d78", "0xc7061b1b93322ba9",
    ]  # fmt: skip
    assert hex(int(g.word(9007199254740991, 7, 123456789))) == "0xac697fa547bb0785"
    assert hex(int(g.mix(np.array([g.GAMMA], np.uint64))[0])) == "0xe220a8397b1dcdaf"


@pytest.mark.parametrize(("gen", "wanted"), VALUES)
def test_kinds(gen, wanted):
    assert g.integers(gen, (8,), 1).tolist() == wanted


def test_onehot_rows_have_one_one():
    table = g.integers({"kind": "onehot", "size": 5, "stream": 3}, (4, 6, 5), 9)
    assert (table.sum(-1) == 1).all()
    assert set(table.ravel().tolist()) == {0, 1}


def test_an_element_does_not_depend_on_the_shape():
    long = g.integers({"kind": "bell", "bits": 7}, (50,), 3)
    assert g.integers({"kind": "bell", "bits": 7}, (5, 10), 3).ravel().tolist() == long.tolist()


def test_shift_along_an_axis_is_exact():
    values = g.values({"kind": "const", "value": 3, "shift": [0, 1, 4], "axis": 1}, (2, 3), 0)
    assert values.tolist() == [[3, 1.5, 0.1875]] * 2


@pytest.mark.parametrize("gen", [
    {"kind": "uniform"}, {"kind": "int", "lo": 0}, {"kind": "flat", "bits": 25}, {"kind": "const", "value": 1, "x": 2},
])  # fmt: skip
def test_a_wrong_gen_is_refused(gen):
    with pytest.raises(ValueError, match="gen"):
        g.check_gen(gen)
