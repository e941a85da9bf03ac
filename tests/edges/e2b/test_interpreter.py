"""The code interpreter as the unmodified `e2b-code-interpreter` package asks it."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Sandbox
from e2b_code_interpreter.charts import BarChart, BoxAndWhiskerChart, ChartType, LineChart, PieChart, SuperChart
from edges.serving import Server


@pytest.fixture(scope="module")
def box(server: Server) -> Iterator[Sandbox]:
    box = Sandbox.create(timeout=300, envs={"FOO": "of the box"}, **options(server))
    yield box
    box.kill()


def options(server: Server) -> dict[str, Any]:
    given = server.e2b()
    return {"api_url": given["E2B_API_URL"], "sandbox_url": given["E2B_SANDBOX_URL"], "api_key": given["E2B_API_KEY"]}


def ask(server: Server, box: Sandbox, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49999", **more.pop("headers", {})}
    return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=60, **more)


def test_what_is_defined_stays_and_the_last_expression_is_the_main_result(box: Sandbox) -> None:
    first = box.run_code("x = 1\nx += 1")
    assert (first.results, first.error) == ([], None)
    second = box.run_code("print('out'); import sys; print('err', file=sys.stderr); display('shown'); x")
    assert second.logs.stdout == ["out\n"]
    assert second.logs.stderr == ["err\n"]
    assert [(result.text, result.is_main_result) for result in second.results] == [("shown", False), ("2", True)]
    assert second.text == "2"
    assert (first.execution_count or 0) + 1 == second.execution_count


def test_errors_carry_name_value_and_traceback(box: Sandbox) -> None:
    failed = box.run_code("def f():\n    return 1 / 0\nf()")
    assert failed.error is not None
    assert (failed.error.name, failed.error.value) == ("ZeroDivisionError", "division by zero")
    assert "return 1 / 0" in failed.error.traceback
    broken = box.run_code("1 +")
    assert broken.error is not None and broken.error.name == "SyntaxError"
    assert box.run_code("1 + 1").text == "2"  # and goes on
    asked = box.run_code("input()")
    assert asked.error is not None and asked.error.name == "StdinNotImplementedError"


def test_output_streams_with_times_and_from_subprocesses(box: Sandbox) -> None:
    seen: list[Any] = []
    box.run_code(
        "import os, time\nprint('a', flush=True)\nos.system('echo from a child')\ntime.sleep(0.3)\nprint('b')",
        on_stdout=seen.append,
    )
    assert "".join(message.line for message in seen) == "a\nfrom a child\nb\n"
    assert len(seen) > 1 and all(message.timestamp for message in seen)


@pytest.mark.parametrize(
    ("code", "format", "value"),
    [
        ("from IPython.display import HTML; HTML('<b>x</b>')", "html", "<b>x</b>"),
        ("from IPython.display import Markdown; Markdown('*x*')", "markdown", "*x*"),
        ("from IPython.display import SVG; SVG('<svg></svg>')", "svg", "<svg/>"),
        ("from IPython.display import Latex; Latex('$x$')", "latex", "$x$"),
        ("from IPython.display import JSON; JSON({'a': 1})", "json", {"a": 1}),
        ("from IPython.display import Javascript; Javascript('f()')", "javascript", "f()"),
        ("{'a': [1, 2]}", "json", {"a": [1, 2]}),
        ("class P:\n  def _repr_pdf_(self): return b'%PDF'\nP()", "pdf", base64.b64encode(b"%PDF").decode() + "\n"),
        ("class J:\n  def _repr_jpeg_(self): return b'jpg'\nJ()", "jpeg", base64.b64encode(b"jpg").decode() + "\n"),
        ("class M:\n  def _repr_mimebundle_(self, **k): return {'x/y': 5}\nM()", "extra", {"x/y": 5}),
    ],
)
def test_results_are_as_rich_as_ipython_shows_them(box: Sandbox, code: str, format: str, value: object) -> None:
    execution = box.run_code(code)
    assert execution.error is None, execution.error
    assert execution.results[-1][format] == value


def test_frames_come_as_tables_and_data(box: Sandbox) -> None:
    code = "import pandas as pd\npd.DataFrame({'a': [1, 2], 'b': [float('nan'), 1.5], 't': pd.to_datetime(['2024-01-02', None])})"
    [result] = box.run_code(code).results
    assert result.data == {"a": [1, 2], "b": [None, 1.5], "t": ["2024-01-02T00:00:00", None]}
    assert "<table" in (result.html or "") and result.formats() == ["text", "html", "data"]


def test_images_are_shown(box: Sandbox) -> None:
    made = "from PIL import Image; image = Image.new('RGB', (2, 2))\n"
    for code in ("image", "image.show()", "image.save('x.png')"):
        [result] = box.run_code(made + code).results
        assert base64.b64decode(result.png or "").startswith(b"\x89PNG"), code


PLOT = "import matplotlib.pyplot as plt\n"


def chart(box: Sandbox, code: str) -> Any:
    execution = box.run_code(f"{PLOT}{code}\nplt.show()")
    assert execution.error is None, execution.error
    [result] = execution.results
    assert base64.b64decode(result.png or "").startswith(b"\x89PNG")
    assert (result.text or "").startswith("<Figure size") and not result.is_main_result
    return result.chart


def test_charts_are_told_as_data(box: Sandbox) -> None:
    line = chart(box, "plt.plot([1, 2, 3], [4, 5, 6], label='l'); plt.title('T'); plt.xlabel('Time (s)')")
    assert isinstance(line, LineChart)
    assert (line.title, line.x_label, line.x_unit, line.y_label) == ("T", "Time (s)", "s", None)
    assert [(part.label, part.points) for part in line.elements] == [("l", [(1, 4), (2, 5), (3, 6)])]
    assert (line.x_scale, line.y_scale) == ("linear", "linear") and len(line.x_ticks) == len(line.x_tick_labels)
    bar = chart(box, "plt.bar(['a', 'b'], [5, 5], label='g')")
    assert isinstance(bar, BarChart)
    assert [(part.label, part.group, part.value) for part in bar.elements] == [("a", "g", 5), ("b", "g", 5)]
    pie = chart(box, "plt.pie([90, 10], labels=['x', 'y'])")
    assert isinstance(pie, PieChart)
    assert [(part.label, part.angle, part.radius) for part in pie.elements] == [("x", 324, 1), ("y", 36, 1)]
    boxes = chart(box, "plt.boxplot([[85, 90, 78, 92, 88], [95, 89, 76, 91, 84, 87]])")
    assert isinstance(boxes, BoxAndWhiskerChart)
    told = [(p.label, p.min, p.first_quartile, p.median, p.third_quartile, p.max, p.outliers) for p in boxes.elements]
    assert told == [("1", 78, 85, 88, 90, 92, []), ("2", 84, 84.75, 88, 90.5, 95, [76])]
    both = chart(
        box, "f, a = plt.subplots(1, 2); f.suptitle('S'); a[0].scatter([1, 2], [3, 4]); a[1].semilogy([1, 10])"
    )
    assert isinstance(both, SuperChart) and both.title == "S"
    assert [part.type for part in both.elements] == [ChartType.SCATTER, ChartType.LINE]
    assert both.elements[1].y_scale == "log"
    dates = chart(box, "import datetime as d; plt.plot([d.date(2023, 9, 1), d.date(2023, 9, 2)], ['A', 'B'])")
    assert (dates.x_scale, dates.y_scale) == ("datetime", "categorical")
    assert dates.elements[0].points == [("2023-09-01", "A"), ("2023-09-02", "B")]
    assert chart(box, "plt.gca().add_artist(plt.Circle((0, 0), 1)); plt.title('?')").type == ChartType.UNKNOWN
    assert box.run_code(f"{PLOT}plt.figure(); plt.show()").results[0].chart is None


def test_variables_of_the_box_and_of_one_execution(box: Sandbox) -> None:
    code = "import os; (os.environ['FOO'], os.environ.get('BAR'))"
    assert box.run_code(code).text == "('of the box', None)"
    assert box.run_code(code, envs={"FOO": "it's", "BAR": "b"}).text == "(\"it's\", 'b')"
    assert box.run_code(code).text == "('of the box', None)"
    for language, echo in (("bash", 'echo "$FOO,$BAR"'), ("javascript", "console.log(`${process.env.FOO},${process.env.BAR ?? ''}`)")):  # fmt: skip
        for envs, said in ((None, "of the box,\n"), ({"FOO": "it's", "BAR": "b"}, "it's,b\n"), (None, "of the box,\n")):
            assert box.run_code(echo, language=language, envs=envs).logs.stdout == [said]


def test_contexts_are_apart_restart_and_end(box: Sandbox) -> None:
    box.run_code("name = 'default'")
    context = box.create_code_context(cwd="/tmp")
    assert (context.language, context.cwd) == ("python", "/tmp")
    assert box.run_code("import os; name = 'mine'; os.getcwd()", context=context).text == "/tmp"
    assert box.run_code("name").text == "default"
    assert context.id in [known.id for known in box.list_code_contexts()]
    box.restart_code_context(context)
    gone = box.run_code("name", context=context)
    assert gone.error is not None and gone.error.name == "NameError" and gone.execution_count == 1
    box.remove_code_context(context.id)
    for act in (lambda: box.run_code("1", context=context), lambda: box.remove_code_context(context), lambda: box.restart_code_context("no")):  # fmt: skip
        with pytest.raises(NotFoundException, match="not found"):
            act()
    with pytest.raises(SandboxException, match="not a directory"):
        box.create_code_context(cwd="/nowhere")


def test_other_languages_remember_too_and_unknown_ones_are_refused(box: Sandbox) -> None:
    box.run_code("X=3; cd /tmp", language="bash")
    shell = box.run_code("echo $X; pwd; echo oops >&2; false", language="bash")
    assert ("".join(shell.logs.stdout), shell.logs.stderr) == ("3\n/tmp\n", ["oops\n"])
    assert shell.error is not None and shell.error.value == "1"
    box.run_code("const q = {a: 5}", language="js")
    assert box.run_code("await Promise.resolve(q)", language="javascript").text == "{ a: 5 }"
    assert box.run_code("import { join } from 'path'\njoin('a', 'b')", language="js").text == "a/b"
    thrown = box.run_code("throw new TypeError('no')", language="javascript").error
    assert thrown is not None and (thrown.name, thrown.value) == ("TypeError", "no")
    with pytest.raises(SandboxException, match=r"400.*python, javascript and bash"):
        box.run_code("1", language="cobol")


def test_a_kernel_that_dies_is_told_and_another_takes_its_place(box: Sandbox) -> None:
    context = box.create_code_context()
    died = box.run_code("import os; print('last'); os._exit(3)", context=context)
    assert died.error is not None and died.error.name == "UnexpectedEndOfExecution"
    assert box.run_code("1 + 1", context=context).text == "2"
    box.remove_code_context(context)


def test_a_client_that_leaves_interrupts_the_kernel(server: Server, box: Sandbox) -> None:
    for language, code, after in (
        ("python", "import time\ntry:\n    time.sleep(300)\nexcept KeyboardInterrupt:\n    left = True", "left"),
        ("bash", "sleep 300", "echo True"),
        ("javascript", "while (true) {}", "console.log('True')"),
    ):
        with pytest.raises(TimeoutException):
            box.run_code(code, language=language, timeout=0.5)
        ended = box.run_code(after, language=language, timeout=30)
        assert "True" in (ended.text or "") + "".join(ended.logs.stdout), (language, ended)


def test_bad_requests_are_told(server: Server, box: Sandbox) -> None:
    token = {"X-Access-Token": box._envd_access_token or ""}
    both = {"code": "1", "language": "python", "context_id": "x"}
    assert ask(server, box, "POST", "/execute", json=both, headers=token).status_code == 400
    for body in (
        b"{",
        b"[]",
        b'{"code": 5}',
        b'{"code": "1", "env_vars": {"A": 1}}',
        b'{"code": "1", "env_vars": [1]}',
        rb'{"code": "\ud800"}',
        rb'{"code": "1", "env_vars": {"A": "\ud800"}}',
    ):
        assert ask(server, box, "POST", "/execute", content=body, headers=token).status_code == 400, body
    for path in ("/execute", "//execute", "/execute//", "///%65xecute/", "/x/../execute"):  # however it is written
        assert ask(server, box, "POST", path, json={"code": "1"}).status_code == 401, path
    assert ask(server, box, "POST", "/execute", json={"code": "1"}, headers={"X-Access-Token": "x"}).status_code == 401
    assert ask(server, box, "GET", "/elsewhere").status_code == 404
    assert ask(server, box, "PATCH", "/contexts").status_code in (404, 405, 501)
    large = "x = '" + "y" * 500_000 + "'; len(x)"
    assert box.run_code(large).text == "500000"


def test_many_at_once_and_the_async_client(server: Server) -> None:
    async def work() -> None:
        box = await AsyncSandbox.create(timeout=120, **options(server))
        try:
            contexts = await asyncio.gather(*(box.create_code_context() for _ in range(3)))
            code = "import time; time.sleep(0.2); n = {0}; n"
            found = await asyncio.gather(*(box.run_code(code.format(n), context=context) for n, context in enumerate(contexts)))  # fmt: skip
            assert [one.text for one in found] == ["0", "1", "2"]
            queued = await asyncio.gather(
                *(box.run_code(f"print({n}); {n}") for n in range(4))
            )  # one context: one by one
            assert [(one.text, one.logs.stdout) for one in queued] == [(str(n), [f"{n}\n"]) for n in range(4)]
            listed = await box.list_code_contexts()
            assert [one.language for one in listed] == ["python", "javascript", "python", "python", "python"]
            assert {one.id for one in listed[2:]} == {one.id for one in contexts}
            await box.restart_code_context(contexts[0])
            await box.remove_code_context(contexts[1])
        finally:
            await box.kill()

    asyncio.run(work())


def test_the_end_of_a_box_is_told_apart_from_other_failures(server: Server) -> None:
    box = Sandbox.create(timeout=120, **options(server))
    threading.Timer(1.5, box.kill).start()
    with pytest.raises(TimeoutException, match="sandbox was killed while the request was in progress"):
        box.run_code("import time; time.sleep(300)", timeout=100)


def test_state_survives_a_pause_and_a_restart_of_the_server(server: Server) -> None:
    box = Sandbox.create(timeout=120, **options(server))
    try:
        box.run_code("kept = [1]")
        box.pause()
        box.connect()
        assert box.run_code("kept.append(2); kept").text == "[1, 2]"
        server.restart()
        assert box.run_code("kept").text == "[1, 2]"
    finally:
        box.kill()


@pytest.mark.torture
@pytest.mark.parametrize("tier", ["gvisor", "container"])
def test_kernels_go_on_where_the_tier_keeps_memory(server: Server, tier: str) -> None:
    server.layer.call("blueprint.define", name=f"interpreter-{tier}", tier=tier, limits={"memory": "1G"})
    box = Sandbox.create(f"interpreter-{tier}", timeout=300, **options(server))
    try:
        assert box.run_code("kept = [1]; kept", timeout=60).text == "[1]"
        for n in range(2, 4):  # paused in RAM or on disk, twice
            box.pause()
            box.connect(timeout=300)
            assert box.run_code(f"kept.append({n}); len(kept)").text == str(n)
        [fork] = box.fork(count=1, timeout=120)
        try:
            assert not isinstance(fork, Exception)
            forked = fork.run_code(
                "kept.append('fork'); len(kept)", timeout=60
            )  # files alone are forked where memory is not
            assert (forked.text, forked.error and forked.error.name) in (("4", None), (None, "NameError"))
            assert (forked.error is None) == (tier == "gvisor")
            assert box.run_code("len(kept)").text == "3"
        finally:
            fork.kill()
    finally:
        box.kill()
