"""The first step of an optimizer that creates its state inside `step`, one parameter at a time.

Such an optimizer has no `_init_group`, so its state cannot be made beforehand; and a whole first step would leave dense
state of every parameter. Where the compiler can prove that the update of one parameter reads nothing of another, the
first step is run eagerly for each parameter alone, and its state is quantized before the next one's exists. The smallest
parameter is left for the compiled step: torch would not look again at a function that it once saw do nothing.

The proof is about tensors, on the graph of the step. Python values of the optimizer and its groups (a step counter) are
put back after each run, so every parameter sees what it would have seen, and they change once, in the compiled step.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from qcompile._compat import copy_of
from qcompile.options import Choices, Options
from qcompile.passes.find_state import is_state_buffer, state_of
from qcompile.passes.flatten_foreach import flatten_foreach
from qcompile.passes.thread_writes import is_scalar

# Gradients taken away from parameters that have had their first step, until the step they belong to is over.
_hidden: weakref.WeakKeyDictionary[Optimizer, list[tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()


def undecorated(value: Any) -> Any:
    """A function under its decorators; anything else as it is."""
    while isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def makes_state_in_step(optimizer: Optimizer) -> bool:
    """Whether an optimizer has no state yet and no way to make it but its own step."""
    if hasattr(optimizer, "_init_group") or any(optimizer.state.values()):
        return False
    return not any(is_state_buffer(slot.get()) for slot in state_of(optimizer).values())


def run_apart(optimizer: Optimizer, options: Options, quantize: Callable[[Optimizer, Tensor, Choices], None]) -> bool:
    """Run the first step parameter by parameter, and hide the gradients from the step that follows.

    False, and nothing done, where it is not the first step or the parameters are not provably apart.
    """
    given = [(p, p.grad) for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    large = any(p.numel() >= options.min_numel for p, _ in given)
    step = undecorated(type(optimizer).step)
    if not options.quantizes or not large or not makes_state_in_step(optimizer) or not _apart(optimizer, step):
        return False
    wanted = Choices.of(options, [p for p, _ in given])
    apart = sorted(given, key=lambda pair: pair[0].numel(), reverse=True)[:-1]
    before = _python_values(optimizer)
    first = apart[0][0] if apart else given[0][0]
    backup = first.detach().clone()
    try:
        for param, _ in given:
            param.grad = None
        for param, gradient in apart:
            param.grad = gradient
            with torch.no_grad():
                step(optimizer)
            param.grad = None
            quantize(optimizer, param, wanted)
            _put_back(optimizer, before)
    except BaseException as error:
        is_first = first.grad is not None
        for param, gradient in given:
            param.grad = gradient
        _put_back(optimizer, before)
        if not is_first or not isinstance(error, Exception):
            raise  # more than the first parameter has moved, or the user stopped it
        with torch.no_grad():
            first.copy_(backup)
        optimizer.state.clear()
        return False
    for param, gradient in given:
        param.grad = gradient
    hide_gradients(optimizer, apart)
    return bool(apart)


def hide_gradients(optimizer: Optimizer, given: list[tuple[Tensor, Tensor]]) -> None:
    """Take gradients away from parameters until `give_gradients_back`."""
    _hidden[optimizer] = given  # first, so that whatever stops this loses none
    for param, _ in given:
        param.grad = None


def give_gradients_back(optimizer: Optimizer) -> bool:
    """Undo the hiding of `run_apart`; whether there was any."""
    hidden = _hidden.get(optimizer, [])
    for param, gradient in hidden:
        param.grad = gradient
    _hidden.pop(optimizer, None)
    return bool(hidden)


def _python_values(optimizer: Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return groups, {k: v for k, v in vars(optimizer).items() if _is_simple(v)}


def _is_simple(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, type(None)))


def _put_back(optimizer: Optimizer, values: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    """Restore what `_python_values` saved, and remove what was not there: `if "step" not in group: ...`."""
    groups, simple = values
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key in group.keys() - saved.keys() - {"params"}:
            del group[key]
        group.update(copy.deepcopy(saved))
    attributes = vars(optimizer)
    for name in [n for n, v in attributes.items() if n not in simple and _is_simple(v)]:
        del attributes[name]
    attributes.update(simple)


class _SeenEnough(Exception):  # noqa: N818
    """Ends a trace that was made to be looked at."""


def _apart(optimizer: Optimizer, step: Callable[[Any], Any]) -> bool:
    """Whether no parameter's update reads anything of another, by the graph of the step; nothing is run."""
    seen: list[bool] = []

    def look(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        gm = copy_of(gm)
        flatten_foreach(gm)
        params = {id(p) for g in optimizer.param_groups for p in g["params"]}
        seen.append(apart(gm, example_inputs, params))
        raise _SeenEnough

    @torch.no_grad()
    def whole() -> None:
        step(optimizer)

    try:
        torch.compile(whole, backend=look, fullgraph=True)()
    except Exception:
        return seen == [True]
    return False


def apart(gm: fx.GraphModule, example_inputs: Sequence[Any], params: set[int]) -> bool:
    """Whether each connected part of a graph touches at most one of the parameters (given by id).

    Numbers that are computed from numbers alone, such as a learning rate, connect nothing.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    tensors = dict(zip(placeholders, example_inputs, strict=True))
    tensors.update({n: getattr(gm, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr"})
    parent: dict[fx.Node, fx.Node] = {}

    def find(n: fx.Node) -> fx.Node:
        while parent.setdefault(n, n) is not n:
            n = parent[n]
        return n

    numbers: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if is_scalar(node) and all(a in numbers for a in node.all_input_nodes):
            numbers.add(node)
            continue
        for a in node.all_input_nodes:
            if a not in numbers:
                parent[find(a)] = find(node)
    owners: dict[fx.Node, set[int]] = {}
    for node, tensor in tensors.items():
        if id(tensor) in params:
            owners.setdefault(find(node), set()).add(id(tensor))
    return all(len(ids) == 1 for ids in owners.values())
