"""deepagents works in a box: `create_deep_agent(model, backend=BoxBackend(box))`, with a `Sandbox` that the caller made and ends."""

import errno
from typing import Any

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

from ...errors import LayerError, TimedOut

SECONDS = 30 * 60  # of a command that is given no time
PLACES = ("/large_tool_results", "/conversation_history")  # where deepagents puts what is too long for a model
ERRORS = {
    errno.ENOENT: "file_not_found",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "permission_denied",
    errno.EISDIR: "is_directory",
}


class BoxBackend(BaseSandbox):
    """The shell and the files of one box; listing, searching and editing are deepagents' own, by way of `execute`."""

    enable_capture_offload = True  # a box has a shell and the programs that long output is kept with

    def __init__(self, box: Any, timeout: int = SECONDS) -> None:
        self.box, self._timeout = box, timeout
        box.run(["mkdir", "-p", "-m", "1777", *PLACES], user="root")

    @property
    def id(self) -> str:
        return str(self.box.id)

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a command for the shell; what it prints to both streams, as it came. 0 seconds is no limit."""
        seconds, printed = self._timeout if timeout is None else timeout, bytearray()
        try:
            result = self.box.run(command, timeout=seconds or None, on_stdout=printed.extend, on_stderr=printed.extend)
        except TimedOut:
            late = f"\nthe command was killed: {seconds} seconds were up\n"
            return ExecuteResponse(printed.decode("utf-8", "replace") + late, 124)
        code = result.exit_code if result.exit_code >= 0 else 128 - result.exit_code
        return ExecuteResponse(printed.decode("utf-8", "replace"), code, result.truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files, their directories made; what went wrong is said for each."""
        return [
            FileUploadResponse(path, error=self._tried(path, self.box.files.write, content)[1])
            for path, content in files
        ]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Whole files; what went wrong is said for each."""
        return [FileDownloadResponse(path, *self._tried(path, self.box.files.read)) for path in paths]

    def _tried(self, path: str, act: Any, *args: Any) -> tuple[Any, str | None]:
        if not path.startswith("/"):
            return None, "invalid_path"
        try:
            return act(path, *args), None
        except LayerError as error:
            number = error.details.get("errno")
            return None, ERRORS.get(number, error.message) if isinstance(number, int) else error.message
