"""Processes that tests of distributed code share: started once, because importing torch is what takes time.

A case is a function ``case(rank, **arguments)`` of any file, which raises if a value is not right; it runs in each
process of a fresh gloo group, on one thread, after ``torch.manual_seed(0)``.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MOST = 4
# A hang must fail well before the whole run does; machines that are shared are slow.
SECONDS = 240.0


class Ranks:
    """Runs cases in up to `MOST` processes, which live until `close`."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, case: Callable[..., Any], world: int, **arguments: Any) -> list[Any]:
        """Runs ``case`` in ``world`` processes.

        Args:
            case: a function of a module on disk, known by its file and name.
            world: number of processes.
            arguments: of the case; like what it returns, they are pickled.

        Returns:
            What each rank returned, in order.

        Raises:
            AssertionError: a rank raised, ended or took too long; the message has what every such rank said.
        """
        path, name = case.__code__.co_filename, case.__name__
        while len(self._workers) < world:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            connections = [connection for _, connection in self._workers[:world]]
            for rank, connection in enumerate(connections):
                connection.send((path, name, rank, world, store, arguments))
            failures, results, waiting = {}, {}, dict(zip(connections, range(world), strict=True))
            while waiting:
                # The others wait in vain for a rank that has failed.
                ready = wait(list(waiting), timeout=3.0 if failures else SECONDS)
                for connection in ready:
                    rank = waiting.pop(connection)
                    try:
                        is_right, said = connection.recv()
                    except EOFError:
                        is_right, said = False, "the process ended\n"
                    (results if is_right else failures)[rank] = said
                if not ready:
                    failures.update((rank, "no answer\n") for rank in waiting.values())
                    break
        if failures:
            self.close()
            raise AssertionError("\n".join(f"rank {rank}: {said}" for rank, said in sorted(failures.items())))
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        """Ends the processes."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))


def _serve(connection: Connection) -> None:
    import torch
    from torch import distributed
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    while True:
        path, name, rank, world, store, arguments = connection.recv()
        try:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
            distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
            torch.manual_seed(0)
            returned = getattr(_module(path), name)(rank, **arguments)
            distributed.barrier()
            distributed.destroy_process_group()
            # It holds meshes, whose groups are gone, and gives them to equal ones of later cases.
            _clear_sharding_prop_cache()
            connection.send((True, returned))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def _module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module at {path}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
