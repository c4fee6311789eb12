"""In which interval each state stays: its sign, and how large it can get, by induction over the steps.

Before: an `UpdateProgram`. After: a `Proof` for each operand: if all written states are in their intervals before a
step, they are after it. The induction's start, the values that states have now, is checked by whoever converts them: a
state outside of its interval takes the proofs of all others with it, and asks for new ones with that value in `starts`.

All states begin as what they are created with, zero where nothing is said. Their intervals grow by running the program on
intervals; a bound that keeps moving jumps to where its changes add up, or is given up for infinity. Once all hold
together, running the program again narrows what was given up too much (a clamp). Nothing is believed on the way: what is
returned has passed a last check of all states at once.

Numbers that the update writes (step counters, running products) are taken to be non-negative at first.

Signs and bounds hold in floating point, each operator's rounding included (see `intervals`). What a low-bit format makes
of a stored value is not part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qcompile.passes.functionalize import UpdateProgram
from qcompile.passes.interval_rules import evaluate
from qcompile.passes.intervals import ANY, COPIES, INF, NON_NEGATIVE, NON_POSITIVE, ZERO, Interval, name_of

Intervals = list[Interval]
# fp32 counts no further; steps are computed in chunks.
LAST_STEP, CHUNK = 1 << 24, 1 << 20
# What a step counter is that was counted up before the update reads it.
COUNTED = Interval(1.0, INF)
# How often changes are added up: a state that follows another one settles after it.
JUMPS = 3
NARROWINGS = 3


@dataclass(frozen=True, slots=True)
class Proof:
    """What one step keeps.

    Attributes:
        operand: which operand of the program.
        interval: what holds the operand's value after each step, if all states were in theirs before.
        steps: the operations on the way to the stored value, each with its interval; `{2}` stands for operand 2.
    """

    operand: int
    interval: Interval
    steps: tuple[str, ...] = ()

    @property
    def non_negative(self) -> bool:
        return self.interval in NON_NEGATIVE

    @property
    def non_positive(self) -> bool:
        return self.interval in NON_POSITIVE

    @property
    def bounded(self) -> bool:
        return self.interval.low > -INF and self.interval.high < INF

    @property
    def kind(self) -> str:
        if self.non_negative or self.non_positive:
            return "non-negative" if self.non_negative else "non-positive"
        return "bounded" if self.bounded else "unknown"

    def show(self, names: Sequence[str] = ()) -> str:
        """The proof in lines, with operands called by `names`, or by their number."""
        outcome = "is kept" if self.interval != ANY else "is all that is known"
        lines = [f"{{{self.operand}}} in {self.interval} {outcome}" + ":" * bool(self.steps)]
        return filled("\n".join([*lines, *(f"  {step}" for step in self.steps)]), names)

    def __str__(self) -> str:
        return self.show()


def filled(template: str, names: Sequence[str]) -> str:
    """The text with `{2}` replaced by the name of operand 2."""
    return re.sub(r"\{(\d+)\}", lambda match: names[int(match[1])] if names else f"operand{match[1]}", template)


def infer_sign(
    program: UpdateProgram,
    starts: Sequence[Interval | None] | None = None,
    number_starts: Sequence[Interval | None] | None = None,
) -> tuple[Proof, ...]:
    """A proof for each operand; any value, with no steps, for one that is no written state.

    Args:
        program: the update.
        starts: for each operand, what its value can be before the first step; None for zero.
        number_starts: for each of `program.numbers`, what it can be before the first step; None for any that is not
            negative where the update writes it, and for any where it does not.
    """
    numbers = _number_results(program, number_starts)
    states = written_states(program)
    given = starts or [None] * len(program.operands)
    begin = [given[i] or ZERO for i in states]
    stored = [new_values(program)[i] for i in states]

    def step(assumed: Intervals) -> Intervals:
        values = evaluate(program.elements.graph, _inputs(program, dict(zip(states, assumed, strict=True)), numbers))
        return [values[node] for node in stored]

    kept = dict(zip(states, _induction(begin, step), strict=True))
    values = evaluate(program.elements.graph, _inputs(program, kept, numbers))
    return tuple(
        Proof(i, kept[i], _steps(program, i, values)) if i in kept else Proof(i, ANY)
        for i in range(len(program.operands))
    )


def intervals_of(
    program: UpdateProgram, proofs: Sequence[Proof], number_starts: Sequence[Interval | None] | None = None
) -> dict[fx.Node, Interval]:
    """What holds the value of each node of `program.elements`, when states are where `proofs` keep them."""
    assumed = {proof.operand: proof.interval for proof in proofs}
    return evaluate(program.elements.graph, _inputs(program, assumed, _number_results(program, number_starts)))


def written_states(program: UpdateProgram) -> list[int]:
    return [i for i, operand in enumerate(program.operands) if operand.role == "state" and operand.written]


def new_values(program: UpdateProgram) -> dict[int, fx.Node]:
    """The node whose value each written operand gets."""
    outputs: Any = list(program.elements.graph.nodes)[-1].args[0]
    written = [i for i, operand in enumerate(program.operands) if operand.written]
    return dict(zip(written, outputs, strict=True))


def _inputs(program: UpdateProgram, assumed: dict[int, Interval], numbers: Intervals) -> Intervals:
    return [*(assumed.get(i, ANY) for i in range(len(program.operands))), *numbers]


def _number_results(program: UpdateProgram, starts: Sequence[Interval | None] | None) -> Intervals:
    """What the 0-d inputs of `elements` can be, by the same induction over the numbers that the update writes."""
    outputs: Any = list(program.scalars.graph.nodes)[-1].args[0]
    results, stored = outputs[: len(program.scalar_dtypes)], outputs[len(program.scalar_dtypes) :]
    given = starts or [None] * len(program.numbers)
    begin = [given[i] or NON_NEGATIVE for i in program.written_numbers]

    def values(assumed: Intervals) -> dict[fx.Node, Interval]:
        known = dict(zip(program.written_numbers, assumed, strict=True))
        return evaluate(program.scalars.graph, [known.get(i, given[i] or ANY) for i in range(len(program.numbers))])

    def step(assumed: Intervals) -> Intervals:
        found = values(assumed)
        return [found[node] for node in stored]

    found = values(_induction(begin, step))
    intervals = [found[node] for node in results]
    if _decides_a_sign(program, intervals) and (computed := _for_every_step(program, given)):
        intervals = [a & b for a, b in zip(intervals, computed, strict=True)]
    return intervals


def _decides_a_sign(program: UpdateProgram, numbers: Intervals) -> bool:
    """Whether a number of unknown sign goes into the new value of a state."""
    placeholders = [n for n in program.elements.graph.nodes if n.op == "placeholder"][len(program.operands) :]
    unknown = {n for n, interval in zip(placeholders, numbers, strict=True) if interval.low < 0 < interval.high}
    stored = new_values(program)
    return any(unknown & ancestors(stored[i]) for i in written_states(program))


def _for_every_step(program: UpdateProgram, given: Sequence[Interval | None]) -> Intervals | None:
    """What numbers can be that are made of one step counter alone: by computing them for each step that fp32 can count.

    Interval arithmetic does not see that (1 - b**(t - 1)) / (1 - b**t) is below 1.
    """
    counts_here = program.written_numbers == (0,) and (given[0] is None or given[0] in NON_NEGATIVE)
    if len(program.numbers) != 1 or not (counts_here or given[0] == COUNTED):
        return None
    dtype = next(n for n in program.scalars.graph.nodes if n.op == "placeholder").meta["val"].dtype
    found: Intervals | None = None
    for first in range(0, LAST_STEP, CHUNK):
        steps = torch.arange(first, first + CHUNK, dtype=dtype)
        try:
            computed: list[torch.Tensor] = list(program.scalars(steps if counts_here else steps + 1))
        except (RuntimeError, TypeError):
            return None
        if counts_here and not (computed[-1].shape == steps.shape and torch.equal(computed.pop(), steps + 1)):
            return None
        bounds = [torch.aminmax(r.double()) for r in computed]
        if not all(bool(torch.isfinite(low) & torch.isfinite(high)) for low, high in bounds):
            return None
        here = [Interval(low.item(), high.item()) for low, high in bounds]
        found = here if found is None else [a | b for a, b in zip(found, here, strict=True)]
    return found


def _induction(begin: Intervals, step: Callable[[Intervals], Intervals]) -> Intervals:
    """Intervals with `begin` in them, and with step(them) in them."""

    def grown(found: Intervals) -> Intervals:
        return [old | new for old, new in zip(found, step(found), strict=True)]

    found = begin
    for _ in range(JUMPS):
        one = grown(found)
        two = grown(one)
        three = grown(two)
        found = [_jump(*changes) for changes in zip(one, two, three, strict=True)]
    while (larger := grown(found)) != found:
        found = [_given_up(old, new) for old, new in zip(found, larger, strict=True)]
    for _ in range(NARROWINGS):
        narrow = [first | new for first, new in zip(begin, step(found), strict=True)]
        if not all(new in old for new, old in zip(step(narrow), narrow, strict=True)):
            break
        found = narrow
    return found


def _jump(one: Interval, two: Interval, three: Interval) -> Interval:
    return Interval(_limit(one.low, two.low, three.low, -1), _limit(one.high, two.high, three.high, 1))


def _limit(one: float, two: float, three: float, outward: int) -> float:
    """Where a bound goes whose changes shrink by a constant factor (an average's do); a little beyond, to be certain."""
    first, second = two - one, three - two
    if not (0 < abs(second) < abs(first) < INF):
        return three
    ratio = second / first
    end = three + second * ratio / (1 - ratio)
    return 0.0 if abs(end) < 1e-6 * abs(one) else end + outward * 1e-6 * abs(end)


def _given_up(old: Interval, new: Interval) -> Interval:
    """Bounds that still move are replaced by zero, where it is on their way, or by none."""
    low = old.low if new.low == old.low else 0.0 if new.low >= 0 else -INF
    high = old.high if new.high == old.high else 0.0 if new.high <= 0 else INF
    return Interval(low, high)


def _steps(program: UpdateProgram, operand: int, values: dict[fx.Node, Interval]) -> tuple[str, ...]:
    """One line per input with a known interval and per operation that the stored value is made of."""
    stored = source_of(new_values(program)[operand])
    needed = ancestors(stored)
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    count = 0
    for i, node in enumerate(program.elements.graph.nodes):
        if node.op == "placeholder":
            is_number = i >= len(program.operands)
            names[node] = f"number{i - len(program.operands)}" if is_number else f"{{{i}}}"
            if node in needed and i != operand and values[node] != ANY:
                lines.append(f"{names[node]} in {values[node]}")
        elif node in needed and source_of(node) is node:
            count += 1
            call = f"{name_of(node).split('.')[-1]}({', '.join(_shown(node, names))})"
            names[node] = f"x{count}"
            lines.append(f"{'' if node is stored else f'x{count} = '}{call} in {values[node]}")
    return tuple(lines)


def source_of(node: fx.Node) -> fx.Node:
    """What the node is a copy of."""
    while name_of(node) in COPIES and isinstance(source := node.args[COPIES[name_of(node)]], fx.Node):
        node = source
    return node


def ancestors(node: fx.Node) -> set[fx.Node]:
    """Those that its value is made of, itself included, with copies skipped."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = source_of(stack.pop())
        if current not in found:
            found.add(current)
            stack.extend(current.all_input_nodes)
    return found


def _shown(node: fx.Node, names: dict[fx.Node, str]) -> list[str]:
    shown = [("", arg) for arg in node.args]
    shown += [(f"{key}=", arg) for key, arg in node.kwargs.items() if key in ("alpha", "value", "weight", "min", "max")]
    return [key + (names[source_of(arg)] if isinstance(arg, fx.Node) else number_text(arg)) for key, arg in shown]


def number_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
