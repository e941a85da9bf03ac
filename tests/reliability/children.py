"""Processes that a campaign starts and kills."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

# A server that has imported the package forks a child in milliseconds, and a child inherits no thread or connection.
CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["livinglayer", "apsw", "psycopg"])


def start(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    """Run `target(*args)` in a process of its own, which ends with this one."""
    process = CONTEXT.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def finish(*processes: ForkServerProcess, seconds: float = 120) -> None:
    """Wait for each to end by itself and well."""
    for process in processes:
        process.join(seconds)
        if process.is_alive():
            process.kill()
            raise AssertionError(f"{process.name} still ran after {seconds} s")
        assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"
