"""A failure as a script: the one call, its numbers written out, the implementation, and nothing of the suite."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from statescan.conformance.calls import Array, Call
from statescan.conformance.recorded import plain, safetensors_parts
from statescan.conformance.untrusted import printable, write_file
from statescan.spec.contract import OPERATIONS

MOST_NUMBERS = 600
"""A tensor of more numbers is stored beside the script."""
WRITABLE = ("conv", "gates", "norms", "delta", "ssd")

Part = Mapping[str, Any]


class Side(NamedTuple):
    """One call of a script, and which part of which of its tensors is looked at."""

    name: str
    call: Call
    tensor: str
    part: Part


def can_write(call: Call) -> bool:
    """Whether a call can be written down with numbers alone: no gradients, no pretended versions, no far places."""
    family = OPERATIONS[call.op].family
    return family in WRITABLE and call.grad is None and not call.installed and not call.far


def write_script(
    path: Path, impl: str, sides: Sequence[Side], said: str, index: tuple[int, ...] | None, expected: str = "", *,
    arrays: str = "numpy", device: str = "cpu",
) -> Path:  # fmt: skip
    """Store the script that makes these calls on `impl` (module:object) and prints the place `index` of each tensor.

    Of two calls the second is what the first is compared with; of one, `expected` is what it has to give. `arrays` is
    what the implementation takes, "numpy" or "torch".
    """
    writer = _Writer(path.stem, arrays, device)
    body = [line for side in sides for line in writer.call(side)] + _print_lines(sides, index, expected)
    module, _, name = impl.partition(":")
    head = [_docstring(f"{said}\n\nMade by statescan; run it where {module} can be imported."), "import sys"]
    head += ["from pathlib import Path"] if writer.stored else []
    head += ["", *(["import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16"] if writer.narrow else [])]
    head += ["import torch" if arrays == "torch" else "import numpy as np"]
    head += [f"from safetensors.{arrays} import load_file"] if writer.stored else []
    head += ["", 'sys.path.insert(0, ".")', f"from {module} import {name or 'adapter'} as implementation  # noqa: E402"]
    head += ["", 'nan, inf = float("nan"), float("inf")']
    if writer.stored:
        write_file(path.parent, f"{path.stem}.safetensors", safetensors_parts(writer.stored))
        head += [f'stored = load_file(Path(__file__).with_name("{path.stem}.safetensors"))']
    write_file(path.parent, path.name, ["\n".join([*head, *writer.helpers(), "", *body, ""]).encode("utf-8")])
    return path


def _docstring(text: str) -> str:
    safe = printable(text).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{safe}\n"""'


