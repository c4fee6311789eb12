"""Generated optimizers, shapes, strides, dtypes, recipes and sequences of events, against the same optimizer, dense and eager.

The twin begins every step from what ours holds, decoded, and takes the step in fp32. Then the parameters must be equal up to
rounding, because an update uses exact new state, and that in fp32 for every dtype, and each block of our new state must be as
near to the twin's as its format can store it, which is what the eager codec makes of the twin's: nothing adds up, so nothing
can hide in a tolerance.

`pytest -m slow --dist=load tests/test_fuzz.py` is the long run; QCOMPILE_FUZZ_SEED gives it other sequences.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import through_a_file
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from qcompile.recipes import RECIPES
from qcompile.runtime.layout import flat, like
from qcompile.runtime.state import QuantizedState

Options = dict[str, Any]
ADAM: list[Options] = [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"eps": 1e-5}]
ALL: dict[str, list[Options]] = {
    "AdamW": [*ADAM, {"maximize": True}],
    "Adam": ADAM,
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}, {"weight_decay": 0.1}],
    "Adamax": [{}],
    "Adagrad": [{}, {"lr_decay": 0.1}],
    "Adadelta": [{}],
    "RMSprop": [{}, {"momentum": 0.9}],
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
}
FEW: dict[str, list[Options]] = {"AdamW": [{}], "SGD": [{"momentum": 0.9}]}
NUMBERS = ("step", "mu_product")
ROUNDING = torch.finfo(torch.float32).eps
EVENTS = (
    "none",
    "zero gradient",
    "tiny",
    "huge",
    "one bad element",
    "no gradient",
    "learning rate",
    "reload",
    "strided",
)


@dataclass(frozen=True)
class Case:
    """One sequence: what is trained how, and what happens before each step."""

    kind: str
    options: Options
    recipe: str
    block_size: int
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[str, ...]
    events: tuple[tuple[str, int], ...]
    start: int


def cases(classes: dict[str, list[Options]], recipes: list[str], dtypes: list[torch.dtype]) -> st.SearchStrategy[Case]:
    @st.composite
    def build(draw: st.DrawFn) -> Case:
        kind = draw(st.sampled_from(sorted(classes)))
        sizes = st.one_of(
            st.tuples(st.integers(0, 300)),
            st.tuples(st.integers(1, 24), st.sampled_from([1, 16, 31, 64, 65, 128])),
            st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
            st.just(()),
        )
        shapes = draw(st.lists(sizes, min_size=1, max_size=2 if classes is FEW else 4))
        return Case(
            kind,
            draw(st.sampled_from(classes[kind])),
            draw(st.sampled_from(recipes)),
            draw(st.sampled_from([64] if classes is FEW else [32, 64, 128])),
            draw(st.sampled_from(dtypes)),
            tuple(shapes),
            tuple(draw(st.sampled_from(["plain", "transposed", "gaps", "channels_last"])) for _ in shapes),
            tuple(
                draw(
                    st.lists(
                        st.tuples(st.sampled_from(EVENTS), st.integers(0, 2**16)),
                        min_size=2,
                        max_size=3 if classes is FEW else 5,
                    )
                )
            ),
            draw(st.integers(0, 2**16)),
        )

    return build()


def laid_out(values: Tensor, layout: str) -> Tensor:
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "gaps" and values.dim() >= 1 and values.numel():
        wide = torch.zeros(*values.shape[:-1], values.shape[-1] + 3, dtype=values.dtype)
        wide[..., : values.shape[-1]] = values
        return wide[..., : values.shape[-1]]
    if layout == "channels_last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    return values


class Fuzzed:
    """Our training, and its steps again in the twin."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.start)
        values = [torch.randn(shape, generator=generator).to(case.dtype) for shape in case.shapes]
        self.params = [nn.Parameter(laid_out(v, how)) for v, how in zip(values, case.layouts, strict=True)]
        self.settings = {"lr": 1e-2, **case.options}
        if case.kind == "Adamax" and case.dtype != torch.float32:
            self.settings["eps"] = (
                0.0  # it is added to the gradient's size in its dtype, or, fused with what follows, in fp32
            )
        self.optimizer = getattr(torch.optim, case.kind)(self.params, **self.settings)
        options = {"recipe": case.recipe, "block_size": case.block_size, "min_numel": 0}
        self.step = torch.compile(self.optimizer.step, backend="qstate", options=options)
        self.updated: set[Tensor] = set()

    def gradients(self, event: str, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for i, p in enumerate(self.params):
            g = torch.randn(p.shape, generator=generator)
            if i == number % len(self.params):
                if event == "zero gradient":
                    g = torch.zeros_like(g)
                elif event == "tiny":
                    g *= 1e-30
                elif event == "huge":
                    g *= 1e15
                elif event == "one bad element" and g.numel():
                    g.view(-1)[number % g.numel()] = (float("inf"), float("nan"))[number % 2]
                elif event == "strided":
                    g = laid_out(g, ("transposed", "gaps")[number % 2])
            p.grad = None if event == "no gradient" and i == number % len(self.params) else g.to(p.dtype)
        if event == "learning rate":
            self.optimizer.param_groups[0]["lr"] = 10 ** (-1 - number % 4)
        elif event == "reload":
            self.optimizer.load_state_dict(through_a_file(self.optimizer.state_dict()))

    def twin(self) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        """Dense and in fp32, where ours is now."""
        params = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        other = type(self.optimizer)(params, **self.settings, foreach=False)
        other.param_groups[0]["lr"] = self.optimizer.param_groups[0]["lr"]
        for mine, p in zip(self.params, params, strict=True):
            p.grad = None if mine.grad is None else mine.grad.float()
            for key, value in self.optimizer.state.get(mine, {}).items():
                # torch casts a number too (NAdam's mu_product) to the parameter's dtype when it loads a checkpoint
                is_buffer = isinstance(value, Tensor) and key not in NUMBERS
                other.state[p][key] = dense(value) if is_buffer else copy.deepcopy(value)
        return params, other

    def check_step(self, event: str, number: int) -> None:
        self.gradients(event, number)
        params, other = self.twin()
        before = [p.detach().float().clone() for p in self.params]
        states = [copy.deepcopy(other.state.get(p, {})) for p in params]
        other.step()
        self.step()
        for mine, p, old, state in zip(self.params, params, before, states, strict=True):
            terms = self._terms(p, old)
            self._check_parameter(mine, p, old, other, terms)
            if mine.grad is not None:
                self.updated.add(mine)
            # Adagrad makes its state when it is made; it is quantized by the first step that has a gradient for it.
            is_planned = mine in self.updated or self.case.kind != "Adagrad"
            self._check_state(self.optimizer.state.get(mine, {}), other.state.get(p, {}), state, is_planned, terms)
            with torch.no_grad():  # a bad element is the user's to repair
                bad = ~mine.isfinite()
                mine[bad] = old[bad].to(mine.dtype)
                for value in self.optimizer.state.get(mine, {}).values():
                    if isinstance(value, Tensor):  # what is dense keeps it, as in fp32
                        (value.tail if isinstance(value, QuantizedState) else value).nan_to_num_(0.0, 0.0, 0.0)

    def _terms(self, p: Tensor, old: Tensor) -> Tensor:
        """Of a gradient that has a decay of the parameter in it, which may cancel, how large its terms are; else 0."""
        decay = self.settings.get("weight_decay", 0.0)
        is_apart = self.case.kind == "AdamW" or self.settings.get("decoupled_weight_decay", False)
        if not decay or is_apart or p.grad is None:
            return torch.zeros_like(old)
        return torch.nan_to_num(p.grad.abs() + decay * old.abs(), 0.0, 0.0, 0.0)

    def _check_parameter(
        self, mine: Tensor, p: Tensor, old: Tensor, other: torch.optim.Optimizer, terms: Tensor
    ) -> None:
        found, expected = mine.detach().float(), p.detach()
        good = expected.isfinite()
        assert torch.equal(found.isfinite(), good)
        # fp32: a few roundings, in another order, of the parameter and of the update; then one of the parameter's own dtype.
        info = torch.finfo(mine.dtype)
        unit = 0 if mine.dtype == torch.float32 else info.eps  # of 16 bits, also below its normal numbers
        least = unit * info.smallest_normal + 1e-30
        allowed = (2e-6 + unit) * expected.abs() + 2e-5 * (expected - old).abs() + least
        if terms.any():  # what is lost where they cancel, through Adam's and RAdam's update
            state, rate = other.state[p], other.param_groups[0]["lr"]
            root = (state["exp_avg_sq"] / (1 - 0.999 ** state["step"].item())).sqrt()
            allowed += 4 * ROUNDING * rate * (terms / (root + 1e-8) + terms)
        assert ((found - expected).abs() <= allowed)[good].all()

    def _check_state(
        self, ours: dict[str, Any], theirs: dict[str, Any], old: dict[str, Any], is_planned: bool, terms: Tensor
    ) -> None:
        assert ours.keys() == theirs.keys()
        quantized = {k: v for k, v in ours.items() if isinstance(v, QuantizedState)}
        assert not is_planned or not [
            k for k, v in ours.items() if isinstance(v, Tensor) and v.dim() and k not in quantized and v.numel() >= 128
        ]
        again = copy.deepcopy(quantized)  # what the eager codec makes of the twin's state, with the same random bits
        for state in again.values():
            if state.counter is not None:
                state.counter[1] -= 1
        for key in sorted(again, key=lambda k: again[k].partner is not None):  # after what they are relative to
            again[key].store_(torch.nan_to_num(theirs[key], 0.0, 0.0, 0.0))
        for key, state in quantized.items():
            size, model = state.format.block_size, state.float()
            values = (dense(state), dense(again[key]), theirs[key], old.get(key, torch.zeros_like(theirs[key])))
            lost = ROUNDING * (terms if state.format.signed else terms.square())
            found, best, wanted, before, lost = (
                flat(like(torch.nan_to_num(x, 0.0, 0.0, 0.0), model)) for x in (*values, lost)
            )
            blocked = found.numel() - found.numel() % size
            for part in (slice(0, blocked), slice(blocked, None)):
                shape = (-1, size) if part.stop is not None else (-1, 1)
                error, least = ((x[part] - wanted[part]).abs().view(shape).amax(1) for x in (found, best))
                largest = torch.maximum(*(x[part].abs().view(shape).amax(1) for x in (wanted, before)))
                cancelled = lost[part].view(shape).amax(1)
                # An element on the border of two codes may fall to either side, and one of v moves what is relative to it.
                assert (error <= 2 * least + 1e-5 * largest + cancelled + 1e-37).all(), (key, state.format)


def dense(value: Tensor) -> Tensor:
    """A state in fp32: what a kernel decodes, before it is rounded to the dtype that the state shows."""
    return value.float().dequantize() if isinstance(value, QuantizedState) else value.detach().float().clone()


def run(case: Case) -> None:
    torch._dynamo.reset()
    fuzzed = Fuzzed(case)
    for event, number in case.events:
        fuzzed.check_step(event, number)


PARTS = 16
COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
QUANTIZED = [recipe.name for recipe in RECIPES.values() if recipe.quantized]


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Each compilation collects garbage; what was there before the first is none."""
    gc.freeze()
    yield
    gc.unfreeze()


FOUND = (  # what a long run has found, and was mended
    Case("Adamax", {}, "torchao-4bit", 64, torch.bfloat16, ((3, 64),), ("plain",), (("zero gradient", 0),) * 2, 262),
    Case(
        "Adagrad",
        {},
        "8bit",
        32,
        torch.float32,
        ((32,),),
        ("plain",),
        (("none", 0), ("no gradient", 0), ("none", 0)),
        0,
    ),
    Case("Adam", {}, "8bit", 32, torch.bfloat16, ((0,), (193,)), ("plain",) * 2, (("none", 0),) * 2, 0),
    Case("Adagrad", {}, "8bit", 32, torch.float32, ((300,),), ("plain",), (("no gradient", 0), ("none", 0)), 0),
    Case("Adamax", {}, "8bit", 32, torch.bfloat16, ((2, 4, 3, 4),), ("plain",), (("strided", 0), ("none", 0)), 0),
    Case("Adamax", {}, "8bit", 32, torch.float16, ((61,),), ("plain",), (("huge", 0), ("none", 0)), 0),
    Case(
        "NAdam",
        {},
        "8bit",
        32,
        torch.bfloat16,
        ((216,),),
        ("plain",),
        (("none", 136), ("tiny", 41), ("reload", 2197)),
        41,
    ),
    Case("Adamax", {}, "5bit", 32, torch.float32, ((2, 31),), ("transposed",), (("none", 1), ("none", 0)), 0),
    Case(
        "Adam",
        {"amsgrad": True},
        "unbiased-8bit",
        128,
        torch.float16,
        ((5, 3, 3, 4),),
        ("channels_last",),
        (("reload", 133), ("zero gradient", 64354), ("none", 1024)),
        376,
    ),
    Case(
        "Adam",
        {"amsgrad": True},
        "dettmers-8bit",
        128,
        torch.bfloat16,
        ((4, 64),),
        ("plain",),
        (("none", 2947), ("none", 1)),
        1,
    ),
    Case("Adam", {"weight_decay": 0.1}, "8bit", 128, torch.float32, ((167,),), ("plain",), (("none", 167),), 9995),
)


@pytest.mark.parametrize(
    "case", FOUND, ids=lambda case: f"{case.kind}, {case.recipe}, {case.layouts[0]}, {case.events[0][0]}"
)
def test_found(case: Case) -> None:
    run(case)


def test_gradients_with_other_strides() -> None:
    """Dynamo compiles again, and AOTAutograd reads the strides; what it has cached hides how it comes to its guards."""
    events = (("strided", 65535), ("strided", 761))
    layouts = ("transposed", "transposed", "channels_last")
    shapes = ((21, 65), (18, 16), (2, 3, 1, 2))
    case = Case("Adamax", {}, "8bit", 64, torch.float32, shapes, layouts, events, 3)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        run(case)


@settings(max_examples=100, derandomize=True, **COMMON)
@given(cases(FEW, ["8bit", "4bit"], [torch.float32]))
def test_sequences(case: Case) -> None:
    run(case)


def check_part(part: int) -> None:
    @seed(PARTS * int(os.environ.get("QCOMPILE_FUZZ_SEED", "0")) + part)
    @settings(max_examples=int(os.environ.get("QCOMPILE_FUZZ_EXAMPLES", "2000")) // PARTS, **COMMON)
    @given(cases(ALL, QUANTIZED, [torch.float32, torch.bfloat16, torch.float16]))
    def check(case: Case) -> None:
        run(case)
        gc.collect()

    gc.freeze()
    check()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_sequences(part: int) -> None:
    """Parts, so that what one finds does not end the others, each in its own process: Dynamo and Inductor keep something
    of every graph, and after some hundreds of them a sequence takes twice as long."""
    found = subprocess.run([sys.executable, __file__, str(part)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


if __name__ == "__main__":
    check_part(int(sys.argv[1]))
