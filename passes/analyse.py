"""All that is proved about one region, in the order in which the analyses need each other.

Before: a region. After: an `Analysed` record: its program, and per operand a proof of its sign and bounds, what it
remembers, how it enters the update, and which relations to others it has to keep.

Proofs start from state that is zero, as optimizers make it, and are kept for the life of the process. Where a state is
elsewhere now (a checkpoint, a step size that begins at lr), they are made again from the values that all states have.
Where they would hold if a Python float kept its sign (a decay that is computed in each step), that is made a guard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from qcompile._compat import example_of
from qcompile.passes.find_constraints import Constraint, find_constraints
from qcompile.passes.find_state import Inputs
from qcompile.passes.functionalize import NotElementwise, UpdateProgram, functionalize
from qcompile.passes.infer_memory import Memory, infer_memory
from qcompile.passes.infer_preconditioner import Preconditioner, infer_preconditioner
from qcompile.passes.infer_sign import COUNTED, Proof, infer_sign
from qcompile.passes.intervals import ANY, INF, NON_NEGATIVE, NON_POSITIVE, UNIT, Interval
from qcompile.passes.outline_updates import Region
from qcompile.passes.thread_writes import written_by


@dataclass(frozen=True, slots=True)
class Facts:
    """What is proved of a program, from some values of its state."""

    program: UpdateProgram
    proofs: tuple[Proof, ...]
    preconditioners: tuple[Preconditioner, ...]
    memories: tuple[Memory | None, ...]
    constraints: tuple[Constraint, ...]


@dataclass(frozen=True, slots=True)
class Analysed:
    """A region and what is known of it."""

    region: Region
    known: Facts

    @property
    def program(self) -> UpdateProgram:
        return self.known.program

    @property
    def proofs(self) -> tuple[Proof, ...]:
        return self.known.proofs

    @property
    def preconditioners(self) -> tuple[Preconditioner, ...]:
        return self.known.preconditioners

    @property
    def memories(self) -> tuple[Memory | None, ...]:
        return self.known.memories

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return self.known.constraints

    def state(self) -> Iterator[tuple[int, fx.Node]]:
        """Operands of the program that are state, and the inputs of the region that they are."""
        for i, operand in enumerate(self.program.operands):
            if operand.role == "state":
                yield i, self.region.inputs[operand.index]

    def names(self, inputs: Inputs) -> list[str]:
        """What people call the operands: the keys of state, `param`, and what the region reads."""
        return operand_names(self.program, self.region, inputs)

    def facts(self, i: int, inputs: Inputs) -> list[str]:
        """What was found out about operand `i`, for people to read."""
        node = self.region.inputs[self.program.operands[i].index]
        numbers = hyperparameters(inputs, node)
        lines = [self.proofs[i].show(self.names(inputs))]
        if (memory := self.memories[i]) is not None:
            lines.append(memory.text(numbers))
        seen = dict.fromkeys(f"h(v) = {p.text(numbers)}" for p in self.preconditioners if p.second == i)
        return [*lines, *seen]


def operand_names(program: UpdateProgram, region: Region, inputs: Inputs) -> list[str]:
    """The keys of state, and the roles of other operands."""
    names = []
    for operand in program.operands:
        node = region.inputs[operand.index] if operand.index < len(region.inputs) else None
        slot = inputs.state.get(node) if node is not None else None
        names.append(operand.role if slot is None else slot.key)
    return names


def hyperparameters(inputs: Inputs, node: fx.Node) -> dict[str, float]:
    """The numbers in the group of a state's parameter, by name; those of a tuple are numbered: beta1, beta2."""
    slot = inputs.state[node]
    optimizer, param = slot.optimizer(), slot.param
    groups = [] if optimizer is None else optimizer.param_groups
    group = next((g for g in groups if param is None or any(param is p for p in g["params"])), {})
    found: dict[str, float] = {}
    for name, value in group.items():
        if isinstance(value, float):
            found[name] = value
        elif isinstance(value, tuple) and all(isinstance(v, float) for v in value):
            found.update({f"{name.removesuffix('s')}{i}": v for i, v in enumerate(value, start=1)})
    return found


_KNOWN: dict[str, Facts | NotElementwise] = {}


def analyse(region: Region, inputs: Inputs) -> Analysed:
    """Raises `NotElementwise`."""
    if region.key not in _KNOWN:
        try:
            _KNOWN[region.key] = _facts(functionalize(region, inputs))
        except NotElementwise as reason:
            _KNOWN[region.key] = reason
    known = _KNOWN[region.key]
    if isinstance(known, NotElementwise):
        raise known
    now = [_start(region, operand.index, inputs) for operand in known.program.operands]
    written = {known.program.numbers[i] for i in known.program.written_numbers}
    numbers = [
        _start(region, i, inputs) if i in written else _counted(region, i, inputs) for i in known.program.numbers
    ]
    holds = all(now[p.operand] in p.interval for p in known.proofs if p.steps)
    starts = [None] * len(now) if holds else [i if i != ANY else None for i in now]
    if all(number is None or (number != COUNTED and number.low >= 0) for number in numbers):
        numbers = [None] * len(numbers)
    known = _facts_from(region.key, known.program, tuple(starts), tuple(numbers))
    return Analysed(region, _with_guards(region, known, starts, numbers))


