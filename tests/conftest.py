"""One thread and caches of compiled code per worker, graphs checked after each pass, a clean compiler for each test."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["FXQUANT_VERIFY"] = "graphs"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process that a test starts would compile the package anew
# Inductor compiles and loads a file for each instruction set in each process, to see that the compiler knows it
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more would start a process in each process
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # the collector has rounds of its own
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder of the process that started them
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fxquant-tests-")
    # the user's own has rates that `fxquant rates` has measured, by which reports and `auto` would decide
    os.environ["XDG_CACHE_HOME"] = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "user")

import torch
from ranks import Ranks, quick_compiler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache

if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()  # until all tests are imported, which stay: `quick_compiler` freezes them

# pytest listens to it, for which torch would write each graph and event of a compilation as JSON
logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    quick_compiler()


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)


_shared: dict[str, dict[Any, Any]] = {}
"""What tests of one function share, by its name: of the function whose tests run, if they ask for it."""


def _function(request: pytest.FixtureRequest) -> str:
    return str(request.node.nodeid).partition("[")[0]


@pytest.fixture(autouse=True)
def clean_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forgets compiled code, so that no test counts another's compilations, but for what tests share."""
    function = _function(request) if "shared" in request.fixturenames else ""
    if function not in _shared:
        _shared.clear()
        torch.compiler.reset()
        if function:
            _shared[function] = {}
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # of the CPU alone: seeds of devices that are not there wait in a list, each with the text of its stack
        torch.default_generator.manual_seed(0)
    yield


@pytest.fixture
def shared(request: pytest.FixtureRequest, clean_compiler: None) -> dict[Any, Any]:
    """What the tests of one function have compiled, for those that follow: empty for the first.

    A test brings what it takes into the state in which the first would have it.
    """
    return _shared[_function(request)]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes over gloo."""
    processes = Ranks()
    yield processes
    processes.end()


@pytest.fixture
def without_cpp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor writes its C++ kernels and does not compile them, for tests that ask for no number."""
    from fxquant.kernels.cast import pieces

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *args: lambda *pointers: None)
    monkeypatch.setattr(pieces, "_pieces", {})  # what is compiled so is for no other test
    yield
    PyCodeCache.cache_clear()


@pytest.fixture
def casts_as_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts in Inductor's graphs run as `reference`, for tests of what Inductor does around them.

    That their own compilations have its bytes is what tests/kernels/cast/test_pieces.py says.
    """
    from fxquant.kernels.cast import pieces

    monkeypatch.setattr(pieces, "_run_piece", lambda what, run, inputs, shapes: list(run(*inputs)))
