"""Names of parameters, found in the modules that are alive.

An optimizer knows tensors only. The largest live module that holds a parameter gives it its name; wrappers of
`torch.compile` and `DistributedDataParallel` are seen through.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from qcompile._compat import is_graph

WRAPPERS = ("_orig_mod.", "module.")


@dataclass(frozen=True, slots=True)
class Named:
    """What modules say about a parameter.

    Attributes:
        name: in its largest live module, else its position.
        owner: type of the module that it is an attribute of; None where no module holds it.
        in_last_linear: whether it belongs to the last `nn.Linear` of that module, in order of definition.
    """

    name: str
    owner: type[nn.Module] | None
    in_last_linear: bool


def alive(is_wanted: Callable[[type], bool]) -> list[Any]:
    """All live objects of some types. Asks once per type, since there are half a million objects."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if is_wanted(kind)}
    return [o for o in objects if type(o) in kinds]


def named(params: Iterable[Tensor]) -> dict[int, Named]:
    """By id of the parameter. Searches all live objects: a tool for compile time."""
    params = list(params)
    found = {id(p): Named(str(i), None, False) for i, p in enumerate(params)}
    sizes = dict.fromkeys(found, 0)
    for module in [m for m in alive(lambda kind: issubclass(kind, nn.Module)) if not is_graph(m)]:
        own = [(name, id(p)) for name, p in module.named_parameters(remove_duplicate=False) if id(p) in found]
        count = len({key for _, key in own})
        if not any(count > sizes[key] for _, key in own):
            continue
        modules = dict(module.named_modules(remove_duplicate=False))
        linear = [
            m for m in modules.values() if isinstance(m, nn.Linear) and any(id(p) in found for p in m.parameters())
        ]
        last = {id(p) for p in linear[-1].parameters()} if linear else set()
        for name, key in own:
            if count > sizes[key]:
                found[key] = Named(_plain(name), type(modules[name.rpartition(".")[0]]), key in last)
        sizes.update({key: max(count, sizes[key]) for _, key in own})
    return found


def _plain(name: str) -> str:
    """The name without the prefixes that wrappers put in front of it."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper)
    return name