def _counted(region: Region, index: int, inputs: Inputs) -> Interval | None:
    """What a number is that the graph counts up before the update: a step counter of a whole group."""
    node = region.inputs[index]
    if not written_by(node) or written_by(node)[0] not in inputs.numbers or node.args[1:] != (1,) or node.kwargs:
        return None
    name = str(getattr(node.target, "__name__", node.target))
    before = range_now(inputs.tensors[written_by(node)[0]])
    return COUNTED if name in ("add_", "iadd") and before.low >= 0 else None


def _with_guards(
    region: Region, known: Facts, now: Sequence[Interval | None], numbers: Sequence[Interval | None]
) -> Facts:
    """What is known if Python numbers that are inputs keep the sign they have, and floats stay at most 1 if they are.

    Where that proves more of a state, Dynamo is asked to compile again for numbers for which it does not hold.
    """
    program = known.program
    floats = {
        k: found
        for k, (i, start) in enumerate(zip(program.numbers, numbers, strict=True))
        if start is None and (found := _number_of(region.inputs[i])) is not None
    }
    if not floats or not (_open(known) or known.constraints):
        return known
    assumed = [_sign_of(floats[k].node.hint) if k in floats else start for k, start in enumerate(numbers)]
    better = _facts_from(region.key, program, tuple(now), tuple(assumed))
    if (_open(better), len(better.constraints)) == (_open(known), len(known.constraints)):
        return known
    for k, value in floats.items():
        interval = assumed[k]
        assert interval is not None
        assert bool(value >= interval.low)  # each comparison is a guard
        assert interval.high == INF or bool(value <= interval.high)
    return better


def _open(known: Facts) -> int:
    """Of how many states no sign was proved."""
    return sum(bool(p.steps) and not p.non_negative and not p.non_positive for p in known.proofs)


def _number_of(node: fx.Node) -> torch.SymFloat | torch.SymInt | None:
    """The Python number that an input is, or that the 0-d tensor stands for in which Dynamo hands it over."""
    if node.target is torch.mul and isinstance(made_of := node.args[1], fx.Node):  # by `split_updates.as_tensor`
        node = made_of
    values = [example_of(n) for n in (node, *node.users) if n is node or n.target == "item"]
    found = next((v for v in values if isinstance(v, torch.SymFloat | torch.SymInt)), None)
    # Dynamo cannot guard on every expression, but on what is itself an input.
    return found if found is not None and found.node.has_hint() and found.node.expr.is_Symbol else None


def _sign_of(value: float) -> Interval:
    if isinstance(value, float) and 0 <= value <= 1:
        return UNIT
    return NON_NEGATIVE if value >= 0 else NON_POSITIVE


_FROM: dict[tuple[object, ...], Facts] = {}


def _facts_from(
    key: str, program: UpdateProgram, starts: tuple[Interval | None, ...], numbers: tuple[Interval | None, ...]
) -> Facts:
    """`_facts`, once for each program and values to start from."""
    at = (key, starts, numbers)
    if at not in _FROM:
        _FROM[at] = _facts(program, starts, numbers)
    return _FROM[at]


def _facts(
    program: UpdateProgram,
    starts: Sequence[Interval | None] | None = None,
    numbers: Sequence[Interval | None] | None = None,
) -> Facts:
    proofs = infer_sign(program, starts, numbers)
    signs = tuple(proof.non_negative for proof in proofs)
    constraints = find_constraints(program, proofs, numbers)
    return Facts(program, proofs, infer_preconditioner(program, signs), infer_memory(program, signs), constraints)


def _start(region: Region, index: int, inputs: Inputs) -> Interval:
    tensor = inputs.tensors.get(region.inputs[index]) if index < len(region.inputs) else None
    return ANY if tensor is None else range_now(tensor)


def range_now(tensor: Tensor) -> Interval:
    """Between which values the finite elements of a tensor lie, and zero."""
    values = tensor.detach()
    if values.is_complex():
        return ANY
    if not values.numel():
        return Interval(0.0, 0.0)
    low, high = torch.aminmax(torch.nan_to_num(values.float(), nan=0.0, posinf=0.0, neginf=0.0))
    return Interval(min(0.0, low.item()), max(0.0, high.item()))
