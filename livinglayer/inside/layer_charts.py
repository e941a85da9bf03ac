"""What a matplotlib figure shows, as data: its type, title, axes and values, in the shape that E2B's SDKs read."""

from __future__ import annotations

import datetime
import math
import re
from typing import Any

UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")  # "Time (s)", "Time [s]"


def chart_of(figure: Any) -> dict[str, Any]:
    """The data of a figure; empty when it shows none."""
    axes = figure.get_axes()
    if not any(ax.has_data() or ax.get_title() for ax in axes):
        return {}
    if len(axes) == 1:
        return _chart(axes[0])
    title = figure._suptitle.get_text() if figure._suptitle else None
    return {"type": "superchart", "title": title or None, "elements": [_chart(ax) for ax in axes]}


def plain(value: Any) -> Any:
    """A value as JSON has it: numbers that are none are null, dates are text."""
    if hasattr(value, "tolist"):  # of numpy
        if type(value).__name__ == "datetime64":
            return str(value.astype("datetime64[s]"))
        value = value.tolist()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat() if value == value else None
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(part) for part in value]
    return str(value)


def _chart(ax: Any) -> dict[str, Any]:
    from matplotlib.collections import PathCollection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle, Wedge
    from matplotlib.text import Text

    shown = [child for child in ax._children if not isinstance(child, Text)]
    lines = [child for child in shown if isinstance(child, Line2D)]
    others = [child for child in shown if not isinstance(child, Line2D)]
    drawn = [line for line in lines if not _is_straight(line)]  # one straight across is a grid's, or marks a value
    boxes = _boxes(shown)
    if boxes is not None:
        return _box_chart(ax, *boxes)
    if lines and not others:
        return _points(
            ax, "line", [(_label(line, "Line"), line.get_xdata(), line.get_ydata()) for line in drawn or lines]
        )
    if drawn or not others:
        return _titled(ax, "unknown")
    if all(isinstance(child, PathCollection) for child in others):
        offsets = [(child.get_label(), child.get_offsets()) for child in others]
        return _points(ax, "scatter", [(label, at[:, 0], at[:, 1]) for label, at in offsets])
    if all(isinstance(child, Wedge) for child in others):
        slices = [
            {
                "label": child.get_label(),
                "angle": round(abs(float(child.theta2) - float(child.theta1)), 3),
                "radius": plain(child.r),
            }
            for child in others
        ]
        return dict(_titled(ax, "pie"), elements=slices)
    if all(isinstance(child, Rectangle) for child in others):
        return _bars(ax)
    return _titled(ax, "unknown")


def _titled(ax: Any, type: str) -> dict[str, Any]:
    return {"type": type, "title": ax.get_title() or None, "elements": []}


def _planar(ax: Any, type: str, turned: bool = False) -> dict[str, Any]:
    """A chart with two axes; one that lies on its side is told as if it stood."""
    chart = _titled(ax, type)
    labels = (ax.get_ylabel(), ax.get_xlabel()) if turned else (ax.get_xlabel(), ax.get_ylabel())
    for name, label in zip("xy", labels):
        unit = UNIT.search(label)
        chart[name + "_label"] = label or None
        chart[name + "_unit"] = (unit.group(1) or unit.group(2)) if unit else None
    return chart


def _points(ax: Any, type: str, series: list[tuple[str, Any, Any]]) -> dict[str, Any]:
    chart = _planar(ax, type)
    for name, axis, ticks, labels, scale in (
        ("x", ax.xaxis, ax.get_xticks(), ax.get_xticklabels(), ax.get_xscale()),
        ("y", ax.yaxis, ax.get_yticks(), ax.get_yticklabels(), ax.get_yscale()),
    ):
        texts = [label.get_text() for label in labels]
        kind = type_of(axis)
        if kind == "datetime":
            from matplotlib.dates import num2date

            chart[name + "_ticks"], scale = [num2date(tick).isoformat() for tick in ticks], kind
        else:
            chart[name + "_ticks"] = [float(tick) for tick in ticks]
            if scale == "linear" and kind == "categorical":
                scale = kind
        chart[name + "_tick_labels"], chart[name + "_scale"] = texts, scale
    chart["elements"] = [
        {"label": label, "points": [[plain(x), plain(y)] for x, y in zip(xs, ys)]} for label, xs, ys in series
    ]
    return chart


