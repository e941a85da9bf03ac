"""Boxes in which unreviewed code can run: disposable, observable, killable.

from livinglayer.sandbox import Sandbox

with Sandbox.create(memory="256M", pids=64) as box:
    print(box.run(["python3", "-c", "print(1)"]).stdout)
"""

from .blueprint import Blueprint
from .sandbox import AsyncImages, AsyncSandbox, Entry, Images, Output, Result, Sandbox, Snapshot

__all__ = ["AsyncImages", "AsyncSandbox", "Blueprint", "Entry", "Images", "Output", "Result", "Sandbox", "Snapshot"]
