"""Run the egress gateway over the socket FD until the host closes it: `python -m livinglayer.sandbox.egress FD`."""

import argparse
import asyncio
import contextlib
import ctypes
import dataclasses
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from livinglayer.sandbox.egress.gateway import Gateway
from livinglayer.sandbox.egress.limits import Limits
from livinglayer.settings import state_directory

_PR_SET_DUMPABLE = 4


def main() -> None:
    parser = argparse.ArgumentParser(prog="livinglayer.sandbox.egress", description=__doc__)
    parser.add_argument("fd", type=int)
    parser.add_argument("--state", type=Path, default=None)
    for field in dataclasses.fields(Limits):
        kind = int if isinstance(field.default, int) else float
        parser.add_argument("--" + field.name.replace("_", "-"), type=kind, default=field.default)
    given = vars(parser.parse_args())
    control = socket.socket(fileno=given.pop("fd"))
    control.set_inheritable(False)
    state = given.pop("state") or state_directory()
    # It holds secrets: no core dump, and no debugger of the same user.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.environ["LOCALDOMAIN"] = ""  # names are whole: the resolver appends none of the host's search domains
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.setswitchinterval(0.0005)  # a thread makes namespaces; requests should not wait for it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a person's ctrl-c is for the host, which then closes the socket

    async def serve() -> None:
        await Gateway(control, state, Limits(**given)).run()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())
    os._exit(0)


if __name__ == "__main__":
    main()
