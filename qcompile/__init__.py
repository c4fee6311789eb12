"""Train with quantized optimizer state: `torch.compile(train_step, backend="qstate")`."""

from __future__ import annotations

from pathlib import Path

# In a checkout, `passes` and `runtime` lie beside this folder; an installed package has them inside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").exists() and str(_checkout) not in __path__:
    __path__.append(str(_checkout))

from qcompile.backend import qstate  # noqa: E402
from qcompile.exc import (  # noqa: E402
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
from qcompile.new_state import init_state  # noqa: E402
from qcompile.overrides import Override  # noqa: E402
from qcompile.recipes import RECIPES, Recipe  # noqa: E402
from qcompile.runtime.checkpoint import dense_state_dict, flat_state_dict, load_flat_state_dict  # noqa: E402
from qcompile.runtime.formats import Format  # noqa: E402
from qcompile.runtime.state import QuantizedState  # noqa: E402
from qcompile.step import train_step  # noqa: E402

__all__ = [
    "RECIPES",
    "CheckpointError",
    "Format",
    "FormatMismatchError",
    "InvalidFormatError",
    "InvalidOptionError",
    "LostPartnerError",
    "MarkedStateError",
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
    "dense_state_dict",
    "explain",
    "flat_state_dict",
    "init_state",
    "load_flat_state_dict",
    "mark_state",
    "qstate",
    "state_like",
    "train_step",
]
__version__ = "0.1.0"
