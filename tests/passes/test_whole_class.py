"""A class is one launch: the same bits as a launch per region, in both languages; and what the source rewriters refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kernels import CPU, PRECONDITIONERS, PROGRAM, storage_of
from torch import Tensor

from qcompile.passes.lower import lower
from qcompile.passes.quantize_update import quantize_update
from qcompile.passes.rewrite_cpp import rewrite_cpp
from qcompile.passes.rewrite_triton import rewrite_triton
from qcompile.recipes import RECIPES
from qcompile.runtime.launch import Kernel, Layout, Region, UpdateClass, launches
from qcompile.runtime.state import QuantizedState

STORAGE = storage_of(RECIPES["8bit"], 64)
# Blocks alone, blocks and a tail, a tail alone, nothing at all, many blocks.
SIZES = (64 * 3, 64 * 5 + 17, 40, 0, 64 * 50)
FEW = (*SIZES[:-1], 64 * 9)  # for Triton's interpreter


def kernels(in_place: bool) -> tuple[Kernel, Kernel]:
    """For blocks and for tails."""
    dense = (None, None, torch.float32, torch.float32)
    return tuple(  # type: ignore[return-value]
        lower(quantize_update(PROGRAM, storage, CPU, in_place, PRECONDITIONERS), CPU, {})
        for storage in (STORAGE, dense)
    )


def updated(
    quantized: Kernel, dense: Kernel, transposed: bool = False, sizes: tuple[int, ...] = SIZES
) -> tuple[list[Tensor], int]:
    """Everything that two steps leave of parameters and state of all sizes, and how many launches a step took."""
    generator = torch.Generator().manual_seed(0)
    regions, gradients, made = [], [], []
    for i, size in enumerate(sizes):
        p, m, v = (torch.randn(size, generator=generator) for _ in range(3))
        if transposed and size == SIZES[-1]:
            p, m, v = (x.view(50, 64) for x in (p, m, v))
        second = QuantizedState.quantize(v * v, STORAGE[3], key=7 + i)
        first = QuantizedState.quantize(m * 0.1, STORAGE[2], key=8 + i, partner=second)
        rate = torch.tensor(0.01 * (i + 1))
        regions.append(Region((p, i, first, second), (rate,), p))
        made += [p, *first.stored, *second.stored]
    layout = Layout(STORAGE, (True, False, True, True), lambda rate: (rate, torch.tensor(0.7)), 2, ())
    update = UpdateClass(layout, regions, quantized, dense, CPU)
    before = launches.count
    for _ in range(2):
        gradients = [torch.randn(size, generator=generator) for size in sizes]
        if transposed:
            gradients[-1] = gradients[-1].view(50, 64).t().contiguous().t()
        with torch.no_grad():
            update.run(gradients)
    return made, (launches.count - before) // 2


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_cpp() -> None:
    quantized, dense = kernels(in_place=False)
    found, count = updated(quantized, dense)
    alone = [replace(kernel, call_table=None) for kernel in (quantized, dense)]
    expected, each = updated(*alone)
    assert (count, each) == (2, 5), "blocks and tails, once each; against three and two of them"
    for a, b in zip(found, expected, strict=True):  # other instructions: a product and a sum are one or two
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-6, atol=1e-7)
    again, _ = updated(quantized, dense, transposed=True)
    once_more, _ = updated(quantized, dense, transposed=True)
    same(again, once_more)
    torch.testing.assert_close(again[0], found[0])


def test_threads_change_no_bit() -> None:
    quantized, dense = kernels(in_place=False)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(updated(quantized, dense)[0])
    finally:
        torch.set_num_threads(threads)
    same(results[0], results[1])
    same(results[0], results[2])


def test_triton(triton_on_cpu: None) -> None:
    quantized, dense = kernels(in_place=True)
    found, count = updated(quantized, dense, sizes=FEW)
    expected, each = updated(*[replace(kernel, call_table=None) for kernel in (quantized, dense)], sizes=FEW)
    assert (count, each) == (2, 5)
    same(found, expected)


@pytest.mark.parametrize("change", [("empty_strided_cpu", "empty_elsewhere"), ("#pragma omp for", "another_loop();")])
def test_cpp_of_another_form_runs_as_it_is(change: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("qcompile.passes.lower.rewrite_cpp", lambda source, scales: seen.append(source))
    kernel, _ = kernels(in_place=False)
    assert kernel.call_table is None
    update = quantize_update(PROGRAM, STORAGE, CPU, False, PRECONDITIONERS)
    assert rewrite_cpp(seen[0], update.scales) is not None
    assert rewrite_cpp(seen[0].replace(*change), update.scales) is None


def test_triton_of_another_form_runs_as_it_is(triton_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("qcompile.passes.lower.rewrite_triton", lambda source, *args: seen.append(source))
    kernels(in_place=True)
    assert rewrite_triton(seen[0], 64, 1) is not None
    assert rewrite_triton(seen[0].replace("tl.program_id(0)", "tl.program_id(1)"), 64, 1) is None
    assert rewrite_triton(seen[0].replace("'*u8'", "'*u4'"), 64, 1) is None
