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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from qcompile._compat import example_of
from qcompile.passes.find_state import Inputs
from qcompile.passes.thread_writes import is_scalar, returns_what_it_writes, written_by

READ = "it is read here, and written nowhere that was compiled"


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a graph that updates one parameter.

    Attributes:
        nodes: its operations, in order.
        inputs: what it reads from outside, in order of first use.
        outputs: what is read outside of it, in order, but for numbers, which may be computed twice.
        key: the program as text: equal keys, equal programs, whatever the tensors and their shapes.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    key: str


@dataclass(frozen=True, slots=True)
class Outline:
    """Regions, and for every other state buffer of the graph the reason why its update is not one.

    Attributes:
        in_place: whether each region runs where its last operation was, instead of all of them at the end.
    """

    regions: tuple[Region, ...]
    refused: dict[fx.Node, str] = field(default_factory=dict)
    in_place: bool = False


def outline_updates(gm: fx.GraphModule, inputs: Inputs) -> Outline:
    """Find the update regions of `gm`, which `thread_writes` has been over.

    Regions run after everything that is in no region. Where they read a tensor that is made in the graph (the gradients of
    a step whose backward pass is in the same graph), each will run in its own place instead: behind its last operation.
    """
    index = _index(gm, inputs)
    unwritten = _only_read(inputs, index)
    groups = [_without_last_numbers(group, index) for group in _components(gm, inputs, index.roots, unwritten)]
    members = {node for group in groups for node in group}
    own = _own_numbers(groups, members, inputs, index)
    for group, numbers in zip(groups, own, strict=True):
        group |= numbers
    members |= set().union(*own) if own else set()
    for group in groups:
        _absorb(group, members, index)
    refused: dict[fx.Node, str] = {}
    while True:
        owned = set().union(*groups) if groups else set()
        in_place = _runs_in_place(groups, inputs, index)
        bad = [(group, reason) for group in groups if (reason := _conflict(group, owned, index, in_place))]
        if not bad:
            break
        for group, reason in bad:
            groups.remove(group)
            refused.update({a: reason for n in group for a in [n, *n.all_input_nodes] if a in inputs.state})
            refused.update({index.roots[n]: reason for n in group if index.roots.get(n) in inputs.state})
    regions = [_region(group, index, inputs) for group in groups]
    regions.sort(key=lambda region: index.order[region.nodes[0]])
    touched = {a for region in regions for a in region.inputs} | set(refused)
    refused.update({state: READ for state in unwritten if state not in touched})
    return Outline(tuple(regions), refused, in_place)


def _runs_in_place(groups: Iterable[Iterable[fx.Node]], inputs: Inputs, index: _Index) -> bool:
    """Whether what a region makes is read outside, or some region reads elements that an operation outside of it makes and
    all state arrives as arguments."""
    arguments = all(n.op == "placeholder" for n in [*inputs.state, *inputs.params])
    for group in groups:
        own = set(group)
        read = {a for n in own for a in n.all_input_nodes if a not in own}
        if arguments and any(a.op not in ("placeholder", "get_attr") and not is_scalar(a) for a in read):
            return True
        if any(_is_output(n, own, index) for n in own):
            return True
    return False


def _is_output(node: fx.Node, own: set[fx.Node], index: _Index) -> bool:
    """Whether a node is read outside of its region, perhaps by a number of which the outside has a copy."""

    def leaves(n: fx.Node) -> bool:
        return any(user not in own or (_is_number(user, index.fixed) and leaves(user)) for user in n.users)

    return not _is_number(node, index.fixed) and leaves(node)


def _only_read(inputs: Inputs, index: _Index) -> set[fx.Node]:
    """State that this graph does not write: it stays as it is stored, and begins no region."""
    return {node for node in inputs.state if not any(writes for _, writes in index.touches.get(node, ()))}


