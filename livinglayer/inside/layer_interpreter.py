"""The code interpreter of a box: contexts that remember, at port 49999, with results as rich as IPython shows them.

`serve` starts it in the background, and does nothing where one runs. Python runs in IPython kernels, which a small process forks
that has loaded them (layer_kernel.py) once; bash and JavaScript in a shell and a Node of their own. It answers as E2B's does: POST /execute
(JSON lines), /contexts. Whoever hangs up on an execution interrupts it. Python needs ipykernel; all else the standard library.
"""

from __future__ import annotations

import codecs
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict, Generator, Iterator

PORT = 49999
BODY = 64 << 20  # bytes of a request
HOME = os.path.expanduser("~")
KINDS = {  # of a result, by their types of content
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg", "image/png": "png",
    "image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex", "application/json": "json",
    "application/javascript": "javascript", "e2b/data": "data", "e2b/chart": "chart",
}  # fmt: skip
LANGUAGES = {"": "python", "py": "python", "js": "javascript", "sh": "bash"}  # other names of them
KERNEL = 300.0  # seconds in which a kernel must have started; in a machine that is emulated it takes a minute
STUBBORN = 5.0  # seconds a shell or a Node has to end what was interrupted
BASH = """\
__in=$1 __out=$2; set --; trap : INT
while IFS= read -r -d '' -u "$__in" __code; do eval "$__code" </dev/null; printf '{"code": %d}\\0' $? >&"$__out"; done"""
Event = Dict[str, Any]


class Refused(Exception):
    """What a request asks for can't be: a status and a text."""


