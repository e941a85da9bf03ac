"""The built-in agent: `python3 -m layer_agent` asks the contract's model, makes the calls it wants, and returns its answer.

Standard library only, any Python from 3.8 on. What it is to do and which tools it has the layer says (GET /agent); tools of
the layer are done there, those of the box here. It prints all it does. Every end has an exit code of its own:

    0 done                      8 the model server can't be reached, or fails     12 its answers are no answers
    1 a fault of this program   9 the model server says nothing                   13 calls that can't be made, one after another
    2 /agent makes no sense    10 the model server refuses the request            14 no answer, or none that fits max_tokens
    3 not allowed              11 the model server limits the rate                15 the model refuses
    6 too many turns                                                              16 the layer is gone
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from typing import Any, Callable

import layer
import layer_models
from layer_models import Answer, Call, Model, Trouble

INVALID, LIMIT, MALFORMED, SILENT, REFUSED, GONE = 2, 6, 13, 14, 15, 16
NAMES = {1: "failed", 2: "invalid", 3: "denied", 6: "limit_exceeded", 8: "unavailable", 9: "timed_out", 10: "rejected"}
NAMES.update({11: "rate_limited", 12: "broken", 13: "malformed", 14: "silent", 15: "refused", 16: "gone"})

TURNS = 200  # answers of the model
IN_A_ROW = 5  # answers of which no call can be made
SILENCES = 3  # answers in a row that say nothing, or do not come to their end
RESULT = 64 << 10  # characters of a result that the model is given
SHOWN = 200  # characters of arguments and of a result that are printed
SECONDS = 120.0  # of a command, unless the model says otherwise

RULES = """\
You work inside a box, on a task, with the tools you are given. What you may see and do is decided by a contract, outside.
What is refused comes back as the result of the call, with the reason: a refusal stays one, so do not repeat the call; find
another way within what you may do, or say in your answer what was refused. A call may wait for a person's yes."""
FINISH = "When the task is done, or can't be done, call `finish` with your answer."


