"""What the compiler makes of a launch, on a machine without a GPU: registers, spills, width of memory accesses.

    python -m statescan.fast.bench.generated            # a table of the decode kernels, for sm_90

A launch is recorded instead of run, with exactly the specialisation it would have; the assembler and the disassembler
are those that Triton carries. It must not be interpreted: unset TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from statescan.fast import delta, ssd
from statescan.fast.tiling import Tile

REGISTER_FILE = 65536
"""32-bit registers of a multiprocessor, handed out in eights to each thread of a warp."""


class Code(NamedTuple):
    """Of one compiled kernel: registers a thread, bytes of stack and of shared memory, static instructions by kind."""

    registers: int
    stack: int
    shared: int
    warps: int
    instructions: int
    shuffles: int
    wide_loads: int
    wide_stores: int
    lanes: str

    @property
    def resident_warps(self) -> int:
        """Warps a multiprocessor holds, registers alone considered."""
        rounded = -(-self.registers // 8) * 8
        return min(64, REGISTER_FILE // (rounded * 32)) // self.warps * self.warps


class _NoDevice:
    """Just enough of a driver for Triton to compile: a target, and handles of a device that is not there."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def recording(capability: int = 90) -> Iterator[list[Any]]:
    """Collect the kernels that launches inside the block compile; nothing runs."""
    kernels: list[Any] = []
    run: Any = JITFunction.run

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(run(self, *arguments, grid=grid, warmup=True, **options))
        return kernels[-1]

    with mock.patch.object(driver, "_active", _NoDevice(capability)), mock.patch.object(JITFunction, "run", record):
        yield kernels


