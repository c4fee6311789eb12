"""Less work in the loops over a block: what is kept, what must not be, and that kernels have it, whatever the threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kernels import (
    CORRECTION,
    CPU,
    PRECONDITIONERS,
    PROGRAM,
    QUANTIZED,
    RATE,
    agree,
    built,
    dense_values,
    run,
    storage_of,
)

from qcompile.passes.cpp_loops import NotKnownError, rewrite_loops
from qcompile.passes.cpp_vectors import in_single_vectors, rewrite_vectors
from qcompile.passes.lower import lower
from qcompile.passes.quantize_update import Storage, quantize_update
from qcompile.recipes import RECIPES
from qcompile.runtime.launch import Layout, Region, UpdateClass
from qcompile.runtime.state import QuantizedState

LOAD = "at::vec::Vectorized<float>::loadu({} + static_cast<int64_t>(x1 + 256L*x0), static_cast<int64_t>(8))"
COSTLY = """
auto tmp1 = tmp0.sqrt();
auto tmp2 = tmp1 + tmp0;
auto tmp3 = tmp2 / tmp1;"""


def loop(statements: str) -> str:
    return f"""{{
for(int64_t x1=static_cast<int64_t>(0L); x1<static_cast<int64_t>(256L); x1+=static_cast<int64_t>(8L))
{{
if(C10_LIKELY(x1 >= static_cast<int64_t>(0) && x1 < static_cast<int64_t>(256L)))
{{{statements}
}}
}}
}}
"""


def first(stored: str = "out_ptr0", index: str = "x1 + 256L*x0") -> str:
    load = LOAD.format("in_ptr0")
    return loop(f"\nauto tmp0 = {load};{COSTLY}\ntmp3.store({stored} + static_cast<int64_t>({index}));")


def second(load: str = LOAD.format("in_ptr0")) -> str:
    return loop(f"\nauto tmp0 = {load};{COSTLY}\ntmp3.store(out_ptr1 + static_cast<int64_t>(x1 + 256L*x0));")


ALIASES = {"in_ptr0": 0, "in_ptr1": 0, "out_ptr0": 1, "out_ptr1": 2}


def test_what_was_computed_is_kept() -> None:
    text, arrays = rewrite_loops(first() + second(), set(), ALIASES)
    assert arrays == ["alignas(64) float kept0[256];"]
    assert text.count("tmp3.store(kept0 + static_cast<int64_t>(x1));") == 1
    assert text.count("auto tmp3 = at::vec::Vectorized<float>::loadu(kept0 + static_cast<int64_t>(x1));") == 1
    assert text.index("store(kept0") < text.index("loadu(kept0")


def test_two_pointers_to_one_input_hold_the_same() -> None:
    _, arrays = rewrite_loops(first() + second(LOAD.format("in_ptr1")), set(), ALIASES)
    assert len(arrays) == 1


def test_what_was_stored_in_an_array_of_the_block_is_known() -> None:
    local = "at::vec::Vectorized<float>::loadu(mine + static_cast<int64_t>(x1), static_cast<int64_t>(8))"
    again = loop(f"\nauto tmp7 = {local};\ntmp7.store(out_ptr1 + static_cast<int64_t>(x1 + 256L*x0));")
    text, arrays = rewrite_loops(first("mine", "x1") + again, {"mine"}, ALIASES)
    assert arrays == [], "a load is as cheap as another"
    assert "loadu(mine" in text


@pytest.mark.parametrize("aliases", [ALIASES | {"out_ptr0": 0}, ALIASES | {"in_ptr1": 1}])
def test_what_was_overwritten_is_computed_again(aliases: dict[str, int]) -> None:
    """The first loop stores to the input that the second one reads."""
    name = "in_ptr0" if aliases["out_ptr0"] == 0 else "in_ptr1"
    _, arrays = rewrite_loops(first() + second(LOAD.format(name)), set(), aliases)
    assert arrays == []


def test_a_mask_that_was_overwritten_is_another() -> None:
    """The array that it is read from holds what the loop before has stored."""
    at = "flags + static_cast<int64_t>(x1), static_cast<int64_t>(8)"

    def written(limit: str) -> str:
        load = LOAD.format("in_ptr0")
        return loop(f"\nauto tmp0 = {load};\nauto tmp5 = at::vec::VecMask<float,1>(tmp0 > {limit});\ntmp5.store({at});")

    def read(stored: str) -> str:
        choice = f"\nauto tmp9 = at::vec::VecMask<float,1>::from({at});\nauto tmp0 = decltype(tmp8)::blendv(tmp8, tmp8, tmp9.template cast<float,1>());"
        return loop(
            f"\nauto tmp8 = {LOAD.format('in_ptr0')};{choice}{COSTLY}\ntmp3.store({stored} + static_cast<int64_t>(x1 + 256L*x0));"
        )

    _, arrays = rewrite_loops(written("tmp0") + read("out_ptr0") + read("out_ptr1"), {"flags"}, ALIASES)
    assert len(arrays) == 1
    _, arrays = rewrite_loops(
        written("tmp0") + read("out_ptr0") + written("tmp0 * tmp0") + read("out_ptr1"), {"flags"}, ALIASES
    )
    assert arrays == []


def test_loops_over_other_elements_share_nothing() -> None:
    shorter = second().replace("static_cast<int64_t>(256L); x1+=", "static_cast<int64_t>(128L); x1+=")
    _, arrays = rewrite_loops(first() + shorter, set(), ALIASES)
    assert arrays == []


def test_a_store_to_an_unknown_place_is_not_known() -> None:
    with pytest.raises(NotKnownError):
        rewrite_loops(first("elsewhere") + second(), set(), ALIASES)


def test_masks_and_loads() -> None:
    text = rewrite_vectors(
        """