@dataclass(frozen=True, slots=True)
class _Index:
    """What is asked of the graph again and again.

    Attributes:
        order: position of each node.
        roots: the input, or the operation, whose memory a node is or is a view of.
        fixed: nodes that are written in place later.
        touches: per root, the nodes that read or write its memory, and whether they write, in order.
        shared: inputs whose memory overlaps that of another input.
    """

    order: dict[fx.Node, int]
    roots: dict[fx.Node, fx.Node]
    fixed: frozenset[fx.Node]
    touches: dict[fx.Node, list[tuple[fx.Node, bool]]]
    shared: frozenset[fx.Node]


def _index(gm: fx.GraphModule, inputs: Inputs) -> _Index:
    roots = _roots(gm, inputs)
    touches: dict[fx.Node, list[tuple[fx.Node, bool]]] = {}
    fixed: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        written = written_by(node)
        fixed.update(written)
        writes = {roots[w] for w in written if w in roots}
        for root in {roots[a] for a in node.all_input_nodes if a in roots}:
            touches.setdefault(root, []).append((node, root in writes))
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    return _Index(order, roots, frozenset(fixed), touches, _overlapping(inputs))


def _overlapping(inputs: Inputs) -> frozenset[fx.Node]:
    """Inputs that share memory with another input: a parameter that is part of another, say."""
    spans = []
    for node, tensor in inputs.tensors.items():
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.numel() > 0:
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), node))
    spans.sort(key=lambda span: span[:2])
    shared, end, widest = set(), 0, None
    for start, stop, node in spans:
        if start < end and widest is not None:
            shared |= {node, widest}
        if stop > end:
            end, widest = stop, node
    return frozenset(shared)


def _roots(gm: fx.GraphModule, inputs: Inputs) -> dict[fx.Node, fx.Node]:
    """The input, or the operation, whose memory a node is or is a view of."""
    storages: dict[object, fx.Node] = {}
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
            roots[node] = storages.setdefault(StorageWeakRef(example.untyped_storage()), node)
    return roots


def _components(
    gm: fx.GraphModule, inputs: Inputs, roots: dict[fx.Node, fx.Node], unwritten: set[fx.Node]
) -> list[list[fx.Node]]:
    large = {n for n in inputs.tensors if (n in inputs.params or n in inputs.state) and not is_scalar(n)}
    owners = large - unwritten
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


def _without_last_numbers(group: list[fx.Node], index: _Index) -> set[fx.Node]:
    """The group without what it reads into Python numbers (`item`) for others: a region gives tensors away."""
    kept = set(group)
    for node in reversed(group):
        is_python = is_scalar(node) and not isinstance(example_of(node), Tensor)
        if (is_python or _is_number(node, index.fixed)) and not any(user in kept for user in node.users):
            kept.remove(node)
    return kept


def _own_numbers(
    groups: list[set[fx.Node]], members: set[fx.Node], inputs: Inputs, index: _Index
) -> list[set[fx.Node]]:
    """Per group, writes to numbers in its parameter's state (a step counter, a decayed rate) that no other group reads."""
    group_of: dict[int, int] = {}
    for i, group in enumerate(groups):
        for root in {index.roots[a] for n in group for a in n.all_input_nodes if a in index.roots}:
            if root in inputs.params:
                group_of[id(inputs.given[root])] = i
    own: list[set[fx.Node]] = [set() for _ in groups]
    for number, slot in inputs.numbers.items():
        i = group_of.get(id(slot.param), -1)
        touches = index.touches.get(number, [])
        if i >= 0 and not any(n in members and n not in groups[i] for n, _ in touches):
            own[i] |= {n for n, writes in touches if writes and n not in members and is_scalar(n)}
    return own


