"""An IPython kernel for the code interpreter of a box: shows frames and figures as data too, and has variables for one execution.

Importing it loads ipykernel, which a box must have. What else was loaded before (zygote_process.py) is used as it is.
"""

from __future__ import annotations

import json
import os
import random
import site
import sys
from typing import Any

import jupyter_client.session  # for whoever talks to it: loaded once
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from IPython.core.formatters import BaseFormatter, JSONFormatter
from IPython.display import display
from layer_charts import chart_of, plain
from traitlets import ObjectName, Unicode
from traitlets.config import Config

assert jupyter_client.session
LOADED = (
    "numpy",
    "pandas",
    "matplotlib",
    "IPython",
    "ipykernel",
    "traitlets",
    "zmq",
)  # what may have been loaded before
HERE = os.path.dirname(os.path.abspath(__file__))
INLINE = "matplotlib_inline.backend_inline"


def run(file: str, cwd: str) -> None:
    """Be the kernel that a connection file tells of. Never returns."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    os.environ["MPLBACKEND"] = f"module://{INLINE}"
    if "matplotlib" in sys.modules:
        matplotlib = sys.modules["matplotlib"]
        matplotlib.rcParams["backend"] = os.environ["MPLBACKEND"]
        os.makedirs(matplotlib.get_cachedir(), exist_ok=True)
    sys.path[:] = places()
    os.chdir(cwd)
    config = Config()
    config.InteractiveShell.colors = "NoColor"
    config.HistoryManager.enabled = False
    config.IPKernelApp.parent_handle = os.getppid()
    app = IPKernelApp(connection_file=file, kernel_class=Kernel, log_level=50, config=config)
    IPKernelApp._instance = app
    app.initialize([])
    if INLINE in sys.modules:  # it was loaded where there was no shell to make itself known to
        sys.modules[INLINE]._enable_matplotlib_integration()
    show_images()
    shown = app.shell.display_formatter
    for type, formatter in (("e2b/data", Frames), ("e2b/chart", Charts), ("application/json", Structures)):
        shown.formatters[type] = formatter(parent=shown)
    app.start()
    os._exit(0)


class Kernel(IPythonKernel):
    """IPython's, with variables that are there for one execution."""

    async def do_execute(self, *given: Any, **more: Any) -> Any:
        variables = self.get_parent("shell").get("content", {}).get("env") or {}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            return await super().do_execute(*given, **more)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})


class Frames(BaseFormatter):
    """The columns of a pandas DataFrame."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict

    def __call__(self, shown: Any) -> Any:
        pandas = sys.modules.get("pandas")  # nobody has a frame who has not imported it
        if pandas is None or not isinstance(shown, pandas.DataFrame):
            return super().__call__(shown)
        return plain(shown.to_dict(orient="list"))


class Charts(BaseFormatter):
    """The data of a matplotlib figure."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = dict

    def __call__(self, shown: Any) -> Any:
        figures = sys.modules.get("matplotlib.figure")
        if figures is None or not isinstance(shown, figures.Figure):
            return super().__call__(shown)
        try:
            return plain(chart_of(shown)) or None
        except Exception:  # a figure that we can't read is a picture all the same
            return None


class Structures(JSONFormatter):
    """Lists and mappings as JSON, where they can be."""

    def __call__(self, shown: Any) -> Any:
        if not isinstance(shown, (list, dict)):
            return super().__call__(shown)
        try:
            return json.loads(json.dumps(shown, allow_nan=False, default=_number))
        except (TypeError, ValueError, RecursionError):
            return None


def _number(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of numpy
        return value.tolist()
    raise TypeError(type(value))


def show_images() -> None:
    """What PIL would open in a window, or saves to a file, is shown."""
    try:
        from PIL.Image import Image
    except ImportError:
        return
    save = Image.save

    def shown(image: Any, file: Any, *given: Any, **more: Any) -> None:
        if isinstance(file, str):
            display(image)
        save(image, file, *given, **more)

    Image.save, Image.show = shown, lambda image, *given, **more: display(image)


def user_packages() -> str:
    """Where pip installs for the box's user; what Python believes may be of where this was loaded."""
    site.USER_BASE = site.USER_SITE = None
    return site.getusersitepackages()


def places() -> list[str]:
    """Where modules are looked for: in the working directory first, with us last; and in the user's own before Debian's."""
    own = user_packages()
    os.makedirs(own, exist_ok=True)  # so that what is installed there can be imported at once
    found = [place for place in sys.path if place and os.path.abspath(place) not in (HERE, own)]
    first = next((at for at, place in enumerate(found) if place.endswith("-packages")), len(found))
    return ["", *found[:first], own, *found[first:], HERE]


def is_outdated() -> bool:
    """Whether the box has installed one of the packages that were loaded before."""
    where = [user_packages(), *(place for place in site.getsitepackages() if "/local/" in place)]
    loaded = [
        name
        for name in LOADED
        if not (getattr(sys.modules.get(name), "__file__", None) or where[0]).startswith(tuple(where))
    ]
    return any(os.path.isdir(os.path.join(place, name)) for name in loaded for place in where)
