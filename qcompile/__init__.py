"""Train with quantized optimizer state: `torch.compile(train_step, backend="qstate")`."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

# In a checkout, `passes` and `runtime` lie beside this folder; an installed package has them inside it. The checkout is not
# put into `__path__`: it would be a package inside of itself, for whoever looks for all modules (`TORCH_LOGS=qcompile` does).
_checkout = Path(__file__).resolve().parent.parent
for _name in ("passes", "runtime") if (_checkout / "pyproject.toml").exists() else ():
    _folder = _checkout / _name
    _spec = spec_from_file_location(
        f"{__name__}.{_name}", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
    )
    if _spec is not None and _spec.loader is not None and _spec.name not in sys.modules:
        sys.modules[_spec.name] = globals()[_name] = module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_spec.name])

from qcompile.backend import qstate  # noqa: E402
from qcompile.exc import (  # noqa: E402
    ChangedTensorError,
    CheckpointError,
    FormatMismatchError,
    InvalidFormatError,
    InvalidOptionError,
    LostPartnerError,
    MarkedStateError,
    NoStateYetError,
    NotQuantizedError,
    QCompileError,
    RanksDifferError,
    UnknownOptionError,
    UnknownRecipeError,
    UnmatchedOverrideError,
    UnsupportedTorchError,
)
from qcompile.explain import Report, explain  # noqa: E402
from qcompile.marks import mark_state, state_like  # noqa: E402
from qcompile.monitoring import Figures, Monitor, monitor  # noqa: E402
from qcompile.new_state import init_state  # noqa: E402
from qcompile.overrides import Override  # noqa: E402
from qcompile.recipes import RECIPES, Recipe  # noqa: E402
from qcompile.runtime.checkpoint import dense_state_dict, flat_state_dict, load_flat_state_dict  # noqa: E402
from qcompile.runtime.formats import Format  # noqa: E402
from qcompile.runtime.state import QuantizedState  # noqa: E402
from qcompile.step import compile_step, train_step  # noqa: E402

__all__ = [
    "RECIPES",
    "ChangedTensorError",
    "CheckpointError",
    "Figures",
    "Format",
    "FormatMismatchError",
    "InvalidFormatError",
    "InvalidOptionError",
    "LostPartnerError",
    "MarkedStateError",
    "Monitor",
    "NoStateYetError",
    "NotQuantizedError",
    "Override",
    "QCompileError",
    "QuantizedState",
    "RanksDifferError",
    "Recipe",
    "Report",
    "UnknownOptionError",
    "UnknownRecipeError",
    "UnmatchedOverrideError",
    "UnsupportedTorchError",
    "compile_step",
    "dense_state_dict",
    "explain",
    "flat_state_dict",
    "init_state",
    "load_flat_state_dict",
    "mark_state",
    "monitor",
    "qstate",
    "state_like",
    "train_step",
]
__version__ = "0.1.0"
