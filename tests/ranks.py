"""Processes over gloo, two unless said, which stay for the tests of a session and run functions of test files."""

from __future__ import annotations

import datetime
import functools
import gc
import importlib.util
import inspect
import queue
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch._dynamo.guards
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._functorch._aot_autograd import graph_compile
from torch.fx.experimental import recording
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class Ranks:
    """The processes; they end with the session, and when a function fails in one, for which the others may wait."""

    def __init__(self, world: int = 2) -> None:
        self.world = world
        self.processes: list[Any] = []

    def start(self) -> None:
        context = mp.get_context("forkserver")  # which imports torch once
        context.set_forkserver_preload(
            ["torch.distributed.checkpoint", "torch._inductor.compile_fx", "fxquant.backend.backend"]
        )
        self.results = context.Queue()
        self.orders = [context.Queue() for _ in range(self.world)]
        store = tempfile.mktemp(prefix="fxquant-ranks-")
        for rank, orders in enumerate(self.orders):
            args = (rank, self.world, store, orders, self.results)
            self.processes.append(context.Process(target=_serve, args=args, daemon=True))
            self.processes[-1].start()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        self.processes = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: int = 90) -> list[Any]:
        """What `function(*args)` returns on each rank; it stands in a test file, and all of it can be pickled."""
        self.order(function, args)
        results: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while len(results) < self.world:
            try:
                rank, result, error = self.results.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                self.end()
                pytest.fail(
                    f"{function.__name__}{args} did not return within {seconds} s on {self.world - len(results)} ranks"
                )
            if error:
                self.end()
                pytest.fail(f"{function.__name__}{args} on rank {rank}:\n{error}")
            results[rank] = result
        return [results[rank] for rank in range(self.world)]

    def order(self, function: Callable[..., Any], args: Any) -> None:
        """Has each rank call a function, starting them if there are none."""
        if not self.processes:
            self.start()
        for orders in self.orders:
            orders.put((inspect.getfile(function), function.__name__, args))

    def run_until_killed(self, function: Callable[..., Any], *args: Any, seconds: int = 60) -> None:
        """Runs a function that kills the last rank, and ends the others, as a launcher does."""
        self.order(function, args)
        last = self.processes[-1]
        last.join(seconds)
        ended = last.exitcode
        self.end()
        assert ended == -signal.SIGKILL, f"{function.__name__}{args} was to kill the last rank: it ended with {ended}"


def quick_compiler() -> None:
    """Has torch compile in one thread, and spares it logs, measurements, and most rounds of the collector."""
    torch.set_num_threads(1)
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0  # flushes the processor's caches
    # the text of each graph, which is written whether something logs it or not
    graph_compile._log_joint_graph = graph_compile._log_inference_graph = lambda *args: None
    graph_compile._log_fw_bw_graphs = lambda *args: (None, None)
    # a sum or product walks its parts for this each time that a symbolic size is asked for
    sympy.Expr.is_number = property(functools.lru_cache(1 << 16)(sympy.Expr.is_number.fget))
    for name, method in list(vars(ShapeEnv).items()):
        if getattr(getattr(method, "__code__", None), "co_filename", None) == recording.__file__:
            setattr(ShapeEnv, name, method.__wrapped__)  # without a record of each call and a line in a log
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


def _serve(rank: int, world: int, store: str, orders: Any, results: Any) -> None:
    quick_compiler()
    warnings.filterwarnings("ignore", module="torch")
    wait = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=wait)
    files: dict[str, Any] = {}
    while True:
        path, name, args = orders.get()
        try:
            if path not in files:
                spec = importlib.util.spec_from_file_location(f"ranks_{Path(path).stem}", path)
                assert spec is not None and spec.loader is not None
                files[path] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(files[path])
            torch.compiler.reset()
            torch.manual_seed(0)
            results.put((rank, getattr(files[path], name)(*args), ""))
        except BaseException:
            results.put((rank, None, traceback.format_exc()[-4000:]))