auto tmp0 = at::vec::Vectorized<uint8_t>::loadu(in_ptr1 + static_cast<int64_t>(x1 + 256L*x0), static_cast<int64_t>(8));
auto tmp6 = at::vec::VecMask<float,1>(tmp4 >= tmp5);
auto tmp7 = decltype(tmp2)::blendv(tmp1, tmp2, tmp6.template cast<float,1>());"""
    )
    assert "auto tmp0 = few<uint8_t, 8>(in_ptr1 + static_cast<int64_t>(x1 + 256L*x0));" in text
    assert "auto tmp7 = choose<1>(tmp4, tmp5, tmp1, tmp2);" in text


def test_roots_of_8bit_are_as_few_as_its_update_needs() -> None:
    """Of the old second moment, of the new one, and of that as it is stored; before, the last one twice."""
    kernel = lower(built(storage_of(RECIPES["8bit"])), CPU, {})
    assert kernel.module.count(".sqrt()") == 4
    assert kernel.source.count(".sqrt()") == 3


def test_levels_of_a_table_are_looked_up() -> None:
    kernel = lower(built(storage_of(RECIPES["4bit"])), CPU, {})
    assert kernel.source.count(" look_up<-7, 15>(") == 2, "two elements of a byte"


def test_one_thread_has_a_class_function_too() -> None:
    """Inductor generates other code where there is one thread."""
    recipe, threads = QUANTIZED[0], torch.get_num_threads()
    storage = storage_of(recipe)
    try:
        torch.set_num_threads(1)
        kernel = lower(built(storage), CPU, {})
        assert "#pragma omp for" not in kernel.module
        assert kernel.call_table is not None
        found = run(built(storage), storage, 5, storage[2].block_size, kernel)
    finally:
        torch.set_num_threads(threads)
    agree(found, run(built(storage), storage, 5, storage[2].block_size))


def test_vectors_of_doubles_are_pairs_and_stay() -> None:
    """Beside fp64 a vector of floats and a pair of doubles have as many elements: narrowing wrote beyond the tensor."""
    double = LOAD.format("in_ptr0").replace("Vectorized<float>", "VectorizedN<double,2>")
    body = first().replace(LOAD.format("in_ptr0"), double)
    assert in_single_vectors(body) == body
    text, arrays = rewrite_loops(body + body.replace("out_ptr0", "out_ptr1"), set(), ALIASES)
    assert arrays == []
    assert "VectorizedN<double,2>" in text
    uncounted = first().replace("Vectorized<float>", "VectorizedN<float,2>").replace("(8L)", "(16L)")
    assert in_single_vectors(uncounted) == uncounted, "tmp3.store(out_ptr0 + ...) does not say how many"


@pytest.mark.parametrize("storage", [storage_of(RECIPES["8bit"]), (None,) * 4], ids=["8bit", "dense"])
def test_half_precision(storage: Storage) -> None:
    """Inductor takes vectors in pairs in some of the loops of a kernel with 16-bit inputs, and single ones in others."""
    operands = tuple(replace(o, dtype=torch.bfloat16) for o in PROGRAM.operands)
    program = replace(PROGRAM, operands=operands)
    formats = tuple(torch.bfloat16 if fmt is None else fmt for fmt in storage)
    kernel = lower(quantize_update(program, formats, CPU, False, PRECONDITIONERS), CPU, {})
    assert kernel.call_table is not None
    layout = Layout(storage, (True, False, True, True), lambda: (RATE, CORRECTION), 2, ())
    found = []
    for one in (kernel, replace(kernel, call_table=None)):
        p, g, m, v = (x.bfloat16() for x in dense_values(37, 256))
        if storage[3] is not None:
            v = QuantizedState.quantize(v, storage[3], key=7)
            m = QuantizedState.quantize(m, storage[2], key=8, partner=v)
        region = Region((p, g, m, v), (), p)
        kernels = (one, None) if storage[3] is not None else (None, one)
        with torch.no_grad():
            UpdateClass(layout, [region], *kernels, CPU).run([])
        found.append([p, *(x.dequantize() if isinstance(x, QuantizedState) else x for x in (m, v))])
    for of_class, alone in zip(*found, strict=True):  # a product and a sum, in one instruction or two, before rounding
        torch.testing.assert_close(of_class, alone, rtol=2**-7, atol=1e-6)
        assert (of_class == alone).float().mean() > 0.99
    if storage[3] is not None:
        assert "VectorizedN" in kernel.module
        assert "VectorizedN" not in kernel.source
