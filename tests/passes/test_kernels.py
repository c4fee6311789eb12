"""`quantize_update`, `verify` and `lower`: the shape of kernel graphs and of generated code, in both languages."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import fx

from qcompile.exc import GraphSpecError
from qcompile.passes.functionalize import Operand, UpdateProgram
from qcompile.passes.lower import lower
from qcompile.passes.quantize_update import QuantizedUpdate, quantize_update
from qcompile.passes.verify import verify
from qcompile.runtime.codecs import decode_blocks, encode_blocks
from qcompile.runtime.formats import Format

aten = torch.ops.aten
CPU = torch.device("cpu")


def adam_program() -> UpdateProgram:
    """p -= rate * m / (sqrt(v) + 1e-8), with one 0-d input."""
    g = fx.Graph()
    p, grad, m, v, rate = (g.placeholder(n) for n in ("p", "grad", "m", "v", "rate"))
    m2 = g.call_function(aten.lerp.Scalar, (m, grad, 0.1))
    square = g.call_function(aten.mul.Tensor, (grad, grad))
    v2 = g.call_function(aten.lerp.Scalar, (v, square, 0.001))
    root = g.call_function(aten.sqrt.default, (v2,))
    denominator = g.call_function(aten.add.Tensor, (root, 1e-8))
    ratio = g.call_function(aten.div.Tensor, (m2, denominator))
    change = g.call_function(aten.mul.Tensor, (ratio, rate))
    g.output([g.call_function(aten.sub.Tensor, (p, change)), m2, v2])
    roles = (("param", True), ("input", False), ("state", True), ("state", True))
    operands = tuple(Operand(i, role, torch.float32, written) for i, (role, written) in enumerate(roles))
    return UpdateProgram(operands, fx.GraphModule({}, g), (), fx.GraphModule({}, fx.Graph()), (), (torch.float32,))


def storage(block_size: int = 256) -> tuple[Format | None, ...]:
    return (None, None, Format(True, block_size), Format(False, block_size))


def built(block_size: int = 256, in_place: bool = False) -> QuantizedUpdate:
    return quantize_update(adam_program(), storage(block_size), CPU, scales_in_place=in_place)


def arguments(rows: int, block_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    p, g, m, v = (torch.randn(rows, block_size, generator=generator) for _ in range(4))
    signed, unsigned = storage(block_size)[2:]
    return [p, g, *encode_blocks(m, signed), *encode_blocks(v * v, unsigned), torch.tensor(0.01)]  # type: ignore[arg-type]


def reference(args: list[torch.Tensor], block_size: int) -> list[torch.Tensor]:
    """The same update in plain eager torch: parameter, codes and scale of m, codes and scale of v."""
    p, g, m_codes, m_scale, v_codes, v_scale, rate = args
    signed, unsigned = storage(block_size)[2:]
    m = decode_blocks(m_codes, m_scale, signed).lerp(g, 0.1)  # type: ignore[arg-type]
    v = decode_blocks(v_codes, v_scale, unsigned).lerp(g * g, 0.001)  # type: ignore[arg-type]
    return [p - m / (v.sqrt() + 1e-8) * rate, *encode_blocks(m, signed), *encode_blocks(v, unsigned)]  # type: ignore[arg-type]


def run(update: QuantizedUpdate, args: list[torch.Tensor]) -> list[torch.Tensor]:
    kernel = lower(update, CPU, {})
    args = [a.clone() for a in args]
    p, _, m_codes, m_scale, v_codes, v_scale, _ = args
    returned = kernel.call(list(args))
    for i, scale in zip(kernel.returned_scales, returned, strict=True):
        (m_scale if i == 2 else v_scale).copy_(scale)
    return [p, m_codes, m_scale, v_codes, v_scale]


def test_spec_holds_in_both_shapes() -> None:
    for in_place in (False, True):
        verify(built(in_place=in_place), adam_program(), storage())
    dense = (None, None, None, None)
    verify(quantize_update(adam_program(), dense, CPU, scales_in_place=False), adam_program(), dense)


def test_verify_finds_a_dense_state() -> None:
    update = quantize_update(adam_program(), (None, None, None, storage()[3]), CPU, scales_in_place=True)
    with pytest.raises(GraphSpecError, match="arrives as"):
        verify(update, adam_program(), storage())


def test_verify_finds_a_lost_write() -> None:
    update = built()
    copies = [n for n in update.graph.graph.nodes if n.target is aten.copy_.default]
    update.graph.graph.erase_node(copies[0])
    with pytest.raises(GraphSpecError, match="are written, expected"):
        verify(update, adam_program(), storage())


def test_verify_finds_another_write() -> None:
    update = built()
    graph = update.graph.graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
        graph.call_function(aten.mul_.Tensor, (inputs[1], 2))
    with pytest.raises(GraphSpecError, match="writes in place"):
        verify(update, adam_program(), storage())


def test_verify_finds_a_missing_scale() -> None:
    update = dataclasses.replace(built(), returned_scales=())
    with pytest.raises(GraphSpecError):
        verify(update, adam_program(), storage())


def test_cpp_is_one_pass_and_equals_the_reference() -> None:
    update = built()
    source = lower(update, CPU, {}).source
    assert source.count("cpp_fused_") >= 1
    assert len(re.findall(r"#pragma omp for", source)) == 1, "one loop over the blocks"
    assert "_tree_" not in source
    args = arguments(37, 256)
    for got, expected in zip(run(update, args), reference(args, 256), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block_size", [256, 2048])
def test_triton_is_one_kernel_that_touches_everything_once(triton_on_cpu: None, block_size: int) -> None:
    update = built(block_size, in_place=True)
    source = lower(update, CPU, {}).source
    assert source.count("async_compile.triton(") == 1
    assert "persistent_reduction" in source
    assert "for r0_offset" not in source
    loads = re.findall(r"tl\.load\((\w+)", source)
    stores = re.findall(r"tl\.store\((\w+)", source)
    assert sorted(loads) == sorted(set(loads)), "each input is loaded once"
    assert len(loads) == 6, "parameter, gradient, codes and scale of two states; the number is an argument"
    assert len(stores) == len(set(stores)) == 5
    args = arguments(5, block_size)
    for got, expected in zip(run(update, args), reference(args, block_size), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_cpp_and_triton_agree(triton_on_cpu: None) -> None:
    import torch._inductor.config as inductor_config

    args = arguments(64, 256)
    triton = run(built(in_place=True), args)
    with inductor_config.patch(cpu_backend="cpp"):
        cpp = run(built(), args)
    for name, a, b in zip(("p", "m codes", "m scale", "v codes", "v scale"), triton, cpp, strict=True):
        if a.dtype in (torch.int8, torch.uint8):
            assert torch.equal(a, b), name
        else:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
def test_one_kernel_serves_every_number_of_rows(rows: int) -> None:
    args = arguments(rows, 256)
    for got, expected in zip(run(built(), args), reference(args, 256), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