class Nursery:
    """A process that has loaded what kernels need, and forks them."""

    def __init__(self, server: socket.socket) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        if os.fork() == 0:
            self._ours.close()
            server.close()
            try:
                self._work(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def fork(self, file: str, cwd: str) -> int:
        """A new kernel; its process."""
        with self._lock:
            try:
                self._ours.send(json.dumps([file, cwd]).encode())
                answer = self._ours.recv(65536)
            except OSError:
                answer = b""
        if not answer:
            os._exit(1)  # somebody has killed it: the next request starts all of this again
        said = json.loads(answer)
        if isinstance(said, str):
            raise Refused(500, said)
        return int(said)

    @staticmethod
    def _work(theirs: socket.socket) -> None:
        problem = None
        try:
            import layer_kernel
        except Exception as error:
            problem = f"Python needs ipykernel in this box: {error}; apt-get install python3-ipykernel, or pip install ipykernel"
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a kernel ended
        while request := theirs.recv(65536):
            file, cwd = json.loads(request)
            pid = 0 if problem is None else -1
            if problem is None:
                pid = os.fork()
            if pid == 0:
                try:
                    theirs.close()
                    os.setsid()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    if layer_kernel.is_outdated():  # what was loaded is not what this box has by now
                        os.execv(
                            sys.executable or "/usr/bin/python3",
                            ["python3", "-c", "import sys, layer_kernel; layer_kernel.run(*sys.argv[1:])", file, cwd],
                        )
                    layer_kernel.run(file, cwd)
                except BaseException:
                    with open(file + ".log", "w") as log:
                        traceback.print_exc(file=log)
                finally:
                    os._exit(1)
            theirs.send(json.dumps(problem or pid).encode())


# ---- contexts ----


class Context:
    """A place where code runs, one piece at a time, and what it defines stays."""

    def __init__(self, language: str, cwd: str) -> None:
        self.id, self.language, self.cwd = os.urandom(16).hex(), language, cwd
        self.lock = threading.Lock()
        self.closed = False

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def interrupt(self) -> None:
        raise NotImplementedError

    def run(self, code: str, variables: dict[str, str], client: socket.socket) -> Iterator[Event]:
        raise NotImplementedError

    def execute(self, code: str, variables: dict[str, str], client: socket.socket) -> Iterator[Event]:
        """What becomes of some code."""
        with self.lock:
            if self.closed:
                raise Refused(404, f"Context {self.id} not found")
            yield from self.run(code, variables, client)

    def restart(self) -> None:
        """Forget everything, also what runs now."""
        self.stop()  # what runs now ends, and may have started the next
        with self.lock:
            self.stop()
            self.start()

    def close(self) -> None:
        self.closed = True
        self.stop()

    @property
    def described(self) -> dict[str, str]:
        return {"id": self.id, "language": self.language, "cwd": self.cwd}


def has_hung_up(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def lost(language: str) -> Iterator[Event]:
    """What is said when the program that ran the code has died."""
    value = f"the {language} process has ended; what it had defined is gone, and a new one has been started"
    yield {"type": "error", "name": "UnexpectedEndOfExecution", "value": value, "traceback": value}
    yield {"type": "unexpected_end_of_execution"}


class Notebook(Context):
    """Python, in an IPython kernel."""

    def __init__(self, cwd: str, nursery: Nursery, place: str) -> None:
        super().__init__("python", cwd)
        self._nursery, self._place, self._pid, self._starts = nursery, place, 0, 0
        self._parts: list[Any] = []
        self.start()

    def start(self) -> None:
        self._starts += 1
        base = os.path.join(self._place, f"{self.id[:8]}-{self._starts}")
        key = os.urandom(16).hex()
        ports = {name + "_port": number for number, name in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1)}
        described = {"transport": "ipc", "ip": base, "key": key, "signature_scheme": "hmac-sha256"}
        with open(base + ".json", "w") as file:
            json.dump(dict(described, **ports), file)
        self._pid = self._nursery.fork(base + ".json", self.cwd)
        import zmq
        from jupyter_client.session import Session

        self._session = Session(key=key.encode())
        for part in self._parts:
            part.close()
        context = zmq.Context.instance()
        self._shell, self._news = self._parts = [context.socket(zmq.DEALER), context.socket(zmq.SUB)]
        self._news.subscribe(b"")
        for number, part in enumerate(self._parts, 1):
            part.linger, part.reconnect_ivl = 0, 5
            part.connect(f"ipc://{base}-{number}")
        self._greet(base)

    def _greet(self, base: str) -> None:
        """Wait until it answers and we hear what it says to all."""
        until, patience, asked = time.monotonic() + KERNEL, 0.05, set()
        while time.monotonic() < until:
            asked.add(self._session.send(self._shell, "kernel_info_request")["header"]["msg_id"])
            pause, patience = time.monotonic() + patience, min(2.0, patience * 1.5)
            while (left := pause - time.monotonic()) > 0:
                if self._news.poll(left * 1000):
                    said = self._receive(self._news)
                    if said is not None and said["parent_header"].get("msg_id") in asked:
                        return
            if not self._lives():
                break
        try:
            with open(base + ".json.log") as file:
                why = file.read()
        except OSError:
            why = ""
        self.stop()
        raise Refused(500, f"the kernel did not start\n{why}".strip())

    def _receive(self, part: Any) -> Any:
        try:
            return self._session.recv(part)[1]
        except ValueError:  # not signed, or no message
            return None

    def _lives(self) -> bool:
        try:
            os.kill(self._pid, 0)
        except OSError:
            return False
        return True

    def stop(self) -> None:
        if self._pid and self._lives():
            os.killpg(self._pid, signal.SIGKILL)

    def interrupt(self) -> None:
        if self._lives():
            os.kill(self._pid, signal.SIGINT)

    def run(self, code: str, variables: dict[str, str], client: socket.socket) -> Iterator[Event]:
        import zmq

        while self._shell.poll(0):  # answers to what was asked before
            self._receive(self._shell)
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        content.update(stop_on_error=False, env=variables)
        asked = self._session.send(self._shell, "execute_request", content)["header"]["msg_id"]
        poller = zmq.Poller()
        poller.register(self._news, zmq.POLLIN)
        poller.register(client, zmq.POLLIN)
        listening = here = True
        runs = False
        while True:
            ready = dict(poller.poll(200))
            if client.fileno() in ready and listening:
                listening = False
                poller.unregister(client)
                here = not has_hung_up(client)
                if not here and runs:
                    self.interrupt()
            if self._news not in ready:
                if not ready and not self._lives() and not self._news.poll(0):
                    yield from lost("python")
                    if not self.closed:
                        self.start()
                    return
                continue
            said = self._receive(self._news)
            if said is None or said["parent_header"].get("msg_id") != asked:
                continue
            if said["msg_type"] == "status" and said["content"]["execution_state"] == "idle":
                return
            if said["msg_type"] == "execute_input":
                runs = True
                if not here:  # hung up before it began: only now does it hear
                    self.interrupt()
            event = told(said)
            if event is not None:
                yield event


def told(said: Any) -> Event | None:
    """A message of a kernel as an event."""
    kind, content = said["msg_type"], said["content"]
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    if kind == "stream":
        return {
            "type": content["name"],
            "text": content["text"],
            "timestamp": str(said["header"]["date"]).replace(" ", "T"),
        }
    if kind == "error":
        trace = "\n".join(content["traceback"])
        return {"type": "error", "name": content["ename"], "value": content["evalue"], "traceback": trace}
    if kind in ("display_data", "execute_result"):
        data = dict(content["data"])
        event: Event = {name: data.pop(type) for type, name in KINDS.items() if type in data}
        text = event.get("text") or ""
        if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            event["text"] = text[1:-1]
        return dict(event, type="result", extra=data, is_main_result=kind == "execute_result")
    return None


class Program(Context):
    """Another language, in a program that reads pieces of code from one pipe and says on another how each ended."""

    def __init__(self, language: str, cwd: str) -> None:
        super().__init__(language, cwd)
        program = shutil.which("node" if language == "javascript" else language)
        if program is None:
            raise Refused(400, f"this box has no {language}")
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "interpreter.js")
        self._command = [program, script] if language == "javascript" else [program, "-c", BASH, "bash"]
        self._process: subprocess.Popen[bytes] | None = None  # until it is needed
        self._count = 0

    def start(self) -> None:
        theirs, self._code = os.pipe()
        self._said, said = os.pipe()
        self._process = subprocess.Popen(
            [*self._command, str(theirs), str(said)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=self.cwd, pass_fds=(theirs, said), start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.close(said)
        self._count = 0

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def interrupt(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)

    def restart(self) -> None:
        self.stop()
        with self.lock:
            self._drop()

    def close(self) -> None:
        super().close()
        with self.lock:
            self._drop()

    def _drop(self) -> None:
        """It has ended: nothing of it stays, and the next code starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            os.close(self._code)
            os.close(self._said)
            process.stdout.close()  # type: ignore[union-attr]
            process.stderr.close()  # type: ignore[union-attr]

    def _pieces(self, code: str, variables: dict[str, str]) -> tuple[list[str], str, list[str]]:
        """What is to run before, the code, and what is to run after it."""
        if self.language == "javascript":
            return [], json.dumps({"code": code, "env": variables}), []
        names = {name: shlex.quote(name) for name in variables}
        before = [f"export {names[name]}={shlex.quote(value)}" for name, value in variables.items()]
        after = [
            f"export {names[name]}={shlex.quote(os.environ[name])}" if name in os.environ else f"unset {names[name]}"
            for name in variables
        ]
        return before, code, after

    def run(self, code: str, variables: dict[str, str], client: socket.socket) -> Iterator[Event]:
        if self._process is None:
            self.start()
        count = self._count = self._count + 1
        yield {"type": "number_of_executions", "execution_count": count}
        before, code, after = self._pieces(code, variables)
        try:
            for piece in before:
                yield from self._one(piece, client)
            ended = yield from self._one(code, client)
            for piece in after:
                yield from self._one(piece, client)
        except (OSError, EOFError):
            yield from lost(self.language)
            self._drop()
            return
        if "result" in ended:
            yield {
                "type": "result",
                "text": ended["result"],
                "extra": {},
                "is_main_result": True,
                **ended.get("more", {}),
            }
        if "error" in ended:
            yield dict(ended["error"], type="error")
        elif ended.get("code"):
            value = str(ended["code"])
            yield {"type": "error", "name": "ExitCode", "value": value, "traceback": f"exit code {value}"}

    def _one(self, piece: str, client: socket.socket) -> Generator[Event, None, dict[str, Any]]:
        """Run a piece: what it prints, and at last how it ended."""
        data = memoryview(piece.replace("\0", "").encode("utf-8", "surrogateescape") + b"\0")
        names = {self._process.stdout.fileno(): "stdout", self._process.stderr.fileno(): "stderr"}  # type: ignore[union-attr]
        decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in names}
        os.set_blocking(self._code, False)
        poll, answer = select.poll(), b""
        for fd in (*names, self._said, client.fileno()):
            poll.register(fd, select.POLLIN)
        poll.register(self._code, select.POLLOUT)
        while True:
            ready = dict(poll.poll(0 if answer.endswith(b"\0") else None))
            if self._code in ready:
                data = data[os.write(self._code, data[:65536]) :]
                if not data:
                    poll.unregister(self._code)
            if client.fileno() in ready:
                poll.unregister(client.fileno())
                if has_hung_up(client):
                    self._hung_up()
            printed = False
            for fd, name in names.items():
                if ready.get(fd, 0) & select.POLLIN:
                    printed = True
                    text = decoders[fd].decode(os.read(fd, 65536))
                    yield {"type": name, "text": text, "timestamp": _now()}
            if self._said in ready:
                said = os.read(self._said, 65536)
                if not said:
                    raise EOFError
                answer += said
            elif answer.endswith(b"\0") and not printed:  # and all that it printed is told
                return json.loads(answer[:-1])

    def _hung_up(self) -> None:
        process, count = self._process, self._count

        def insist() -> None:
            if process is self._process and count == self._count and self.lock.locked():
                self.stop()

        self.interrupt()
        threading.Timer(STUBBORN, insist).start()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())


class Contexts:
    """All contexts; each language has one that is used where none is named."""

    def __init__(self, server: socket.socket) -> None:
        self._place = tempfile.mkdtemp(prefix=".interpreter-")
        os.environ.setdefault("IPYTHONDIR", os.path.join(self._place, "ipython"))
        os.environ.setdefault("PIP_BREAK_SYSTEM_PACKAGES", "1")  # a box is nobody's system
        self._nursery = Nursery(server)
        self._all: dict[str, Context] = {}
        self._usual: dict[str, Context] = {}
        self._lock = threading.Lock()
        self._locks = {language: threading.Lock() for language in ("python", "javascript", "bash")}

    def create(self, language: object, cwd: object) -> Context:
        """A new one."""
        language = self._known(language)
        cwd = HOME if not cwd else os.path.join(HOME, os.path.expanduser(cwd)) if isinstance(cwd, str) else ""
        if not os.path.isdir(cwd) or not os.access(cwd, os.X_OK):
            raise Refused(400, f"{cwd!r} is not a directory that the box's user can go to")
        made = Notebook(cwd, self._nursery, self._place) if language == "python" else Program(language, cwd)
        with self._lock:
            self._all[made.id] = made
        return made

    def usual(self, language: object) -> Context:
        """That of a language, which is made at first use."""
        language = self._known(language)
        with self._locks[language]:
            found = self._usual.get(language)
            if found is None or found.closed:
                found = self._usual[language] = self.create(language, None)
            return found

    def get(self, id: object) -> Context:
        with self._lock:
            found = self._all.get(str(id))
        if found is None:
            raise Refused(404, f"Context {id} not found")
        return found

    def list(self) -> list[dict[str, str]]:
        usual = [
            self.usual(language)
            for language in ("python", "javascript")
            if language == "python" or shutil.which("node")
        ]
        with self._lock:
            others = [context for context in self._all.values() if context not in usual]
        return [context.described for context in (*usual, *others)]

    def remove(self, id: str) -> None:
        found = self.get(id)
        with self._lock:
            del self._all[found.id]
        found.close()

    def _known(self, language: object) -> str:
        name = str(language or "").strip().lower()
        name = LANGUAGES.get(name, name)
        if name not in self._locks:
            raise Refused(400, f"language {language!r} is not here; python, javascript and bash are")
        return name


# ---- HTTP ----


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    contexts: Contexts

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    do_POST = do_DELETE = do_GET

    def _handle(self) -> None:
        try:
            self._route(self.command, self.path.split("?")[0].strip("/").split("/"))
        except Refused as error:
            self._answer(error.args[0], error.args[1].encode(), "text/plain; charset=utf-8")
        except (ConnectionError, TimeoutError):  # the client is gone
            self.close_connection = True
        except Exception:
            self.close_connection = True
            self._answer(500, traceback.format_exc().encode(), "text/plain; charset=utf-8")

    def _route(self, method: str, path: list[str]) -> None:
        length = self.headers.get("Content-Length") or "0"
        if not length.isdigit() or int(length) > BODY or self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            raise Refused(413, f"a request has a length, of {BODY} bytes at most")
        body, contexts = self.rfile.read(int(length)), self.contexts
        if (method, path) == ("GET", ["health"]):
            return self._json("OK")
        if (method, path) == ("POST", ["execute"]):
            return self._execute(_mapping(body))
        if (method, path) == ("GET", ["contexts"]):
            return self._json(contexts.list())
        if (method, path) == ("POST", ["contexts"]):
            given = _mapping(body)
            return self._json(contexts.create(given.get("language"), given.get("cwd")).described)
        if method == "POST" and len(path) == 3 and path[0] == "contexts" and path[2] == "restart":
            contexts.get(path[1]).restart()
            return self._json(None)
        if method == "DELETE" and len(path) == 2 and path[0] == "contexts":
            contexts.remove(path[1])
            return self._json(None)
        raise Refused(404, f"there is no {method} {self.path[:200]!r} here")

    def _execute(self, given: dict[str, Any]) -> None:
        code, variables = given.get("code"), given.get("env_vars") or {}
        if not isinstance(code, str):
            raise Refused(400, "code is a text")
        texts = isinstance(variables, dict) and all(isinstance(value, str) for value in variables.values())
        if not texts or any(not name or "=" in name or "\0" in name + value for name, value in variables.items()):
            raise Refused(400, "env_vars are texts by name")
        if given.get("context_id") and given.get("language"):
            raise Refused(400, "Only one of context_id or language can be provided")
        named = given.get("context_id")
        context = self.contexts.get(named) if named else self.contexts.usual(given.get("language"))
        events = context.execute(code, variables, self.connection)
        first = next(events, None)  # a context that is gone is said before anything else
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        here, last = True, first or {}
        try:
            while first is not None:
                here, last = here and self._line(first), first
                first = next(events, None)  # also when nobody listens: the code has to come to its end
        except Exception as error:
            last = {"type": "unexpected_end_of_execution"}
            here = (
                here
                and self._line(
                    {
                        "type": "error",
                        "name": type(error).__name__,
                        "value": str(error),
                        "traceback": traceback.format_exc(),
                    }
                )
                and self._line(last)
            )
        if last.get("type") != "unexpected_end_of_execution":
            here = here and self._line({"type": "end_of_execution"})
        if here:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = self.close_connection or not here

    def _line(self, event: Event) -> bool:
        data = json.dumps(event).encode() + b"\n"
        try:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        except OSError:
            return False
        return True

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), "application/json")

    def _answer(self, status: int, body: bytes, type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _mapping(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body or b"{}")
        json.dumps(given, ensure_ascii=False).encode()  # halves of characters are no text
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise Refused(400, "the body is a JSON object")
    return given


class Server(ThreadingHTTPServer):
    """The port."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def serve() -> None:
    """Start it in the background; nothing where one runs."""
    try:
        server = Server(("127.0.0.1", PORT), Handler)
    except OSError:
        return
    if os.fork():
        return os._exit(0) if __name__ == "__main__" else None
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is ignored here, a shell of ours could not hear
    Handler.contexts = Contexts(server.socket)
    threading.Thread(target=Handler.contexts.usual, args=["python"], daemon=True).start()
    server.serve_forever()
    os._exit(0)


if __name__ == "__main__":
    serve()
