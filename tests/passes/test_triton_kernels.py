"""Triton kernels in Triton's interpreter: one per update, every tensor loaded and stored once, and equal to eager.

Apart from the C++ ones because the files are shared out between the test workers.
"""

from __future__ import annotations

import re

import pytest
from test_kernels import CPU, PROGRAM, SOME_SLOW, Twin, agree, built, run, storage_of

from qcompile.passes.lower import lower
from qcompile.passes.verify import written_inputs
from qcompile.recipes import Recipe


@pytest.mark.parametrize("recipe", SOME_SLOW)
def test_triton_is_one_kernel_that_touches_everything_once(triton_on_cpu: None, recipe: Recipe) -> None:
    storage = storage_of(recipe)
    update = built(storage, in_place=True)
    kernel = lower(update, CPU, {})
    assert kernel.call_table is not None, "Inductor's code has a form that rewrite_triton does not know"
    assert kernel.source.count("@triton.jit") == 1
    assert f"R0_BLOCK: tl.constexpr = {storage[2].block_size // update.parts}" in kernel.source, "a block is not held"
    assert "for r0_offset" not in kernel.source
    body = kernel.source[kernel.source.index("xoffset =") :]
    loads, stores = (re.findall(rf"tl\.{name}\((?!row)(\w+)", body) for name in ("load", "store"))  # `row`: addresses
    assert sorted(loads) == sorted(set(loads)), "each input is loaded once"
    assert len(stores) == len(set(stores))
    written = len(written_inputs(PROGRAM, storage, update))
    assert len(stores) == written, "parameter, codes and scales, once each"
    block_size = storage[2].block_size
    rows = 5 if block_size < 2048 else 2  # the interpreter takes its time
    expected = Twin(storage, rows, block_size)
    expected.step()
    agree(run(update, storage, rows, block_size, kernel), expected)