def describe(kernel: Any) -> Code:
    """Read a compiled kernel's resources and machine code."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        resources, machine = (
            subprocess.run([tools, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-resource-usage", "--dump-sass")
        )
    ops = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", machine))

    def total(*prefixes: str) -> int:
        return sum(count for op, count in ops.items() if op.startswith(prefixes))

    def resource(name: str) -> int:
        found = re.search(rf"{name}:(\d+)", resources)
        return int(found.group(1)) if found else 0

    lanes = re.search(r"sizePerThread = \[\d+, \d+, \d+\], threadsPerWarp = (\[[\d, ]+\])", kernel.asm["ttgir"])
    return Code(
        resource("REG"), resource("STACK"), kernel.metadata.shared, kernel.metadata.num_warps, sum(ops.values()),
        total("SHFL"), total("LDG.E.128"), total("STG.E.128"), lanes.group(1).replace(" ", "") if lanes else "",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Launches of the decode kernels
# ---------------------------------------------------------------------------------------------------------------------


def delta_launch(
    *, rows: int = 1, steps: int = 1, copies: int = 1, heads: int = 16, value_heads: int = 32, keys: int = 128,
    values: int = 128, per_channel: bool = False, state: torch.dtype = torch.float32, layout: str = "VK",
    entries: bool = False, counts: bool = False, tile: Tile | None = None,
) -> Callable[[], None]:  # fmt: skip
    """A launch of the delta family with bf16 tokens, float32 gates and l2norm in the kernel."""
    slot = (value_heads, keys, values) if layout == "KV" else (value_heads, values, keys)
    narrow = torch.bfloat16
    inputs = (
        torch.zeros(rows, steps, heads, keys, dtype=narrow),
        torch.zeros(rows, steps * copies, heads, keys, dtype=narrow),
        torch.zeros(rows, steps * copies, value_heads, values, dtype=narrow),
        torch.zeros(rows, steps, value_heads, *([keys] if per_channel else [])),
        torch.zeros(rows, steps * copies, value_heads),
    )  # fmt: skip
    pool, kept, slots, numbers = _pools(slot, state, entries, counts, rows, steps)
    o = torch.zeros(rows, steps, value_heads, values, dtype=narrow)
    return lambda: delta.launch_update(inputs, o, pool, slots, None, kept, numbers, numbers, copies, None, True, layout,
                                       tile)  # fmt: skip


def ssd_launch(
    *, rows: int = 1, steps: int = 1, heads: int = 128, groups: int = 8, channels: int = 64, columns: int = 128,
    state: torch.dtype = torch.float32, entries: bool = False, counts: bool = False, tile: Tile | None = None,
) -> Callable[[], None]:  # fmt: skip
    """A launch of Mamba2 with bf16 tokens, z, D per head and a bias of dt."""
    narrow = torch.bfloat16
    x, z = (torch.zeros(rows, steps, heads, channels, dtype=narrow) for _ in range(2))
    B, C = (torch.zeros(rows, steps, groups, columns, dtype=narrow) for _ in range(2))
    A, D, bias = (torch.zeros(heads) for _ in range(3))
    inputs = (x, torch.zeros(rows, steps, heads, dtype=narrow), A, B, C, D, z, bias)
    pool, kept, slots, numbers = _pools((heads, channels, columns), state, entries, counts, rows, steps)
    y = torch.zeros_like(x)
    return lambda: ssd.launch_update(inputs, y, pool, slots, None, kept, numbers, numbers, tile=tile)


def _pools(
    slot: Sequence[int], state: torch.dtype, entries: bool, counts: bool, rows: int, steps: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    kept = torch.zeros(2, steps, *slot, dtype=state) if entries else None
    numbers = torch.zeros(rows, dtype=torch.int32) if counts and entries else None
    return torch.zeros(2, *slot, dtype=state), kept, torch.zeros(rows, dtype=torch.int32), numbers


def main() -> None:
    bf16 = torch.bfloat16
    cases = {
        "gdn f32 VK 1": delta_launch(),
        "gdn f32 VK 256": delta_launch(rows=256),
        "gdn bf16 VK 1": delta_launch(state=bf16),
        "gdn bf16 VK 256": delta_launch(rows=256, state=bf16),
        "gdn f32 KV": delta_launch(layout="KV"),
        "gdn bf16 KV": delta_launch(layout="KV", state=bf16),
        "kda f32 VK 1": delta_launch(heads=32, per_channel=True),
        "kda f32 VK 256": delta_launch(rows=256, heads=32, per_channel=True),
        "kda bf16 VK 256": delta_launch(rows=256, heads=32, per_channel=True, state=bf16),
        "gdp 2 f32 VK 256": delta_launch(rows=256, copies=2, heads=32),
        "gdp 3 f32 VK 256": delta_launch(rows=256, copies=3, heads=32),
        "gdn f32 VK 256 verify": delta_launch(rows=256, steps=4),
        "gdn f32 VK 256 verify entries": delta_launch(rows=256, steps=4, entries=True),
        "gdn f32 VK 256 verify resume": delta_launch(rows=256, steps=4, entries=True, counts=True),
        "gdn bf16 VK 256 verify": delta_launch(rows=256, steps=4, state=bf16),
        "ssd f32 1": ssd_launch(),
        "ssd f32 256": ssd_launch(rows=256),
        "ssd bf16 1": ssd_launch(state=bf16),
        "ssd bf16 256": ssd_launch(rows=256, state=bf16),
        "ssd f32 256 verify": ssd_launch(rows=256, steps=4),
    }
    print(f"triton {triton.__version__}")
    for name, launch in cases.items():
        with recording() as kernels:
            launch()
        code = describe(kernels[0])
        print(f"{name:32s} regs {code.registers:4d} stack {code.stack:3d} shared {code.shared:5d} warps {code.warps} "
              f"resident {code.resident_warps:3d} instr {code.instructions:5d} shfl {code.shuffles:3d} "
              f"128-bit ld/st {code.wide_loads}/{code.wide_stores} lanes {code.lanes}")  # fmt: skip


if __name__ == "__main__":
    main()
