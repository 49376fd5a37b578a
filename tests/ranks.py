"""Two processes over gloo, which stay for the tests of a session and run functions of test files."""

from __future__ import annotations

import datetime
import importlib.util
import inspect
import queue
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


class Ranks:
    """Two processes; they end with the session, and when a function fails in one, for which the other may wait."""

    def __init__(self) -> None:
        self.processes: list[Any] = []

    def start(self) -> None:
        context = mp.get_context("spawn")
        self.results = context.Queue()
        self.orders = [context.Queue() for _ in range(WORLD)]
        store = tempfile.mktemp(prefix="fxquant-ranks-")
        for rank, orders in enumerate(self.orders):
            args = (rank, store, orders, self.results)
            self.processes.append(context.Process(target=_serve, args=args, daemon=True))
            self.processes[-1].start()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        self.processes = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: int = 90) -> list[Any]:
        """What `function(*args)` returns on each rank; it stands in a test file, and all of it can be pickled."""
        if not self.processes:
            self.start()
        for orders in self.orders:
            orders.put((inspect.getfile(function), function.__name__, args))
        results: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while len(results) < WORLD:
            try:
                rank, result, error = self.results.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                self.end()
                pytest.fail(
                    f"{function.__name__}{args} did not return within {seconds} s on {WORLD - len(results)} ranks"
                )
            if error:
                self.end()
                pytest.fail(f"{function.__name__}{args} on rank {rank}:\n{error}")
            results[rank] = result
        return [results[rank] for rank in range(WORLD)]


def _serve(rank: int, store: str, orders: Any, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    wait = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=wait)
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