class _Writer:
    """Calls as text; what is too long for it is stored beside."""

    def __init__(self, stem: str, arrays: str, device: str) -> None:
        self.stem, self.arrays, self.device = stem, arrays, device
        self.stored: dict[str, Array] = {}
        self.narrow = self.gaps = False

    def helpers(self) -> list[str]:
        """Functions that the calls need."""
        if not self.gaps or self.arrays == "torch":
            return []
        return ["", "", "def with_gaps(array, strides):",
                "    base = np.full(1 + sum(s * (n - 1) for s, n in zip(strides, array.shape)), -1, array.dtype)",
                "    view = np.lib.stride_tricks.as_strided(base, array.shape, [s * base.itemsize for s in strides])",
                "    view[...] = array", "    return view", ""]  # fmt: skip

    def call(self, side: Side) -> list[str]:
        """The arguments of a call by name, and the call."""
        call = side.call
        op = OPERATIONS[call.op]
        required = [i for i, argument in enumerate(op.tensors) if not argument.optional]
        given: dict[str, str] = {}
        lists: dict[str, list[str]] = {}
        for name, array in call.tensors.items():
            text = self.tensor(f"{side.name}.{name}", array)
            if "." in name:  # a list of pools
                lists.setdefault(name.partition(".")[0], []).append(text)
            else:
                given[name] = text
        given |= {name: f"[{', '.join(texts)}]" for name, texts in lists.items()}
        for argument in op.tensors[: max(required, default=0)]:
            given.setdefault(argument.name, "None")
        given |= {name: _literal(value) for name, value in plain(call.args).items()}
        rows = [f"    {a.name}={given[a.name]}," for a in op.arguments if a.name in given]
        function = f'getattr(implementation, "operations", implementation)["{call.op}"]'
        return [f"{side.name} = dict(", *rows, ")", f"{side.name}_returned = {function}(**{side.name})"]

    def tensor(self, key: str, array: Array) -> str:
        """One tensor: its numbers, element type, shape, and strides where it is not packed."""
        shape, dtype, torch = list(array.shape), array.dtype.name, self.arrays == "torch"
        if array.size > MOST_NUMBERS:
            self.stored[key] = np.ascontiguousarray(array)
            text = f'stored["{key}"]' + (f'.to("{self.device}")' if torch and self.device != "cpu" else "")
        else:
            text = self.literal(array.ravel(), shape, dtype)
        if array.flags.c_contiguous or not array.size:
            return text
        self.gaps = True
        strides = [s // array.itemsize for s in array.strides]
        if torch:
            place = f', device="{self.device}"' if self.device != "cpu" else ""
            return f"torch.empty_strided({shape}, {strides}, dtype=torch.{dtype}{place}).copy_({text})"
        return f"with_gaps({text}, {strides})"

    def literal(self, flat: Array, shape: list[int], dtype: str) -> str:
        """The numbers of a tensor as text."""
        same = flat.size > 1 and bool((flat == flat[0]).all())
        numbers = _number(flat[0]) if same else f"[{', '.join(_number(v) for v in flat)}]"
        if self.arrays == "torch":
            place = f', device="{self.device}"' if self.device != "cpu" else ""
            if same:
                return f"torch.full({shape}, {numbers}, dtype=torch.{dtype}{place})"
            return f"torch.tensor({numbers}, dtype=torch.{dtype}{place}).reshape({shape})"
        self.narrow |= dtype == "bfloat16"
        if same:
            return f'np.full({shape}, {numbers}, "{dtype}")'
        return f'np.array({numbers}, "{dtype}").reshape({shape})'


def _number(value: Any) -> str:
    x = float(value)
    if math.isnan(x) or math.isinf(x):
        return "nan" if math.isnan(x) else "inf" if x > 0 else "-inf"
    return str(int(x)) if x.is_integer() and abs(x) < 2**53 and not (x == 0 and math.copysign(1, x) < 0) else repr(x)


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(_literal(v) for v in value)})"
    if value in ("inf", "-inf"):
        return str(value)
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _print_lines(sides: Sequence[Side], index: tuple[int, ...] | None, expected: str) -> list[str]:
    """Print the place on both sides, or beside what is expected; exit with 1 while they differ."""
    first, last = sides[0], sides[-1]
    at = "" if index is None else f"[{', '.join(map(str, index))}]"
    found = [f"{_found(side)}{_part(side.part)}{at}" for side in (first, last)]
    if index is None:
        shape = f'print("{first.tensor} has shape", list({found[0]}.shape), "and type", {found[0]}.dtype)'
        return [shape, "sys.exit(1)"]
    shown = '[repr(float(x)).removesuffix(".0") for x in (got, want)]'
    said = "{0} in {2}, {1} in {3}" if len(sides) > 1 else "got {0}, expected {1}"
    want = f"float({found[1]})" if len(sides) > 1 else expected or "nan"
    names = f', "{first.name}", "{last.name}"' if len(sides) > 1 else ""
    near = "got == want" if len(sides) > 1 else "abs(got - want) <= 1e-9 * abs(want)"
    return [f"got, want = float({found[0]}), {want}",
            f'print("{first.tensor}{at}: {said}".format(*{shown}{names}))', f"sys.exit(int(not {near}))"]  # fmt: skip


def _found(side: Side) -> str:
    results = [r.name for r in OPERATIONS[side.call.op].results]
    if side.tensor not in results:
        base, _, number = side.tensor.removeprefix("after.").partition(".")
        return f'{side.name}["{base}"]' + (f"[{number}]" if number else "")
    return f"{side.name}_returned" + (f"[{results.index(side.tensor)}]" if len(results) > 1 else "")


def _part(part: Part) -> str:
    """A part of a tensor, as relations name it: rows or picked indices of one axis."""
    before = ":, " * int(part.get("axis", 0))
    if "rows" in part:
        return f"[{before}{part['rows'][0]}:{part['rows'][1]}]"
    return f"[{before}{list(part['pick'])}]" if "pick" in part else ""


def expected_in(message: str) -> str:
    """The number that a message says was expected."""
    found = re.search(r"expected (-?[0-9.e+-]+|nan|-?inf)", message)
    return found[1].rstrip(".") if found else ""
