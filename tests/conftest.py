"""Shared fixtures. Everything runs on a CPU; Triton kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import io
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# `python -m pytest` puts the checkout first; take it out so that the installed package is tested.
CHECKOUT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.getcwd()) != CHECKOUT]

# Two workers share two cores: threads that wait must sleep, not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import torch._dynamo  # noqa: E402
from torch import Tensor, fx, nn  # noqa: E402

from qcompile.options import Options  # noqa: E402
from qcompile.passes import pipeline  # noqa: E402

torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def capture() -> Callable[..., tuple[fx.GraphModule, list[Any]]]:
    """Dynamo's graph of one optimizer step, and the real values of its placeholders."""

    def run(step: Callable[[], Any]) -> tuple[fx.GraphModule, list[Any]]:
        found: list[tuple[fx.GraphModule, list[Any]]] = []

        def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
            found.append((gm, list(example_inputs)))
            return gm.forward

        torch.compile(step, backend=backend)()
        assert len(found) == 1, f"{len(found)} graphs"
        return found[0]

    return run


@pytest.fixture
def analyse() -> Callable[..., pipeline.CompiledGraph]:
    """All passes but code generation: every kernel is replaced by a stand-in."""

    def run(gm: fx.GraphModule, example_inputs: list[Any], **options: Any) -> pipeline.CompiledGraph:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "_kernel", lambda *args: None)
            return pipeline.compile_updates(gm, example_inputs, Options(**options), {})

    return run


def make_params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def through_a_file(value: Any, weights_only: bool = True) -> Any:
    """What `torch.load` gives of what `torch.save` wrote."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def set_grads(params: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


@pytest.fixture
def params() -> Callable[..., list[nn.Parameter]]:
    """Parameters of given shapes, always the same values."""
    return make_params


@pytest.fixture
def train() -> Callable[..., list[Tensor]]:
    """Run a step function on the same gradients for some steps; gives the final parameter values."""

    def run(params: list[nn.Parameter], step: Callable[[], Any], steps: int = 4, scale: float = 1.0) -> list[Tensor]:
        for i in range(steps):
            set_grads(params, i, scale)
            step()
        return [p.detach().clone() for p in params]

    return run


class DenseCount:
    """How many plain tensors of a size `torch.zeros_like` has made, and the most that were alive at once."""

    def __init__(self, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[weakref.ref[Tensor]] = []
        self.most = 0
        original = torch.zeros_like

        def counting(*args: Any, **kwargs: Any) -> Tensor:
            out = original(*args, **kwargs)
            if out.numel() == numel and type(out) is Tensor:
                self.made.append(weakref.ref(out))
                self.most = max(self.most, self.alive())
            return out

        monkeypatch.setattr(torch, "zeros_like", counting)

    def alive(self) -> int:
        return sum(r() is not None for r in self.made)


@pytest.fixture
def count_dense(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], DenseCount]:
    """Begin to count the dense state that optimizers make, by its number of elements."""
    return lambda numel: DenseCount(numel, monkeypatch)


class _NamedTarget:
    """The least a Triton driver must answer for code generation."""

    is_active = staticmethod(lambda: True)
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda index=0: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    @staticmethod
    def get_current_target() -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class _NumpyLibdevice:
    """libdevice functions on the interpreter's NumPy payload."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import numpy as np
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        table = {"nearbyint": np.rint, "rsqrt": lambda x: 1 / np.sqrt(x), "pow": np.power}
        function = table.get(name) or getattr(np, name)

        def call(*args: Any) -> Any:
            handle = args[0].handle
            data = np.asarray(function(*(a.handle.data for a in args))).astype(handle.data.dtype)
            return tl.core.tensor(TensorHandle(data, handle.dtype), args[0].type)

        return call


@pytest.fixture
def triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Inductor generate Triton for CPU tensors and Triton's interpreter run it."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU; the gpu tests run the kernels there")
    import torch._inductor.config as inductor_config
    import torch._inductor.runtime.triton_helpers as triton_helpers
    from triton.runtime.driver import driver

    driver.set_active(_NamedTarget())
    monkeypatch.setattr(triton_helpers, "libdevice", _NumpyLibdevice())
    with inductor_config.patch(cpu_backend="triton"):
        yield
