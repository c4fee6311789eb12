"""`quantize_update`, `verify` and `lower`: the shape of kernel graphs and of generated code, in both languages."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx

from qcompile import _compat_inductor
from qcompile._compat_inductor import lower_with_inductor
from qcompile.exc import GraphSpecError
from qcompile.passes.functionalize import Operand, UpdateProgram
from qcompile.passes.infer_preconditioner import infer_preconditioner
from qcompile.passes.lower import lower
from qcompile.passes.quantize_update import QuantizedUpdate, Storage, quantize_update
from qcompile.passes.verify import verify
from qcompile.recipes import RECIPES, Recipe
from qcompile.runtime.codecs import encode_blocks
from qcompile.runtime.launch import Kernel, Layout, Region, UpdateClass
from qcompile.runtime.state import QuantizedState

aten = torch.ops.aten
CPU = torch.device("cpu")


def adam_program() -> UpdateProgram:
    """p -= rate * m / (sqrt(v) / root + 1e-8), with two 0-d inputs."""
    g = fx.Graph()
    p, grad, m, v, rate, correction = (g.placeholder(n) for n in ("p", "grad", "m", "v", "rate", "correction"))
    for node in (p, grad, m, v):
        node.meta["val"] = torch.empty(4)

    def call(target, *args) -> fx.Node:
        node = g.call_function(target, args)
        node.meta["val"] = torch.empty(4)
        return node

    m2 = call(aten.lerp.Scalar, m, grad, 0.1)
    v2 = call(aten.lerp.Scalar, v, call(aten.mul.Tensor, grad, grad), 0.05)
    denominator = call(aten.add.Tensor, call(aten.div.Tensor, call(aten.sqrt.default, v2), correction), 1e-8)
    change = call(aten.mul.Tensor, call(aten.div.Tensor, m2, denominator), rate)
    g.output([call(aten.sub.Tensor, p, change), m2, v2])
    roles = (("param", True), ("input", False), ("state", True), ("state", True))
    operands = tuple(Operand(i, role, torch.float32, written) for i, (role, written) in enumerate(roles))
    numbers = (torch.float32, torch.float32)
    return UpdateProgram(operands, fx.GraphModule({}, g), (), fx.GraphModule({}, fx.Graph()), (), numbers)


PROGRAM = adam_program()
PRECONDITIONERS = infer_preconditioner(PROGRAM, (False, False, False, True))
RATE, CORRECTION = torch.tensor(0.01), torch.tensor(0.7)


def storage_of(recipe: Recipe, block_size: int | None = None) -> Storage:
    formats = [replace(f, block_size=block_size or f.block_size) for f in (recipe.first, recipe.second)]
    return (None, None, *formats)


def built(storage: Storage, in_place: bool = False) -> QuantizedUpdate:
    return quantize_update(PROGRAM, storage, CPU, in_place, PRECONDITIONERS)


def dense_values(rows: int, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parameter, gradient and moments; one row of exact zeros, one of tiny values."""
    generator = torch.Generator().manual_seed(1)
    p, g, m, v = (torch.randn(rows, block_size, generator=generator) for _ in range(4))
    m, v = m * 0.1, v * v
    for x in (g, m, v):
        x[0] = 0
    if rows > 1:
        g[1], m[1], v[1] = g[1] * 1e-9, m[1] * 1e-9, v[1] * 1e-18
    return p, g, m, v


QUANTIZED = [recipe for recipe in RECIPES.values() if recipe.quantized]
# One recipe per way to store in the default run; `pytest -m slow` runs the others.
QUICK = {"8bit", "4bit", "zip-sr", "dettmers-8bit"}
SOME_SLOW = [pytest.param(r, id=r.name, marks=[] if r.name in QUICK else pytest.mark.slow) for r in QUANTIZED]
EIGHT_BIT = storage_of(RECIPES["8bit"])


class Twin:
    """The same update in eager torch, on `QuantizedState` and without any kernel."""

    def __init__(self, storage: Storage, rows: int, block_size: int) -> None:
        first, second = storage[2], storage[3]
        p, self.g, m, v = dense_values(rows, block_size)
        self.p = p.clone()
        self.v = QuantizedState.quantize(v, second, key=7)
        self.m = QuantizedState.quantize(m, first, key=8, partner=self.v if first.partner else None)

    def step(self) -> None:
        m = self.m.dequantize().lerp(self.g, 0.1)
        v = self.v.dequantize().lerp(self.g * self.g, 0.05)
        self.p -= m / (v.sqrt() / CORRECTION + 1e-8) * RATE
        store(self.v, v)
        store(self.m, m)


def store(state: QuantizedState, values: Tensor) -> None:
    """Encode with the preconditioner of the program; a state alone knows no bias correction."""
    rows, fmt = slice(0, len(state.codes)), state.format
    context = state._context(rows, last=0)
    if fmt.rounding == "preconditioner":
        context = replace(context, preconditioner=lambda v: 1.0 / (v.sqrt() / CORRECTION + 1e-8))
    codes, scales = encode_blocks(values, fmt, context)
    state.codes.copy_(codes)
    state.scale.copy_(torch.cat(scales, dim=1))
    if state.counter is not None:
        state.counter[1] += 1


