"""Saved and loaded state: bit for bit in every form, converted to another recipe, and refused where it cannot be read."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_params, set_grads, through_a_file
from torch import Tensor, nn

import qcompile
from qcompile.recipes import RECIPES
from qcompile.runtime.checkpoint import STRUCTURE
from qcompile.runtime.state import LAYOUT, QuantizedState, rebuild

SHAPES = ((40, 103),)  # blocks and a tail
QUANTIZED = [recipe.name for recipe in RECIPES.values() if recipe.quantized]
# One recipe per way to store, and classes with state of different kinds; the others are for `pytest -m slow`.
QUICK = {"8bit", "unbiased-8bit", "zip-sr", "AdamW", "SGD", "Muon", "8bit to 4bit"}
# Every class of torch.optim with state of a parameter's size that is quantized by default.
CLASSES: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "Adamax": {},
    "AdamW": {},
    "ASGD": {},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def some_slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


class Run:
    """Training that can be cut in two."""

    def __init__(self, make: Make = adamw, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.params = make_params(*SHAPES, dtype=dtype)
        self.optimizer = make(self.params)
        self.step = torch.compile(self.optimizer.step, backend="qstate", options=options or None)
        self.done = 0

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            set_grads(self.params, self.done)
            self.step()
            self.done += 1
        return self

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.params]

    def everything(self) -> list[Tensor]:
        """Parameters and whatever is stored of the state."""
        values = [v for s in self.optimizer.state.values() for v in s.values()]
        parts = [t for v in values for t in (v.stored if isinstance(v, QuantizedState) else (v,))]
        return self.values() + [t for t in parts if isinstance(t, Tensor)]

    def goes_on_from(self, other: Run, state: Any, load: Callable[[torch.optim.Optimizer, Any], None]) -> Run:
        with torch.no_grad():
            for mine, value in zip(self.params, other.values(), strict=True):
                mine.copy_(value)
        load(self.optimizer, state)
        self.done = other.done
        return self


def load_whole(optimizer: torch.optim.Optimizer, state: Any) -> None:
    optimizer.load_state_dict(state)


def same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


@pytest.mark.parametrize("recipe", some_slow(QUANTIZED))
def test_every_recipe_resumes_bit_for_bit(recipe: str) -> None:
    first = Run(recipe=recipe).train(2)
    second = Run(recipe=recipe).goes_on_from(first, through_a_file(first.optimizer.state_dict()), load_whole)
    same_bits(second.everything(), first.everything())
    same_bits(second.train(2).everything(), first.train(2).everything())


@pytest.mark.parametrize("name", some_slow(CLASSES))
def test_every_class_resumes_bit_for_bit(name: str) -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(params, lr=1e-2, **CLASSES[name])  # type: ignore[no-any-return]

    first = Run(make).train(2)
    flat = qcompile.flat_state_dict(first.optimizer)
    second = Run(make).goes_on_from(first, flat, qcompile.load_flat_state_dict)
    same_bits(second.train(2).everything(), first.train(2).everything())


class Unproved(torch.optim.Optimizer):
    """Its second moment cannot be proved to be non-negative: it decays by a tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    def _init_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in group["params"]:
            if p.grad is not None:
                params.append(p)
                if not self.state[p]:
                    self.state[p] = {"decay": torch.tensor(0.9), "v": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params: list[Tensor] = []
            self._init_group(group, params)
            for p in params:
                v = self.state[p]["v"]
                v.mul_(self.state[p]["decay"]).addcmul_(p.grad, p.grad, value=0.1)
                p.addcdiv_(p.grad, v.clamp_min(1e-12).sqrt(), value=-group["lr"])


def test_what_first_values_decide_is_not_decided_again() -> None:
    """A state of unknown sign is stored by what the first step leaves: also by a run that goes on from a file, and later."""
    first, formats = Run(Unproved), []
    for _ in range(3):
        first.train(1)
        formats.append(first.optimizer.state[first.params[0]]["v"].format)
    assert formats[0].coordinate == "pseudo-log"
    assert formats[0].signed
    second = Run(Unproved).goes_on_from(first, through_a_file(first.optimizer.state_dict()), load_whole)
    same_bits(second.train(2).everything(), first.train(2).everything())
    for run in (first, second):
        run.optimizer.param_groups[0]["lr"] = 1e-3
    second.optimizer.state[second.params[0]]["v"].store_(-torch.ones(SHAPES[0]))  # and now it could be told otherwise
    second.train(1)
    first.train(1)
    formats += [run.optimizer.state[run.params[0]]["v"].format for run in (first, second)]
    assert len(set(formats)) == 1


@pytest.fixture(scope="module")
def trained() -> Run:
    return Run(dtype=torch.bfloat16).train(2)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "weights_only", "flat", "safetensors", "distributed"])
