"""Inspect AI's tools run in boxes: `sandbox="layer"`, or `("layer", TIER)`, `("layer", FILE)`, `SandboxEnvironmentSpec("layer", Shape(…))`.

Inspect finds this by its entry point. No layer and no server are needed: boxes are made on this machine's own host.
"""

import errno
import os
import posixpath
import re
import secrets
import shlex
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, overload

import yaml
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict, model_validator

from ...errors import Denied, Invalid, LayerError, LimitExceeded, TimedOut
from ...sandbox import AsyncSandbox
from ...sandbox.blueprint import TIERS, Blueprint

OURS = {"made-by": "inspect"}  # the label of every box made here
OUTPUT = 64 << 20  # bytes of a stream: above what Inspect takes, so that it is Inspect's limit that is met


class Shape(BaseModel):
    """What a blueprint holds: Shape(tier="microvm", memory="1G", egress=["pypi.org"]). What it does not know is refused."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @model_validator(mode="after")
    def _known(self) -> "Shape":
        try:
            Blueprint.of(self.model_dump())
        except Invalid as error:
            raise ValueError(said(error)) from None
        return self


@sandboxenv(name="layer")
class LayerSandboxEnvironment(SandboxEnvironment):
    """One box for each sample; it has a name, so it stays until it is cleaned up."""

    _made: dict[str, set[str]] = {}  # boxes that are there, by task

    def __init__(self, box: AsyncSandbox, directory: str) -> None:
        super().__init__()
        self.box, self._directory = box, directory

    # ---- life ----

    @classmethod
    def config_files(cls) -> list[str]:
        return ["layer.yaml"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return Shape(**config)

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Refuse a task whose boxes can't be made here before any of its samples begins."""
        try:
            await AsyncSandbox.capabilities(Blueprint.of(shape(config)).tier)
        except LayerError as error:
            raise RuntimeError(said(error)) from error

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        slug = re.sub(r"[^a-z0-9]+", "-", task_name.rpartition("/")[2].lower()).strip("-")[:20] or "task"
        given = {"output": OUTPUT} | shape(config)
        name = f"inspect-{slug}-{secrets.token_hex(4)}"
        box = await AsyncSandbox.create(name=name, labels=OURS | {"task": task_name}, blueprint=given)
        cls._made.setdefault(task_name, set()).add(name)
        return {"default": cls(box, (await box.run("pwd")).stdout.text.rstrip("\n"))}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            box = environment.as_type(LayerSandboxEnvironment).box
            await box.kill()
            cls._made.get(task_name, set()).discard(box.name or "")

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        left = sorted(cls._made.pop(task_name, ()))
        if not cleanup and left:
            print("Boxes that were kept (`layer box shell NAME` enters one, `inspect sandbox cleanup layer` ends all):")
        for name in left:
            if cleanup:
                await cls.cli_cleanup(name)
            else:
                print(f"  {name}")

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """End the boxes that evaluations left, or the one of this name; other boxes are not touched."""
        for box in await AsyncSandbox.list(labels=OURS):
            if id is None or id in (box.name, box.id):
                await box.kill()

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """A shell in the box, for people."""
        try:
            await self.box.info()
        except LayerError as error:
            raise ConnectionError(error.message) from error
        words = ["layer", "box", "shell", *(["--user", user] if user else []), str(self.box.name)]
        return SandboxConnection(type="layer", command=shlex.join(words), container=self.box.name)

    def default_polling_interval(self) -> float:
        return 0.2

    # ---- commands ----

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command to its end. When its time is up it is killed with all that came of it, so it is not tried again."""
        if user is not None and self.box.tier == "process":
            raise SandboxUserUnsupportedError("a box of tier process has one user; the tiers above it have all")
        try:
            result = await self.box.run(
                cmd, stdin=input, cwd=self._path(cwd or "."), env=env, user=user, timeout=timeout
            )
        except TimedOut as error:
            late = TimeoutError(f"Command timed out after {timeout} seconds")
            printed = "".join(str(error.details.get(stream, "")) for stream in ("stdout", "stderr"))
            if printed:
                late.truncated_output = printed  # type: ignore[attr-defined]
            raise late from None
        except LayerError as error:
            if "errno" not in error.details:
                raise SandboxUnavailableError(said(error)) from error
            if isinstance(error, Denied):
                raise PermissionError(error.details["errno"], error.message) from None
            missing = error.details["errno"] == errno.ENOENT
            return ExecResult(False, 127 if missing else 126, "", error.message + "\n")
        for output in (result.stdout, result.stderr):
            if result.truncated or len(output) > SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE:
                begun = (result.stdout or result.stderr)[: SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE]
                raise OutputLimitExceededError(
                    SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, begun.decode("utf-8", "replace")
                )
        code = result.exit_code if result.exit_code >= 0 else 128 - result.exit_code
        return ExecResult(code == 0, code, result.stdout.text, result.stderr.text)

    # ---- files ----

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, its directories made, with the rights of the box's user."""
        try:
            await self.box.files.write(self._path(file), contents)
        except LayerError as error:
            refused(error, file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """A whole file, as the box's user may read it."""
        try:
            content = await self.box.files.read(self._path(file), limit=SandboxEnvironmentLimits.MAX_READ_FILE_SIZE)
        except LimitExceeded:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from None
        except LayerError as error:
            refused(error, file)
        return content.decode() if text else content

    def _path(self, given: str) -> str:
        return posixpath.join(self._directory, given)


def shape(config: SandboxEnvironmentConfigType | None) -> dict[str, Any]:
    """The blueprint that a task's configuration asks for."""
    if config is None:
        return {}
    if isinstance(config, BaseModel):
        return config.model_dump()
    if config in TIERS:
        return {"tier": config}
    with open(config) as file:
        found = yaml.safe_load(file) or {}
    if not isinstance(found, Mapping):
        raise Invalid(f"{config!r} does not hold a blueprint", hint="tier: microvm, memory: 1G, … one to a line")
    return dict(found)


def refused(error: LayerError, file: str) -> NoReturn:
    """The same as Python says it of files."""
    if number := error.details.get("errno"):
        raise OSError(number, os.strerror(int(str(number))), file) from None
    raise SandboxUnavailableError(said(error)) from error


def said(error: LayerError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message
