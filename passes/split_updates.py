"""Cut an update that is not elementwise: what it does to its state element by element becomes regions, the rest stays.

Before: a region that `functionalize` refuses: Newton-Schulz between momentum and parameter (Muon), projections (SOAP),
norms (LAMB). After: its nodes have been replaced in the graph by an ATen program in single-assignment form, and those of
the program's elementwise nodes that read or write state form regions, one kernel each. A region's results are what other
nodes of the program read.

Every node has a level: how many operations that mix elements lie before it. Elementwise nodes of one level that share data
or a state buffer are one region. No path can leave such a region and come back to it, so the program runs level by level.
A state that is read at several levels, or by an operation that mixes elements, is decoded once, at level 0, and written
where its new value is made: quantized once, from the exact value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from qcompile._compat import example_of
from qcompile.passes.find_state import Inputs
from qcompile.passes.functionalize import SHAPE_PRESERVING, functional_graph
from qcompile.passes.outline_updates import Region, region_of
from qcompile.passes.thread_writes import is_scalar
from qcompile.runtime.state import QuantizedState

aten = torch.ops.aten
COPY = aten.copy_.default
NUMBER, ELEMENTWISE, MIXING = "number", "elementwise", "mixing"
# Parts of the names of operators that invert or factorize a matrix, or that only move its elements.
DECOMPOSITIONS = ("eig", "svd", "cholesky", "inv_ex", "inverse", "solve", "lu_factor", "matrix_exp")
MOVES = ("transpose", "permute", "view", "aten.t.", "aten.t_", "expand", "slice", "select", "squeeze", "reshape")
PRODUCTS = ("mm.", "bmm", "matmul", "dot", "einsum", "addmm", "outer")
INVERTED = "a matrix that is factorized or inverted: its small eigenvalues would be lost in the error of a block"


@dataclass(frozen=True, slots=True)
class Split:
    """The regions of an update that was cut, and state that had better stay dense, with the reason."""

    regions: tuple[Region, ...]
    dense: Mapping[fx.Node, str]


def split_update(gm: fx.GraphModule, region: Region, inputs: Inputs) -> Split:
    """Cut `region`, rewriting `gm` in place; raises `NotElementwise`, with nothing changed, where it cannot be traced."""
    program = functional_graph(region)
    cut = _Cut(program, region, inputs)
    return cut.rewrite(gm)


class _Cut:
    """The program of a region, its levels and parts."""

    def __init__(self, program: fx.GraphModule, region: Region, inputs: Inputs) -> None:
        self.program, self.graph, self.region, self.inputs = program, program.graph, region, inputs
        self.placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.constants = [n for n in self.graph.nodes if n.op == "get_attr"]
        pairs = list(zip(self.placeholders, region.inputs, strict=True))
        self.sources = dict(pairs)
        self.copies = {n.args[0]: n for n in self.graph.nodes if n.target is COPY}
        self.state = {
            n for n, source in pairs if source in inputs.state and (n in self.copies or self._decodes(source))
        }
        self.kinds = {n: _kind(n) for n in self.graph.nodes if n.op == "call_function"}
        for node in self.copies.values():
            self.kinds[node] = ELEMENTWISE if node.args[0] in self.state else MIXING
        self.dense = {self.sources[n]: INVERTED for n in self.state if self._is_inverted(n)}
        self.levels = self._sunk(self._levels())
        for node in self.state:
            self._decode_once(node)
        self.part_of = self._parts()

    def _decodes(self, source: fx.Node) -> bool:
        """Whether a state that is only read is decoded by a kernel; in update space that takes its partner as well."""
        tensor = self.inputs.tensors[source]
        return isinstance(tensor, QuantizedState) and tensor.format.coordinate != "update"

    def _levels(self) -> dict[fx.Node, int]:
        levels = dict.fromkeys([*self.placeholders, *self.constants], 0)
        for node, kind in self.kinds.items():
            read = [node.args[1]] if node.target is COPY else node.all_input_nodes
            after = [levels[a] + (self.kinds.get(a) == MIXING and kind != MIXING) for a in read]
            levels[node] = max(after, default=0)
        return levels

    def _sunk(self, levels: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """Elementwise nodes as late as what reads them: what one region could compute is not handed to it."""
        for node in reversed(list(self.kinds)):
            if self.kinds[node] == ELEMENTWISE and node.target is not COPY and all(u in levels for u in node.users):
                levels[node] = max(levels[node], min((levels[u] for u in node.users), default=0))
        return levels

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        return [u for u in node.users if not (u.target is COPY and u.args[0] is node)]

    def _decode_once(self, state: fx.Node) -> None:
        """Let a copy be read instead of the state, unless all that read it are in one region that does not write it later."""
        readers = self._readers(state)
        last = self.levels[self.copies[state]] if state in self.copies else len(self.levels)
        levels = {self.levels.get(u, -1) for u in readers if self.kinds.get(u) == ELEMENTWISE}
        simple = all(self.kinds.get(u) == ELEMENTWISE for u in readers) and len(levels) <= 1
        if not readers or (simple and max(levels) <= last):
            return
        with self.graph.inserting_after(self.placeholders[-1]):
            copy = self.graph.call_function(aten.clone.default, (state,))
        copy.meta = dict(state.meta)
        for user in readers:
            user.replace_input_with(state, copy)
        self.kinds = {copy: ELEMENTWISE, **self.kinds}
        self.levels[copy] = 0

    def _parts(self) -> dict[fx.Node, fx.Node]:
        """A representative per region for each elementwise node that is in one."""
        parent: dict[fx.Node, fx.Node] = {n: n for n, kind in self.kinds.items() if kind == ELEMENTWISE}

        def find(n: fx.Node) -> fx.Node:
            while parent[n] is not n:
                n = parent[n]
            return n

        def join(a: fx.Node, b: fx.Node) -> None:
            if a in parent and b in parent and self.levels[a] == self.levels[b]:
                parent[find(a)] = find(b)

        for node in parent:
            for a in node.all_input_nodes:
                join(a, node)
        for state in self.state:
            touching = [u for u in state.users if u in parent]
            for user in touching[1:]:
                join(touching[0], user)
        chosen = {find(u) for state in self.state for u in state.users if u in parent}
        part_of = {n: find(n) for n in parent if find(n) in chosen}
        for target, copy in self.copies.items():
            value = copy.args[1]
            if target in self.state or not isinstance(value, fx.Node) or _shape(target) != _shape(value):
                continue
            part = part_of.get(value)
            if part is not None and all(part_of.get(u) is part for u in self._readers(target)):
                part_of[copy] = part
        for target, copy in self.copies.items():
            value = copy.args[1]
            if isinstance(value, fx.Node) and self.kinds.get(value) == NUMBER:
                part, *others = self._read_in(target, part_of) or {None}
                if part is not None and not others:
                    part_of[copy], self.levels[copy] = part, self.levels[part]
        return part_of

    def _read_in(self, target: fx.Node, part_of: Mapping[fx.Node, fx.Node]) -> set[fx.Node | None]:
        """The regions that read a number that is written, its new value, or numbers made of them; None for no region."""
        found: set[fx.Node | None] = set()
        value = self.copies[target].args[1]
        queue = [target, *([value] if isinstance(value, fx.Node) else [])]
        while queue:
            for user in queue.pop().users:
                if self.kinds.get(user) == NUMBER:
                    queue.append(user)
                elif user is not self.copies.get(target):
                    found.add(part_of.get(user))
        return found

    def _is_inverted(self, state: fx.Node) -> bool:
        """Whether a matrix goes into a decomposition as it is, or collects products of matrices."""
        if len(_shape(state)) < 2 or _shape(state)[-1] != _shape(state)[-2]:
            return False
        seen, queue = {state}, [state]
        while queue:
            for user in queue.pop().users:
                name = str(user.target)
                if any(part in name for part in DECOMPOSITIONS) and "linalg_qr" not in name:
                    return True
                if user not in seen and (self.kinds.get(user) == ELEMENTWISE or any(m in name for m in MOVES)):
                    seen.add(user)
                    queue.append(user)
        return state in self.copies and self._collects_products(state)

    def _collects_products(self, state: fx.Node) -> bool:
        seen, queue = set(), [self.copies[state].args[1]]
        products = depends = False
        while queue:
            node = queue.pop()
            if not isinstance(node, fx.Node) or node in seen:
                continue
            seen.add(node)
            products |= any(p in str(node.target) for p in PRODUCTS)
            depends |= node is state
            if str(node.target).startswith("aten.copy."):
                queue.append(node.args[1])
            elif self.kinds.get(node) == ELEMENTWISE or any(m in str(node.target) for m in MOVES):
                queue.extend(node.all_input_nodes)
        return products and depends

    def rewrite(self, gm: fx.GraphModule) -> Split:
        """Put the program in the place of the region, after the last of its nodes."""
        order = {n: i for i, n in enumerate(gm.graph.nodes)}
        anchor = max(self.region.nodes, key=order.__getitem__).next
        env: dict[fx.Node, fx.Node] = {}
        with gm.graph.inserting_before(anchor):
            for node, source in self.sources.items():
                env[node] = as_tensor(gm.graph, source)
            for node in self.constants:
                env[node] = self._constant(gm, node)
            for node in self._order():
                env[node] = self._copied(gm.graph, node, env)
        results = next(n for n in self.graph.nodes if n.op == "output").args[0]
        own, late = set(self.region.nodes), {env[new] for new in results}
        for old, new in zip(self.region.outputs, results, strict=True):
            for user in [u for u in old.users if u not in own]:
                user.replace_input_with(old, env[new])
        for node in order:  # what reads a result between the region's nodes: a number (DAdaptSGD's estimate)
            if node is anchor:
                break
            if node not in own and not late.isdisjoint(node.all_input_nodes):
                anchor.prepend(node)
                late.add(node)
        regions = tuple(self._region(part, env) for part in dict.fromkeys(self.part_of.values()))
        erase_regions(gm.graph, own)
        gm.graph.lint()
        return Split(regions, self.dense)

    def _copied(self, graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """A node of the program in the graph.

        `x + alpha * y` in two operations where y is a product of matrices: Inductor makes one of both, and drops alpha
        (torch 2.13).
        """
        factor = node.args[1] if node.target is aten.add.Tensor and "alpha" in node.kwargs else None
        if isinstance(factor, fx.Node) and self.kinds.get(factor) == MIXING and node not in self.part_of:
            scaled = graph.call_function(aten.mul.Tensor, (env[factor], node.kwargs["alpha"]))
            scaled.meta = {"example_value": factor.meta["val"]}
            new = graph.call_function(aten.add.Tensor, (env[node.args[0]], scaled))  # type: ignore[index]
        else:
            new = graph.node_copy(node, lambda n: env[n])
        new.meta = {"example_value": node.meta.get("val")}
        return new

    def _constant(self, gm: fx.GraphModule, node: fx.Node) -> fx.Node:
        value = getattr(self.program, str(node.target))
        name = f"constant_{sum(n.op == 'get_attr' for n in gm.graph.nodes)}"
        gm.register_buffer(name, value)
        out = gm.graph.get_attr(name)
        out.meta["example_value"] = value
        return out

    def _order(self) -> Iterator[fx.Node]:
        """Nodes level by level, those of a region together; what is written outside of regions last."""
        loose = [c for c in self.copies.values() if c not in self.part_of]
        nodes = [n for n in self.kinds if n not in loose]
        for level in range(max((self.levels[n] for n in nodes), default=0) + 1):
            here = [n for n in nodes if self.levels[n] == level]
            yield from (n for n in here if self.kinds[n] == NUMBER)
            for part in dict.fromkeys(self.part_of[n] for n in here if n in self.part_of):
                yield from (n for n in here if self.part_of.get(n) is part)
            yield from (n for n in here if self.kinds[n] == ELEMENTWISE and n not in self.part_of)
            yield from (n for n in here if self.kinds[n] == MIXING and n not in self.part_of)
        yield from loose

    def _region(self, part: fx.Node, env: dict[fx.Node, fx.Node]) -> Region:
        own = {n for n, other in self.part_of.items() if other is part}
        numbers = self._numbers(own)
        nodes = [env[n] for n in self._order() if n in own or n in numbers]
        outputs = [
            env[n] for n in self._order() if n in own and n.target is not COPY and any(u not in own for u in n.users)
        ]
        fixed = {self.sources[n] for n in self.copies if is_scalar(self.sources[n])}
        return region_of(nodes, outputs, frozenset(fixed), self.inputs)

    def _numbers(self, own: set[fx.Node]) -> set[fx.Node]:
        """Numbers that a region may compute for itself, from numbers alone."""
        found: set[fx.Node] = set()
        queue = [a for n in own for a in n.all_input_nodes]
        while queue:
            node = queue.pop()
            if node not in found and self.kinds.get(node) == NUMBER:
                found.add(node)
                queue.extend(node.all_input_nodes)
        return found


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _kind(node: fx.Node) -> str:
    value = node.meta.get("val")
    read = [r for a in node.all_input_nodes if isinstance(r := a.meta.get("val"), Tensor)]
    if not isinstance(value, Tensor) or len(read) != len(node.all_input_nodes):
        return MIXING
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return MIXING
    if value.dim() == 0 and all(r.dim() == 0 for r in read):
        return NUMBER
    pointwise = torch.Tag.pointwise in tags or node.target in SHAPE_PRESERVING
    same = value.dim() > 0 and all(r.dim() == 0 or r.shape == value.shape for r in read)
    return ELEMENTWISE if pointwise and same else MIXING


def as_tensor(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A number of the graph as a 0-d tensor; call with the place to insert set.

    A Python float that changes arrives as a 0-d tensor and is read by `item`. AOTAutograd turns arithmetic on it back into
    tensor operations, and takes a float that is in none for a constant, which would be compiled again for every value.
    """
    number = next((user for user in node.users if user.target == "item"), None)
    if number is None and isinstance(example_of(node), Tensor):
        return node
    one = graph.call_function(torch.ones, ((),), {"dtype": torch.float64})
    product = graph.call_function(torch.mul, (one, number or node))
    product.meta["example_value"] = torch.empty((), dtype=torch.float64)
    return product


def erase_regions(graph: fx.Graph, owned: Iterable[fx.Node]) -> None:
    """Remove the regions' operations from the graph, but for numbers that the rest reads too."""
    owned = set(owned)
    for node in reversed(list(graph.nodes)):
        if node in owned and not node.users:
            graph.erase_node(node)
    assert all(is_scalar(n) for n in graph.nodes if n in owned)
