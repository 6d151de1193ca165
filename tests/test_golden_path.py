"""Whatever ends in goldens/ is computed with operations that give the same bits on every machine."""

import ast
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest

from statescan.reference import functions
from statescan.reference.arrays import DTYPES, round_to

ROOT = Path(__file__).parents[1]

FORBIDDEN = {
    "sum", "mean", "dot", "matmul", "einsum", "inner", "vdot", "tensordot", "prod", "linalg", "exp", "exp2", "expm1",
    "log", "log2", "log10", "log1p", "tanh", "power", "random", "cumsum", "cumprod", "convolve", "logaddexp",
}  # fmt: skip
ON_THE_PATH = [
    path for path in [*(ROOT / "reference").glob("*.py"), ROOT / "goldens/generator.py", ROOT / "goldens/gains.py"]
    if path.name not in ("inference.py", "parallel.py")  # both compute on torch tensors: no golden comes from them
]  # fmt: skip


@pytest.mark.parametrize("path", ON_THE_PATH, ids=lambda p: p.name)
def test_no_forbidden_operation(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy"):
            assert node.attr not in FORBIDDEN, f"{path.name}:{node.lineno}: np.{node.attr} is not reproducible"
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("sum", "mean", "dot", "cumsum"), f"{path.name}:{node.lineno}: .{node.attr}"
        if isinstance(node, ast.BinOp):
            assert not isinstance(node.op, ast.MatMult), f"{path.name}:{node.lineno}: @ is not reproducible"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
            assert not any(name.split(".")[0] == "torch" for name in names), path


WORKED = [
    ("exp", 1.0, "0x1.5bf0a8b145769p+1"), ("exp", -0.1, "0x1.cf46d99d52b3ap-1"), ("exp", -1024.0, "0x0.0p+0"),
    ("softplus", 0.0, "0x1.62e42fefa39efp-1"), ("softplus", -18.0, "0x1.05a628a52c72bp-26"),
    ("softplus", 1.5, "0x1.b38fd211ea842p+0"), ("softplus", 20.0, "0x1.400000008da43p+4"),
    ("sigmoid", 1.0, "0x1.764d4f5d5a2bdp-1"), ("sigmoid", -3.0, "0x1.848343c905445p-5"),
    ("silu", 1.0, "0x1.764d4f5d5a2bdp-1"), ("silu", -3.0, "-0x1.236272d6c3f34p-3"),
    ("silu", 0.5, "0x1.3eb2fd4d34391p-2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "x", "wanted"), WORKED)
def test_worked_values_of_correctly_rounded_functions(name, x, wanted):
    assert float(getattr(functions, name)(np.float64(x))).hex() == wanted


def test_functions_are_nearest_at_high_precision():
    rng = np.random.default_rng(5)
    with mpmath.workprec(400):
        for x in rng.normal(0, 8, 300).tolist():
            exact = mpmath.exp(x)
            got = float(functions.exp(np.float64(x)))
            neighbours = [math.nextafter(got, -math.inf), got, math.nextafter(got, math.inf)]
            assert min(neighbours, key=lambda v: abs(mpmath.mpf(v) - exact)) == got


def test_functions_at_the_edges():
    assert functions.softplus(np.array([np.inf, -np.inf])).tolist() == [np.inf, 0.0]
    assert functions.sigmoid(np.array([np.inf, -np.inf, -800.0])).tolist()[:2] == [1.0, 0.0]
    assert 0 < float(functions.exp(np.float64(-744.0))) < 1e-320
    assert np.isnan(functions.silu(np.float64(np.nan)))
    assert functions.softplus(np.float64(20.5)) == 20.5


@pytest.mark.parametrize("name", ["f32", "f16"])
def test_rounding_agrees_with_ieee_conversions(name):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(20000) * np.exp2(rng.integers(-30, 14, 20000))
    with np.errstate(over="ignore"):
        assert (round_to(x, name) == x.astype(DTYPES[name])).all()


def test_rounding_is_one_step():
    assert float(round_to(np.float64(1 + 2.0**-8 + 2.0**-30), "bf16")) == 1 + 2.0**-7
    assert float(round_to(np.float64(1 + 2.0**-8), "bf16")) == 1.0
    assert float(round_to(np.float64(3.3962e38), "bf16")) == np.inf
    assert float(round_to(np.float64(2.0**-133 * 1.5), "bf16")) == 2.0**-132
    assert math.copysign(1, float(round_to(np.float64(-0.0), "bf16"))) == -1