def type_of(axis: Any) -> str | None:
    """Whether an axis counts dates or names."""
    found = getattr(axis, "get_converter", lambda: axis.converter)()
    name = type(found).__name__
    return "datetime" if "Date" in name else "categorical" if "StrCategory" in name else None


def _bars(ax: Any) -> dict[str, Any]:
    containers = [container for container in ax.containers if hasattr(container, "patches")]
    lying = bool(containers) and getattr(containers[0], "orientation", None) == "horizontal"
    chart = _planar(ax, "bar", turned=lying)
    ticks, labels = (ax.get_yticks(), ax.get_yticklabels()) if lying else (ax.get_xticks(), ax.get_xticklabels())
    texts = [label.get_text() for label in labels]
    for container in containers:
        bars = container.patches
        for at, bar in enumerate(bars):
            middle = bar.get_y() + bar.get_height() / 2 if lying else bar.get_x() + bar.get_width() / 2
            near = min(range(len(ticks)), key=lambda i: abs(ticks[i] - middle), default=None)
            if len(texts) == len(bars):
                label = texts[at]
            elif near is not None and abs(ticks[near] - middle) < 1e-6:
                label = texts[near]
            else:
                label = f"{middle:g}"
            value = bar.get_width() if lying else bar.get_height()
            chart["elements"].append({"label": label, "group": _label(container, "Group"), "value": plain(value)})
    return chart


def _boxes(shown: list[Any]) -> tuple[list[Any], list[Any]] | None:
    """The corners of the boxes of a box plot, filled or only lined, and all its other lines; None when it is none."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import PathPatch

    corners, rest = [], []
    for child in shown:
        if isinstance(child, PathPatch):
            corners.append(child.get_path().vertices)
        elif isinstance(child, Line2D):
            points = child.get_xydata()
            closed = len(points) == 5 and (points[0] == points[-1]).all()
            corners.append(points) if closed else rest.append(points)
        else:
            return None
    return (corners, rest) if corners and len(rest) >= 3 * len(corners) else None


def _box_chart(ax: Any, corners: list[Any], lines: list[Any]) -> dict[str, Any]:
    def across(points: Any) -> bool:  # as wide as the first box, and level: its median
        low, high = corners[0][:, 0].min(), corners[0][:, 0].max()
        return len(points) == 2 and points[0][1] == points[1][1] and abs(points[1][0] - points[0][0]) == high - low

    standing = any(across(points) for points in lines)
    place, value = (0, 1) if standing else (1, 0)
    chart = _planar(ax, "box_and_whisker", turned=not standing)
    names = [label.get_text() for label in (ax.get_xticklabels() if standing else ax.get_yticklabels())]
    for name, corner in zip(names, corners):
        left, right = corner[:, place].min(), corner[:, place].max()
        first, third = (_rounded(number) for number in (corner[:, value].min(), corner[:, value].max()))
        mine = [points for points in lines if len(points) and left <= points[0][place] <= right]
        found = {"label": name, "min": first, "first_quartile": first, "median": None, "third_quartile": third}
        found.update(max=third, outliers=[])
        for points in mine:
            ends = [_rounded(number) for number in points[:, value]]
            if len(points) == 2 and ends[0] == ends[1] and abs(points[1][place] - points[0][place]) == right - left:
                found["median"] = ends[0]
            elif len(points) == 2 and points[0][place] == points[1][place] and max(ends) <= first:
                found["min"] = min(ends)
            elif len(points) == 2 and points[0][place] == points[1][place] and min(ends) >= third:
                found["max"] = max(ends)
            elif len({float(at) for at in points[:, place]}) == 1:
                found["outliers"] += ends
        chart["elements"].append(found)
    return chart


def _is_straight(line: Any) -> bool:
    xs, ys = line.get_xdata(), line.get_ydata()
    return len(xs) == 2 and len(ys) == 2 and bool(xs[0] == xs[1] or ys[0] == ys[1])


def _label(artist: Any, kind: str) -> str:
    """Its label; one that matplotlib made up is told by its number."""
    label = str(artist.get_label())
    made_up = re.match(r"_(?:child|container|line)(\d+)$", label)
    return f"{kind} {made_up.group(1)}" if made_up else label


def _rounded(number: Any) -> float:
    return float(f"{float(number):.9g}")
