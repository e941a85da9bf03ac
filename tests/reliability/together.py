"""Several processes on one layer."""

import threading

import livinglayer
from livinglayer.errors import Conflict, Invalid


def insert(location: str, entity: str, process: int, times: int) -> None:
    layer = livinglayer.open(location)
    for n in range(times):
        layer.insert(entity, {"text": f"{process}/{n}"})
    layer.close()


def create(location: str) -> None:
    livinglayer.open(location, create=True).close()


def create_and_insert(location: str, process: int, threads: int, times: int) -> None:
    """In a process of its own: make the layer unless it is there, define `note` unless it is, insert rows."""
    layer = livinglayer.open(location, create=True)
    try:
        layer.define("note", {"text": "text"})
    except (Conflict, Invalid):
        pass  # another process was faster
    failed: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for n in range(times):
                layer.insert("note", {"text": f"{process}/{thread}/{n}"})
        except BaseException as error:
            failed.append(error)

    pool = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    layer.close()
    if failed:
        raise failed[0]