def _absorb(group: set[fx.Node], members: set[fx.Node], index: _Index) -> None:
    """Take in what only this region uses, and a copy of every number that is computed from numbers."""
    queue = sorted({a for n in group for a in n.all_input_nodes}, key=index.order.__getitem__)
    while queue:
        node = queue.pop()
        if node in group or node.op in ("placeholder", "get_attr"):
            continue
        reduces = is_scalar(node) and not all(is_scalar(a) for a in node.all_input_nodes)
        whole = all(
            isinstance(example_of(a), Tensor) or is_scalar(a) for a in node.all_input_nodes
        )  # no tuple of gradients
        root = index.roots.get(node, node)
        is_view = root is not node and root.op in ("placeholder", "get_attr")  # p.data, say
        accumulates = bool(written_by(node)) or (node in index.fixed and not is_view)  # gradients, in the rest
        pure = is_scalar(node) or not accumulates
        kept = (index.roots[w].op in ("placeholder", "get_attr") for w in written_by(node) if w in index.roots)
        counts = is_scalar(node) and any(kept)  # once, whoever reads a number that is made of it
        exclusive = node not in members and set(node.users) <= group and not reduces and whole and pure and not counts
        if exclusive or _is_number(node, index.fixed):
            group.add(node)
            queue = sorted({*queue, *node.all_input_nodes}, key=index.order.__getitem__)


def _conflict(group: set[fx.Node], owned: set[fx.Node], index: _Index, in_place: bool) -> str | None:
    """Why running the group at its end, or at the end of the graph, would give another result, or None."""
    end = max(index.order[n] for n in group) if in_place else len(index.order)
    first: dict[fx.Node, int] = {}
    written: dict[fx.Node, int] = {}
    for node in sorted(group, key=index.order.__getitem__, reverse=True):
        written.update({index.roots[w]: index.order[node] for w in written_by(node) if w in index.roots})
        first.update({index.roots[a]: index.order[node] for a in node.all_input_nodes if a in index.roots})
    for root, at in first.items():
        if root in index.shared:
            return f"{root.name} shares memory with another tensor of the step"
        for node, writes in index.touches[root]:
            since = at if writes else written.get(root, end)
            if node not in owned and since < index.order[node] < end:
                return f"{node.name} touches {root.name} after its update"
    return None


def _is_number(node: fx.Node, fixed: frozenset[fx.Node]) -> bool:
    """Whether a node computes a number from numbers, and may be computed twice and at any time after its inputs.

    Not if it writes, or if it or an input is written later (`fixed`).
    """
    read = node.all_input_nodes
    return is_scalar(node) and not written_by(node) and all(is_scalar(a) for a in read) and not fixed & {node, *read}


def _region(group: set[fx.Node], index: _Index, inputs: Inputs) -> Region:
    outputs = [n for n in group if _is_output(n, group, index)]
    nodes = sorted(group, key=index.order.__getitem__)
    return region_of(nodes, sorted(outputs, key=index.order.__getitem__), index.fixed, inputs)


def region_of(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], fixed: frozenset[fx.Node], inputs: Inputs
) -> Region:
    """The region of some nodes, given in order; `fixed` are those whose value is written in place later."""
    group = set(nodes)
    nodes = _canonical(list(nodes), fixed)
    outside = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in group))
    return Region(tuple(nodes), tuple(outside), tuple(outputs), _key(nodes, outside, outputs, inputs))


def _canonical(ordered: list[fx.Node], fixed: frozenset[fx.Node]) -> list[fx.Node]:
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


def _key(nodes: list[fx.Node], outside: list[fx.Node], outputs: Sequence[fx.Node], inputs: Inputs) -> str:
    names: dict[fx.Node, str] = {}
    large = [a for a in outside if isinstance(example_of(a), Tensor) and not is_scalar(a)]
    reference = next((example_of(a) for a in large if a in inputs.params or a in inputs.state), None)
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
    lines += [f"return {names[node]}" for node in outputs]
    return "\n".join(lines)


def _same_shape(example: Tensor, reference: object) -> bool:
    return isinstance(reference, Tensor) and example.shape == reference.shape
