"""Tending: what is looked after while an answer streams: whether anybody still listens, signs of life, the end of its time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Send

from ..http.serving import Serving
from .frames import Failure, frame
from .reach import Reached

BEGIN = 1.0  # seconds after which it begins: most commands are over by then, and cost only a timer


class Tending:
    """One stream that is looked after. When it must end, `leave` is called and `why` says with what; None: nobody listens."""

    def __init__(
        self,
        serving: Serving,
        box: Reached,
        receive: Receive,
        send: Send,
        leave: Callable[[], Awaitable[None]],
        sign: bytes,
        interval: float,
        seconds: float | None,
    ) -> None:
        self._serving, self._box, self._receive, self._send = serving, box, receive, send
        self._leave, self._sign, self._interval = leave, frame(sign), interval
        self._loop = asyncio.get_running_loop()
        self._until = None if seconds is None else self._loop.time() + seconds
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(BEGIN if seconds is None else min(BEGIN, seconds), self._begin)
        self.sent = self._loop.time()
        self.left = False
        self.why: Failure | None = None

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._tend())

    async def _tend(self) -> None:
        hung_up = self._loop.create_task(self._listen())
        gone = self._loop.create_task(self._box.gone.wait())
        closing = self._loop.create_task(self._serving.closing.wait())
        try:
            while True:
                now = self._loop.time()
                until = (
                    self.sent + self._interval if self._until is None else min(self.sent + self._interval, self._until)
                )
                done, _ = await asyncio.wait(
                    (hung_up, gone, closing), timeout=max(0, until - now), return_when="FIRST_COMPLETED"
                )
                now = self._loop.time()
                if done or (self._until is not None and now >= self._until):
                    if hung_up not in done:
                        self.why = (
                            Failure("unavailable", f"the connection to sandbox {self._box.id} ended before the stream completed")
                            if gone in done
                            else Failure("unavailable", "the server is being stopped")
                            if closing in done
                            else Failure("deadline_exceeded", "context deadline exceeded")
                        )  # fmt: skip
                    self.left = True
                    return await self._leave()
                if now >= self.sent + self._interval:
                    self.sent = now
                    await self._send({"type": "http.response.body", "body": self._sign, "more_body": True})
        finally:
            for task in (hung_up, gone, closing):
                task.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def end(self) -> None:
        """It is over."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