def main() -> int:
    """Work on the task of this box until the model is done; the exit code says how it ended."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    layer.timeout = None  # a call that waits for a person's yes waits as long as the person takes
    code = 0
    try:
        told = {"value": Agent(layer._exchange("GET", "/agent", b"", safe=True)).run()}
    except Trouble as trouble:
        code, told = trouble.code, ended(trouble.code, str(trouble))
    except layer.LayerError as error:
        code = GONE if isinstance(error, (layer.Unavailable, layer.TimedOut, layer.Unauthenticated)) else INVALID
        told = ended(code, f"the layer does not say what there is to do: {error}")
    except Exception as error:
        code, told = 1, ended(1, f"the agent's loop failed: {error!r}")
    try:
        layer._ask("/return", told)
    except layer.LayerError as error:
        gone = isinstance(error, (layer.Unavailable, layer.TimedOut, layer.Unauthenticated, layer.Denied))
        code = GONE if gone else code or LIMIT
        told = ended(code, f"the layer does not take the answer: {error}")
        if not gone:
            give_up(told)
    if code:
        say(f"\n[{told['error']['message']}]\n")
    return code


def give_up(told: dict[str, Any]) -> None:
    try:
        layer._ask("/return", told)
    except layer.LayerError:
        pass  # its exit code says it too


def ended(code: int, sentence: str) -> dict[str, Any]:
    """What the layer is told of an end that is none."""
    return {"error": {"type": "Agent", "code": NAMES[code], "message": sentence[:2000], "exit_code": code}}


class Agent:
    """A task, the model that works on it, and its tools."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.malformed = self.silent = self.lost = 0
        self.broken = False  # whether a line is unfinished
        try:
            model, tools = dict(given["model"]), [dict(tool) for tool in given["tools"]]
            self.where = {str(tool["name"]): str(tool["where"]) for tool in tools}
            self.schemas = {str(tool["name"]): dict(tool["input_schema"]) for tool in tools}
            kind = layer_models.MODELS[model["api"]]
            left = [row["left"] for row in given.get("budget") or () if row["resource"] == "steps"]
            self.turns = int(min([TURNS] + [each for each in left if each is not None]))
            parts = [str(given.get("instructions") or ""), RULES, FINISH if "finish" in self.where else ""]
            self.model: Model = kind(model, "\n\n".join(part for part in parts if part), tools, self.say)
            self.waiting: list[Call] = []
            self.redo = [Call(each["id"], each["name"], each["arguments"]) for each in given.get("redo") or ()]
            if given.get("messages"):
                self.waiting = self.model.resume(list(given["messages"]))
                if not self.waiting and self.model.messages[-1]["role"] == "assistant":
                    self.model.tell("Go on.")
            else:
                self.model.tell(str(given["task"]))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Trouble(INVALID, f"what the layer says of this agent makes no sense: {error!r}") from None
        if not self.model.key and model.get("secret"):
            raise Trouble(INVALID, f"the model's secret {model['secret']!r} is not in the environment")

    def run(self) -> Any:
        """The final answer."""
        for call in self.redo:  # of the course before, in a box that has not seen it
            self.say("↻ {} {}\n".format(call.name, short(layer._encode(call.arguments, "the arguments").decode())))
            self.act(call)
        if self.waiting:
            done, answer = self.make(self.waiting, 0)
            if done:
                return answer
        for _ in range(self.turns):
            said = self.model.ask()
            self.line()
            if said.stop == "refusal":
                raise Trouble(REFUSED, "the model refuses: {}".format(short(said.text) or "no reason given"))
            if said.calls:
                self.silent = 0
                done, answer = self.make(said.calls, said.dropped)
                if done:
                    return answer
            elif said.stop == "end" and said.text.strip():
                return said.text.strip()
            else:
                self.nudge(said)
        raise Trouble(LIMIT, f"the model was not done after {self.turns} answers")

    def nudge(self, said: Answer) -> None:
        """Ask for more after an answer that is none, a few times."""
        self.silent += 1
        if self.silent == SILENCES:
            what = "said nothing" if said.stop == "end" else "was cut at max_tokens"
            raise Trouble(SILENT, f"the model {what} {SILENCES} times in a row")
        cut = "Your answer was cut at max_tokens. Go on from there, and say less at a time."
        self.model.tell(
            cut if said.stop == "length" else "That was empty. Go on with the task, or finish with your answer."
        )

    def make(self, calls: list[Call], dropped: int) -> tuple[bool, Any]:
        """Make the calls, in their order, and give the results; whether one of them was to finish, and its answer."""
        results, finish, sound = [], None, 0
        for call in calls:
            if call.name == "finish" and not call.problem and finish is None:
                finish = call
                continue
            self.say("→ {} {}\n".format(call.name, short(layer._encode(call.arguments, "the arguments").decode())))
            text, is_error = self.act(call)
            sound += not call.problem
            self.say("{} {}\n".format("✗" if is_error else "←", short(text)))
            results.append((call, text, is_error))
        if finish is not None:
            answer = finish.arguments.get("answer", finish.arguments or None)
            self.say(f"→ finish {short(answer if isinstance(answer, str) else repr(answer))}\n")
            return True, answer
        if dropped:
            call, text, is_error = results[-1]
            note = f"\n({dropped} more calls of this answer were not made: at most {len(calls)} at a time)"
            results[-1] = (call, text + note, is_error)
        self.model.give(results)
        self.malformed = 0 if sound else self.malformed + 1
        if self.malformed == IN_A_ROW:
            last = results[-1][1]
            raise Trouble(MALFORMED, f"{IN_A_ROW} answers in a row had no call that can be made: {short(last)}")
        return False, None

    def act(self, call: Call) -> tuple[str, bool]:
        """The result of one call, and whether it is an error."""
        if self.where.get(call.name) != "box":
            text, is_error = self.there(call)  # also what can't be done, so that it is refused on record
            return (call.problem, True) if call.problem else (text, is_error)
        began = time.monotonic()
        text, is_error = (call.problem, True) if call.problem else self.here(call)
        arguments = call.given if call.problem else call.arguments
        told = {"id": call.id, "name": call.name, "arguments": arguments, "result": cut(text), "is_error": is_error}
        self.tell({**told, "ms": round((time.monotonic() - began) * 1000, 3)})
        return cut(text), is_error

    def there(self, call: Call) -> tuple[str, bool]:
        """A tool of the layer."""
        arguments = call.given if call.problem else call.arguments
        try:
            found = layer._ask("/tool", {"id": call.id, "name": call.name, "arguments": arguments})
            self.lost = 0
            return cut(str(found["content"])), bool(found["is_error"])
        except (layer.Unauthenticated, layer.Denied) as error:
            raise Trouble(GONE, f"the layer has ended this agent: {error}") from None
        except (layer.Unavailable, layer.TimedOut) as error:
            self.lost += 1
            if self.lost == IN_A_ROW:
                raise Trouble(GONE, f"the layer can't be reached: {error}") from None
            time.sleep(0.1 * 2**self.lost)
            return f"the layer did not answer, so whether this was done is not known: {error}", True
        except (layer.LayerError, KeyError) as error:
            return cut(str(error)), True

    def here(self, call: Call) -> tuple[str, bool]:
        """A tool of the box, done by this process."""
        problem = misfit(call.arguments, self.schemas[call.name])
        if problem:
            return problem, True
        if call.name not in TOOLS:
            return f"this program does not know the tool {call.name!r}", True
        try:
            return TOOLS[call.name](**call.arguments)
        except (OSError, ValueError, TypeError, MemoryError, OverflowError) as error:
            return f"{type(error).__name__}: {error}", True

    def tell(self, tool: dict[str, Any]) -> None:
        """Let the layer record what was done here. What it can't take is no reason to stop."""
        try:
            layer._ask("/said", {"tool": tool})
        except (layer.Unauthenticated, layer.Denied) as error:
            raise Trouble(GONE, f"the layer has ended this agent: {error}") from None
        except layer.LayerError as error:
            self.say(f"[not recorded: {error}]\n")

    # What people watch

    def say(self, text: str) -> None:
        """Print a piece of text; a line of our own begins a line."""
        if not text:
            return
        if self.broken and text[0] in "→←✗[":
            text = "\n" + text
        self.broken = not text.endswith("\n")
        say(text)

    def line(self) -> None:
        if self.broken:
            self.say("\n")


