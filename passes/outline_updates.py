"""Cut the graph into update regions, one per parameter, and a rest.

Before: a flattened Dynamo graph and its `Inputs`. After: a record of regions; the graph is untouched.

A region grows from its state buffers: what depends on a state buffer, what writes a parameter in place, and what reads
either after it was written; joined where two touch the same buffer. It then takes in what only it uses (weight decay on
the gradient, a negated gradient, bias corrections of its own step counter), so that nothing of a parameter's size is
handed from the rest to the update.

The rest runs first, the regions after it, so a region is accepted only where that order changes nothing; otherwise it
is refused, with the reason, and stays in the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from qcompile._compat import example_of
from qcompile.passes.find_state import Inputs
from qcompile.passes.thread_writes import is_scalar, returns_what_it_writes, written_by


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a graph that updates one parameter.

    Attributes:
        nodes: its operations, in order.
        inputs: what it reads from outside, in order of first use.
        key: the program as text: equal keys, equal programs, whatever the tensors and their shapes.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    key: str


@dataclass(frozen=True, slots=True)
class Outline:
    """Regions, and for every other state buffer of the graph the reason why its update is not one."""

    regions: tuple[Region, ...]
    refused: dict[fx.Node, str] = field(default_factory=dict)


def outline_updates(gm: fx.GraphModule, inputs: Inputs) -> Outline:
    """Find the update regions of `gm`, which `thread_writes` has been over."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    roots = _roots(gm, inputs)
    fixed = {w for n in gm.graph.nodes for w in written_by(n)}
    groups = [set(group) for group in _components(gm, inputs, roots)]
    for group in groups:
        _absorb(group, order, groups, fixed)
        if own := _own_numbers(gm, group, groups, inputs, roots):
            group |= own
            _absorb(group, order, groups, fixed)
    refused: dict[fx.Node, str] = {}
    while True:
        owned = set().union(*groups) if groups else set()
        bad = [(group, reason) for group in groups if (reason := _conflict(gm, group, owned, order, roots, fixed))]
        if not bad:
            break
        for group, reason in bad:
            groups.remove(group)
            refused.update({roots[n]: reason for n in group if roots.get(n) in inputs.state})
            refused.update({a: reason for n in group for a in n.all_input_nodes if a in inputs.state})
    regions = [_region(group, order, inputs, fixed) for group in groups]
    regions.sort(key=lambda region: order[region.nodes[0]])
    touched = {a for region in regions for a in region.inputs} | set(refused)
    refused.update({s: "the graph reads it but does not update it" for s in inputs.state if s not in touched})
    return Outline(tuple(regions), refused)


def _roots(gm: fx.GraphModule, inputs: Inputs) -> dict[fx.Node, fx.Node]:
    """The input whose memory a node is or is a view of."""
    storages = {}
    for node, tensor in inputs.tensors.items():
        example = example_of(node)
        plain = isinstance(example, Tensor) and type(tensor) in (Tensor, nn.Parameter)
        storages[StorageWeakRef(example.untyped_storage()) if plain else node] = node
    roots = {n: n for n in inputs.tensors}
    for node in gm.graph.nodes:
        if node in roots or node.op in ("placeholder", "get_attr", "output"):
            continue
        if returns_what_it_writes(node) and written_by(node)[0] in roots:
            roots[node] = roots[written_by(node)[0]]
        elif type(example := example_of(node)).__name__ == "FakeTensor":
            owner = storages.get(StorageWeakRef(example.untyped_storage()))
            if owner is not None:
                roots[node] = owner
    return roots


def _components(gm: fx.GraphModule, inputs: Inputs, roots: dict[fx.Node, fx.Node]) -> list[list[fx.Node]]:
    owners = {n for n in inputs.tensors if (n in inputs.params or n in inputs.state) and not is_scalar(n)}
    dirty: set[fx.Node] = set()
    depends = {n for n in owners if n in inputs.state}
    parent: dict[fx.Node, fx.Node] = {}

    def find(n: fx.Node) -> fx.Node:
        while parent.setdefault(n, n) is not n:
            n = parent[n]
        return n

    members = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        read = node.all_input_nodes
        written = {roots[w] for w in written_by(node) if w in roots}
        if any(a in depends or roots.get(a) in dirty for a in read) or written & owners:
            members.append(node)
            depends.add(node)
            dirty |= written
            for a in read:
                if a in depends and a not in inputs.tensors:
                    parent[find(a)] = find(node)
                if roots.get(a) in owners:
                    parent[find(roots[a])] = find(node)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in members:
        groups.setdefault(find(node), []).append(node)
    return list(groups.values())


