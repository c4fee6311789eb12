"""Every private name we lean on, by name: a new torch fails here first."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import qcompile
from qcompile import _compat, _compat_distributed, _compat_inductor
from qcompile._compat_dynamo import dynamo_settings
from qcompile.exc import UnsupportedTorchError

CHECKOUT = Path(__file__).resolve().parent.parent
PRIVATE = re.compile(
    r"torch\._(dynamo|inductor|functorch|guards|subclasses|C\b)|torch\.utils\._|torch\.distributed\.\w+(\.\w+)*\._|\._local_tensor|_foreach_copy_"
)


def test_nothing_is_missing() -> None:
    assert _compat.missing_names() == []
    assert _compat.missing_names(_compat_distributed.NEEDED) == []
    _compat.require_supported_torch()


def test_a_missing_name_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "NEEDED", (*_compat.NEEDED, ("torch._inductor", "compile_fx no_such_thing")))
    _compat.require_supported_torch.cache_clear()
    try:
        with pytest.raises(UnsupportedTorchError, match=r"torch._inductor.no_such_thing.*torch 2.11 or newer"):
            _compat.require_supported_torch()
    finally:
        monkeypatch.undo()
        _compat.require_supported_torch.cache_clear()


def test_signatures() -> None:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.loop_body import LoopBody
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    assert list(inspect.signature(LoopBody.get_read_expr).parameters) == ["self", "buffer_name"]
    persistent = inspect.signature(InductorChoices.should_use_persistent_reduction)
    assert list(persistent.parameters) == ["features", "cooperative_reduction"]
    kwargs = inspect.signature(InductorChoices.triton_kernel_kwargs)
    assert list(kwargs.parameters) == ["self", "kernel_cls", "features", "groups", "kernel_kwargs"]
    assert list(inspect.signature(compile_fx).parameters)[:2] == ["model_", "example_inputs_"]
    assert "config_patches" in inspect.signature(compile_fx).parameters
    assert list(inspect.signature(compile_fx_inner).parameters)[:2] == ["gm", "example_inputs"]
    assert {"source", "dynamic_dim"} <= set(inspect.signature(ShapeEnv.create_symbol).parameters)


def test_the_tracing_backend_is_known_only_while_tracing(params) -> None:
    assert _compat.tracing_backend() == (None, {})
    assert list(_compat.enclosing_backends()) == []
    seen = []

    @torch.compiler.assume_constant_result
    def look() -> int:
        seen.append(_compat.tracing_backend())
        return 0

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + look()

    torch.compile(function, backend="qstate", options={"block_size": 64})(torch.ones(2))
    assert seen == [(qcompile.qstate, {"options": {"block_size": 64}})]


def test_limits_that_are_set_higher_stay() -> None:
    import torch._dynamo.config as dynamo_config

    with dynamo_config.patch(recompile_limit=100), dynamo_settings({"recompile_limit": 24}):
        assert dynamo_config.recompile_limit == 100
    with dynamo_config.patch(recompile_limit=8), dynamo_settings({"recompile_limit": 24}):
        assert dynamo_config.recompile_limit == 24


def test_timers_are_those_of_torch() -> None:
    before = _compat_inductor.compile_seconds()
    torch.compile(lambda x: x + 1)(torch.ones(3))
    after = _compat_inductor.compile_seconds()
    assert {name for name in after if after[name] > before[name]} >= {"total", "backend"}


def test_private_names_live_in_compat_only() -> None:
    offenders = []
    for folder in ("qcompile", "passes", "runtime"):
        for path in (CHECKOUT / folder).glob("*.py"):
            if not path.name.startswith("_compat"):
                text = "\n".join(
                    line for line in path.read_text().splitlines() if "_disabled_torch_function_impl" not in line
                )
                offenders += [f"{folder}/{path.name}: {m.group()}" for m in PRIVATE.finditer(text)]
    assert offenders == []


def test_house_rules() -> None:
    top = {p.name for p in CHECKOUT.iterdir() if not p.name.startswith(".")}
    fixed = {"pyproject.toml", "qcompile", "passes", "runtime", "tests", "examples", "README.md"}
    assert fixed <= top
    for folder in ("qcompile", "passes", "runtime", "examples", "tests"):
        for path in (CHECKOUT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 400, path
    for folder in ("passes", "runtime"):
        assert not [p for p in (CHECKOUT / folder).iterdir() if p.is_dir() and p.name != "__pycache__"]


def test_runtime_knows_no_fx() -> None:
    for path in (CHECKOUT / "runtime").glob("*.py"):
        text = path.read_text()
        assert "fx" not in re.findall(r"import (\w+)", text), path
        assert "qcompile.passes" not in text, path