def say(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError):
        pass  # nobody listens


# -- tools of the box -------------------------------------------------------------------------------------------------


def shell(command: str, timeout: float = SECONDS, **_: Any) -> tuple[str, bool]:
    """Run a command of sh, with what it prints on both outputs; when the time is up it is killed, with what it started."""
    timeout = min(max(timeout, 0), 86400)
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    printed = Printed(process.stdout)
    late = False
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    printed.join(0.5)  # what it left running in the background may hold the pipe, and goes on to be heard
    text = printed.text()
    if late:
        return f"{text}\n[killed after {timeout:g} s]".lstrip("\n"), True
    code = process.returncode
    return f"{text}\n[exit code {code}]".lstrip("\n") if code else text, False


class Printed(threading.Thread):
    """The beginning and the end of what is printed into a pipe."""

    def __init__(self, pipe: Any) -> None:
        super().__init__(daemon=True)
        self.pipe, self.size, self.head, self.tail = pipe, 0, b"", b""
        self.start()

    def run(self) -> None:
        for piece in iter(lambda: self.pipe.read1(65536), b""):
            room = max(0, RESULT // 2 - len(self.head))
            self.size += len(piece)
            self.head, self.tail = self.head + piece[:room], (self.tail + piece[room:])[-RESULT // 2 :]

    def text(self) -> str:
        lost = self.size - len(self.head) - len(self.tail)
        note = b"\n[... %d bytes left out ...]\n" % lost if lost > 0 else b""
        return (self.head + note + self.tail).decode("utf-8", "replace")


def read_file(path: str, offset: int = 0, limit: int = 0, **_: Any) -> tuple[str, bool]:
    """A file as text, or `limit` lines of it after the first `offset`."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        return f"{path!r} is not a file", True
    lines: list[str] = []
    size = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(iter(lambda: file.readline(RESULT), "")):  # a line may be as long as the disk
            if number < offset:
                continue
            if size + len(line) > RESULT:
                return "".join(lines) + line[: RESULT - size] + f"\n[cut in line {number}: read on with offset]", False
            lines.append(line)
            size += len(line)
            if len(lines) == limit:
                break
    return "".join(lines), False


def write_file(path: str, content: str, **_: Any) -> tuple[str, bool]:
    """Write a text into a file, whose directory is made if need be."""
    directory = os.path.dirname(path)
    if directory:
        os.makedirs(directory, exist_ok=True)
    data = content.encode("utf-8")
    with open(path, "wb") as file:
        file.write(data)
    return f"wrote {len(data)} bytes to {path}", False


TOOLS: dict[str, Callable[..., tuple[str, bool]]] = {"shell": shell, "read_file": read_file, "write_file": write_file}
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}


def misfit(arguments: dict[str, Any], schema: dict[str, Any]) -> str:
    """How arguments do not fit the schema of a tool of the box, or nothing."""
    known = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in known:
            return "there is no argument {!r}; there are: {}".format(name, ", ".join(known))
        kinds = TYPES.get(str(known[name].get("type")))
        if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            return "the argument {!r} must be of type {}".format(name, known[name]["type"])
        least, most = known[name].get("minimum"), known[name].get("maximum")
        if (least is not None and value < least) or (most is not None and value > most):
            return f"the argument {name!r} is {value!r}, which is too {'small' if most is None or value < most else 'large'}"
    return ""


def cut(text: str) -> str:
    """What of a text the model is given."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= RESULT + SHOWN:  # the layer cuts there too, and says so
        return text
    return f"{text[:RESULT]}\n[cut: {RESULT} of {len(text)} characters; ask for less]"


def short(text: str) -> str:
    """What of a text is printed, in one line."""
    line = " ".join(text[: 4 * SHOWN].split())
    return line if len(line) <= SHOWN and len(text) <= 4 * SHOWN else line[: SHOWN - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