def test_every_form_is_bit_for_bit_and_keeps_scales_from_the_cast(how: str, trained: Run, tmp_path: Path) -> None:
    """Parameters are bf16, and `load_state_dict` casts floating-point state to their dtype."""
    state, optimizer = trained.optimizer.state_dict(), trained.optimizer
    again = Run(dtype=torch.bfloat16)
    load = load_whole
    if how in ("flat", "safetensors", "distributed"):
        state, load = qcompile.flat_state_dict(optimizer), qcompile.load_flat_state_dict
        for value in state.values():
            assert type(value) is Tensor
            assert value.is_contiguous()
        pointers = [v.data_ptr() for v in state.values() if v.numel()]
        assert len(pointers) == len(set(pointers)), "shared memory, which safetensors refuses"
    if how == "safetensors":
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(state, tmp_path / "state.safetensors")
        state = safetensors.load_file(tmp_path / "state.safetensors")
    if how == "distributed":
        checkpoint = pytest.importorskip("torch.distributed.checkpoint")
        checkpoint.save(state, checkpoint_id=tmp_path)
        state = qcompile.flat_state_dict(again.train(1).optimizer)
        checkpoint.load(state, checkpoint_id=tmp_path)
    changes = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda s: pickle.loads(pickle.dumps(s)),
        "save": lambda s: through_a_file(s, weights_only=False),
        "weights_only": through_a_file,
    }
    again.goes_on_from(trained, changes.get(how, lambda s: s)(state), load)
    same_bits(again.everything(), trained.everything())
    assert again.optimizer.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    first, second = (again.optimizer.state[again.params[0]][k] for k in ("exp_avg", "exp_avg_sq"))
    assert first.partner is second
    assert (first.scale.dtype, second.scale.dtype) == (torch.float16, torch.float32)


def test_a_file_is_as_small_as_the_state(trained: Run) -> None:
    file = io.BytesIO()
    torch.save(trained.optimizer.state_dict(), file)
    report = qcompile.explain(trained.optimizer)
    assert file.tell() < report.state_bytes + 12_000, "names and records, which do not grow with the state"
    flat = qcompile.flat_state_dict(trained.optimizer)
    assert sum(v.nbytes for k, v in flat.items() if k.startswith("state.")) == report.state_bytes


@pytest.mark.parametrize("change", some_slow(["8bit to 4bit", "4bit to 8bit", "8bit to torchao-8bit", "fp8 to zip-sr"]))
def test_another_recipe_takes_the_state_over(change: str) -> None:
    """Converted on the first step, as near as the coarser of the two formats is."""
    before, _, after = change.split()
    first = Run(recipe=before).train(3)
    second = Run(recipe=after).goes_on_from(first, through_a_file(first.optimizer.state_dict()), load_whole)
    dense = Run(recipe="dense").goes_on_from(first, through_a_file(first.optimizer.state_dict()), load_whole)
    second.train(1)
    dense.train(1)
    for p in second.params:
        for key, fmt in zip(("exp_avg", "exp_avg_sq"), (RECIPES[after].first, RECIPES[after].second), strict=True):
            assert fmt is not None
            state = second.optimizer.state[p][key]
            assert (state.format.codebook, state.format.bits) == (fmt.codebook, fmt.bits)
    for found, start, expected in zip(second.values(), first.values(), dense.values(), strict=True):
        # Of an update; one converted state decides it, and rounding to 4 bits is a sixteenth of the largest of a block.
        assert (found - expected).norm() < 0.5 * (expected - start).norm()


def test_a_stock_checkpoint_is_quantized_and_given_back() -> None:
    stock = Run(recipe="dense").train(3)
    ours = Run().goes_on_from(stock, through_a_file(qcompile.dense_state_dict(stock.optimizer)), load_whole)
    ours.train(1)
    assert isinstance(ours.optimizer.state[ours.params[0]]["exp_avg"], QuantizedState)
    dense = qcompile.dense_state_dict(ours.optimizer)
    values = [v for s in dense["state"].values() for v in s.values()]
    assert all(type(v) is Tensor for v in values)
    params = make_params(*SHAPES)
    again = adamw(params)
    again.load_state_dict(through_a_file(dense))
    for mine, theirs in zip(params, ours.params, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(again.state[mine][key], ours.optimizer.state[theirs][key].dequantize())
    set_grads(params, 9)
    again.step()


def test_what_cannot_be_read_is_refused(trained: Run) -> None:
    state = trained.optimizer.state[trained.params[0]]["exp_avg_sq"]
    _, (record, *parts, partner) = state.__reduce_ex__(2)
    assert partner is None
    same_bits(list(rebuild(record, *parts).stored), list(state.stored))
    with pytest.raises(qcompile.CheckpointError, match="layout 7; this version of qcompile reads layout 1"):
        rebuild((7, *record[1:]), *parts)
    with pytest.raises(qcompile.CheckpointError, match="fields spin"):
        rebuild((*record[:4], record[4] | {"spin": 1}, record[5]), *parts)
    with pytest.raises(qcompile.CheckpointError, match=r"codes of a state of shape \(40, 103\).*is \(3, 256\)"):
        rebuild(record, parts[0][:3], *parts[1:])
    with pytest.raises(qcompile.CheckpointError, match=r"counter.* is None"):
        rebuild(record, *parts[:3], None)


def test_a_flat_form_that_is_not_whole_loads_nothing(trained: Run) -> None:
    flat = qcompile.flat_state_dict(trained.optimizer)
    other = Run(dtype=torch.bfloat16)
    for broken, message in (
        ({k: v for k, v in flat.items() if k != "state.0.exp_avg.codes"}, "'state.0.exp_avg.codes' is missing"),
        ({k: v for k, v in flat.items() if k != STRUCTURE}, "no entry 'structure'"),
        (flat | {STRUCTURE: as_bytes({"layout": LAYOUT + 1})}, "layout 2"),
    ):
        with pytest.raises(qcompile.CheckpointError, match=message):
            qcompile.load_flat_state_dict(other.optimizer, broken)
        assert not other.optimizer.state


def test_what_has_no_flat_form_is_named() -> None:
    run = Run().train(1)
    run.optimizer.state[run.params[0]]["note"] = {1, 2}
    with pytest.raises(qcompile.CheckpointError, match=r"state\.0\.note is of type set"):
        qcompile.flat_state_dict(run.optimizer)


def as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