def run(update: QuantizedUpdate, storage: Storage, rows: int, block_size: int, kernel: Kernel | None = None) -> Twin:
    """One step of the compiled update, on the state that `Twin` starts from."""
    kernel = kernel or lower(update, CPU, {})
    start = Twin(storage, rows, block_size)
    layout = Layout(storage, (True, False, True, True), lambda: (RATE, CORRECTION), 2, ())
    region = Region((start.p, start.g, start.m, start.v), (), start.p)
    with torch.no_grad():
        UpdateClass(layout, [region], kernel, None, CPU).run([])
    return start


def agree(found: Twin, expected: Twin, ties: int = 0) -> None:
    """Codes equal; everything else to 1e-6, the rounding of other instructions, which can also decide a tie."""
    torch.testing.assert_close(found.p, expected.p, rtol=1e-6, atol=1e-6)
    for a, b in ((found.v, expected.v), (found.m, expected.m)):
        differ = (a.codes.view(torch.uint8) != b.codes.view(torch.uint8)).sum().item()
        assert differ <= ties, f"{differ} of {a.codes.numel()} codes differ"
        torch.testing.assert_close(a.scale.float(), b.scale.float(), rtol=2e-6, atol=0)
        assert a.counter is None or torch.equal(a.counter, b.counter)


@pytest.mark.parametrize("recipe", SOME_SLOW)
def test_spec_holds_in_both_shapes(recipe: Recipe) -> None:
    for in_place in (False, True):
        verify(built(storage_of(recipe), in_place), PROGRAM, storage_of(recipe))


def test_spec_holds_of_dense_state() -> None:
    dense = (None, None, None, None)
    verify(built(dense), PROGRAM, dense)


def test_verify_finds_a_dense_state() -> None:
    storage = storage_of(RECIPES["torchao-8bit"])
    update = built((None, None, None, storage[3]), in_place=True)
    with pytest.raises(GraphSpecError, match="arrives as"):
        verify(update, PROGRAM, storage)


def test_verify_finds_a_lost_write() -> None:
    update = built(EIGHT_BIT)
    copies = [n for n in update.graph.graph.nodes if n.target is aten.copy_.default]
    update.graph.graph.erase_node(copies[0])
    with pytest.raises(GraphSpecError, match="are written, expected"):
        verify(update, PROGRAM, EIGHT_BIT)


def test_verify_finds_another_write() -> None:
    update = built(EIGHT_BIT)
    graph = update.graph.graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
        graph.call_function(aten.mul_.Tensor, (inputs[1], 2))
    with pytest.raises(GraphSpecError, match="writes in place"):
        verify(update, PROGRAM, EIGHT_BIT)


def test_verify_finds_a_missing_scale() -> None:
    update = replace(built(EIGHT_BIT), returned_scales=())
    with pytest.raises(GraphSpecError):
        verify(update, PROGRAM, EIGHT_BIT)


@pytest.mark.parametrize("recipe", SOME_SLOW)
def test_cpp_is_one_loop_over_the_blocks_and_equals_eager(recipe: Recipe) -> None:
    storage = storage_of(recipe)
    kernel = lower(built(storage), CPU, {})
    assert kernel.call_table is not None, "Inductor's code has a form that rewrite_cpp does not know"
    assert kernel.source.count("for(int64_t x0=") == 1
    assert "tmpbuf" not in kernel.source, "a loop over the elements of a vector"
    assert "_tree_" not in kernel.source
    assert not re.search(r"in_ptr\d+\[static_cast<int64_t>\(tmp", kernel.source), "a gather"
    block_size = storage[2].block_size
    rows = 37 if block_size < 2048 else 5
    expected = Twin(storage, rows, block_size)
    expected.step()
    agree(run(built(storage), storage, rows, block_size, kernel), expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 1000, 1025])
def test_one_kernel_serves_every_number_of_rows(rows: int) -> None:
    """1,000 and more blocks are several launches: random bits go on where the last one stopped."""
    expected = Twin(EIGHT_BIT, rows, 256)
    expected.step()
    agree(run(built(EIGHT_BIT), EIGHT_BIT, rows, 256), expected, ties=rows // 500)


@pytest.mark.parametrize("language", [pytest.param("C++", marks=pytest.mark.slow), "Triton"])
def test_less_repeated_work_generates_the_same(
    language: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if language == "Triton":
        request.getfixturevalue("triton_on_cpu")
    storage = storage_of(RECIPES["dettmers-8bit"])

    def source() -> str:
        update = built(storage, in_place=True)
        with inductor_config.patch(fx_graph_cache=False):
            return lower_with_inductor(update.graph, update.inputs, update.world.fake_mode, {}, update.parts)[1]

    once = source()
    monkeypatch.setattr(_compat_inductor, "less_repeated_work", contextlib.nullcontext)
    assert once == source()
