"""Generated kernels as files: C++ to read, and Triton that runs on its own and compares itself with eager PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from qcompile.runtime.launch import Kernel

# Runs without qcompile. The interpreter, for machines without a GPU, has no libdevice: NumPy is put in its place.
BEFORE = '''\
"""{title}

`python {file}` runs this kernel and the graph that it was generated from, in eager PyTorch, on the same state and random
gradients, and prints how far apart what they write is. Without a GPU it runs in Triton's interpreter (TRITON_INTERPRET=1).
"""

import os
import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

'''
AFTER = """

# The graph that the kernel was generated from: dequantize, update, quantize, copy into the inputs.

from torch import device, inf, nan


def multiply_add(a, b, c):
    return (a.double() * b + c).to(a.dtype)


{reference}

COLUMNS = {columns}  # which of the inputs each column of the table is
XBLOCK, WARPS = {unit}, {warps}


class NumpyLibdevice:
    def __getattr__(self, name):
        import numpy as np
        from triton.runtime.interpreter import TensorHandle

        known = {{"nearbyint": np.rint, "rsqrt": lambda x: 1 / np.sqrt(x), "pow": np.power}}
        function = known.get(name) or getattr(np, name)

        def call(*args):
            handle = args[0].handle
            data = np.asarray(function(*(a.handle.data for a in args))).astype(handle.data.dtype)
            return tl.core.tensor(TensorHandle(data, handle.dtype), args[0].type)

        return call


def copy_of(tensors):
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in tensors]


def new_gradients(tensors):
    for i, tensor in enumerate(tensors):
        per_element = tensor.dim() == 1 or tensor.dim() == 2 and tensor.size(1) > 1  # else a scale
        if i not in WRITTEN and per_element and tensor.is_floating_point():
            tensor.normal_()


def run_kernel(tensors, rows):
    programs = (rows + XBLOCK - 1) // XBLOCK
    row = [tensors[i].data_ptr() for i in COLUMNS] + [rows, programs]
    table = torch.tensor([row], dtype=torch.int64, device=DEVICE)
    kernel[(programs,)](table, torch.zeros(programs, dtype=torch.int32, device=DEVICE), ALIGN=16, XBLOCK=XBLOCK, num_warps=WARPS)


def main(rows=4096 if DEVICE == "cuda" else 6, steps=4):
    if DEVICE == "cpu" and "libdevice" in globals():
        globals()["libdevice"] = NumpyLibdevice()
    torch.manual_seed(0)
    eager = make_inputs(rows, DEVICE)
    for tensor in eager:  # no state yet; 0-d inputs are what the update computes once for a parameter
        tensor.fill_(0 if tensor.dim() or not tensor.is_floating_point() else 0.5)
    for _ in range(steps - 1):
        new_gradients(eager)
        reference(*eager)
    new_gradients(eager)
    ours = copy_of(eager)
    reference(*eager)
    run_kernel(ours, rows)
    good = True
    for i in WRITTEN:
        a, b = ours[i].double(), eager[i].double()
        apart = (a != b).double().mean().item()
        # codes may differ where a value lies on the border of two: an fma rounds once where eager PyTorch rounds twice
        codes = eager[i].dtype in CODES
        fine = apart <= 1e-3 if codes else torch.allclose(a, b, rtol=1e-3 if eager[i].itemsize < 4 else 1e-5, atol=1e-6)
        good &= bool(fine)
        kind = "codes" if codes else "values"
        print(f"input {{i}}, {{kind}} ({{eager[i].dtype}}): {{apart:.2%}} differ, by {{(a - b).abs().max().item():.3g}} at most{{'' if fine else '  <- too much'}}")
    return 0 if good else 1


CODES = (torch.uint8, torch.int8, torch.int16, torch.int32)

if __name__ == "__main__":
    sys.exit(main())
"""


def save_kernels(kernels: Iterable[Kernel], folder: Path) -> list[Path]:
    """Write one file per kernel, with a number in front of its name, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, kernel in enumerate(kernels):
        name = re.sub(r"\W+", "_", kernel.name)
        path = folder / f"{i}_{name}{'.cpp' if kernel.language == 'C++' else '.py'}"
        path.write_text(
            _runnable(kernel, path.name) if kernel.call_table and kernel.language == "Triton" else kernel.source
        )
        paths.append(path)
    return paths


def _runnable(kernel: Kernel, file: str) -> str:
    """The kernel between what has to come before it is imported and what runs it."""
    title = f"{kernel.name}: the update of a class, {kernel.block_size} elements of a parameter per row."
    after = AFTER.format(reference=kernel.reference, columns=kernel.columns, unit=kernel.unit, warps=kernel.warps)
    return BEFORE.format(title=title, file=file) + kernel.source + after