def _absorb(
    group: set[fx.Node], order: dict[fx.Node, int], groups: Iterable[set[fx.Node]], fixed: set[fx.Node]
) -> None:
    """Take in what only this region uses, and a copy of every number that is computed from numbers."""
    taken = set().union(*(other for other in groups if other is not group))
    queue = sorted({a for n in group for a in n.all_input_nodes}, key=order.__getitem__)
    while queue:
        node = queue.pop()
        if node in group or node.op in ("placeholder", "get_attr"):
            continue
        reduces = is_scalar(node) and not all(is_scalar(a) for a in node.all_input_nodes)
        exclusive = node not in taken and set(node.users) <= group and not reduces
        if exclusive or _is_number(node, fixed):
            group.add(node)
            queue = sorted({*queue, *node.all_input_nodes}, key=order.__getitem__)


def _own_numbers(
    gm: fx.GraphModule,
    group: set[fx.Node],
    groups: Iterable[set[fx.Node]],
    inputs: Inputs,
    roots: dict[fx.Node, fx.Node],
) -> set[fx.Node]:
    """Writes to numbers in the state of this region's parameter (a step counter, a decayed rate) that nobody else uses."""
    params = {id(inputs.tensors[roots[a]]) for n in group for a in n.all_input_nodes if roots.get(a) in inputs.params}
    own = {n for n, slot in inputs.numbers.items() if id(slot.param) in params}
    elsewhere = set().union(*(other for other in groups if other is not group))
    touched = {roots[a] for n in elsewhere for a in n.all_input_nodes if a in roots}
    return {
        n
        for n in gm.graph.nodes
        if n not in group and any(roots.get(w) in own - touched for w in written_by(n)) and is_scalar(n)
    }


def _conflict(
    gm: fx.GraphModule,
    group: set[fx.Node],
    owned: set[fx.Node],
    order: dict[fx.Node, int],
    roots: dict[fx.Node, fx.Node],
    fixed: set[fx.Node],
) -> str | None:
    """Why running the group after everything that is in no region would give another result, or None."""
    touched: dict[fx.Node, tuple[int, bool]] = {}
    for node in group:
        if any(user not in owned for user in node.users) and not _is_number(node, fixed):
            return "a result of its update is used outside of it"
        written = {roots[w] for w in written_by(node) if w in roots}
        for root in {roots[a] for a in node.all_input_nodes if a in roots}:
            at, was_written = touched.get(root, (order[node], False))
            touched[root] = min(at, order[node]), was_written or root in written
    for node in gm.graph.nodes:
        if node in owned or node.op in ("placeholder", "get_attr", "output"):
            continue
        written = {roots[w] for w in written_by(node) if w in roots}
        for root in {roots[a] for a in node.all_input_nodes if a in roots}:
            if root in touched and order[node] > touched[root][0] and (touched[root][1] or root in written):
                return f"{node.name} touches {root.name} after its update"
    return None


def _is_number(node: fx.Node, fixed: set[fx.Node]) -> bool:
    """Whether a node computes a number from numbers, and may be computed twice and at any time after its inputs.

    Not if it writes, or if it or an input is written later (`fixed`).
    """
    read = node.all_input_nodes
    return is_scalar(node) and not written_by(node) and all(is_scalar(a) for a in read) and not fixed & {node, *read}


def _region(group: set[fx.Node], order: dict[fx.Node, int], inputs: Inputs, fixed: set[fx.Node]) -> Region:
    nodes = _canonical(sorted(group, key=order.__getitem__), fixed)
    outside = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in group))
    return Region(tuple(nodes), tuple(outside), _key(nodes, outside, inputs))


def _canonical(ordered: list[fx.Node], fixed: set[fx.Node]) -> list[fx.Node]:
    """Put every number in front of its first use, so that sharing numbers between regions does not change their text."""
    numbers = {n for n in ordered if _is_number(n, fixed)}
    out: dict[fx.Node, None] = {}

    def place(node: fx.Node) -> None:
        for a in node.all_input_nodes:
            if a in numbers and a not in out:
                place(a)
        out[node] = None

    for node in ordered:
        if node not in numbers:
            place(node)
    return list(out)


def _key(nodes: list[fx.Node], outside: list[fx.Node], inputs: Inputs) -> str:
    names: dict[fx.Node, str] = {}
    reference = next((example_of(a) for a in outside if a in inputs.params), None)
    lines = []
    for i, a in enumerate(outside):
        names[a] = f"%{i}"
        example = example_of(a)
        role = "param" if a in inputs.params else "state" if a in inputs.state else "input"
        if isinstance(example, Tensor):
            shape = (
                "0d" if example.dim() == 0 else "=" if _same_shape(example, reference) else str(tuple(example.shape))
            )
            lines.append(f"%{i}: {role} {example.dtype} {example.device} {shape}")
        else:
            lines.append(f"%{i}: {type(example).__name__}")
    for i, node in enumerate(nodes, start=len(outside)):
        names[node] = f"%{i}"
        text = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: names[n])
        target = node.target if isinstance(node.target, str) else f"{node.target.__module__}.{node.target.__name__}"
        lines.append(f"%{i} = {target} {text!r}")
    return "\n".join(lines)


def _same_shape(example: Tensor, reference: object) -> bool:
    return isinstance(reference, Tensor) and example.shape == reference.shape
