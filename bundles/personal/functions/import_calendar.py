"""An ics becomes rows. Of RFC 5545 it reads what a day needs: an event's id, name, times, place. A series is its first event."""

import re
from datetime import datetime, timezone

import layer

try:
    from zoneinfo import ZoneInfo
except ImportError:  # Python 3.8
    ZoneInfo = None

ESCAPES = {"\\n": "\n", "\\N": "\n", "\\,": ",", "\\;": ";", "\\\\": "\\"}


def main(id):
    upload = layer.one("select name, format, content from upload where id = :id", id=id)
    if upload is None or upload["format"] != "ics":
        raise layer.NotFound(f"there is no calendar {id}")
    imported, skipped = 0, 0
    for event in events(upload["content"]):
        row = read(event)
        if row is None:
            skipped += 1
            continue
        layer.upsert("event", row, on=["uid"])
        imported += 1
    return {"imported": imported, "skipped": skipped}


def events(text):
    """Each VEVENT as {name: (parameters, value)}; long lines are put together first."""
    lines = re.sub(r"\r?\n[ \t]", "", text).splitlines()
    depth, event = 0, {}
    for line in lines:
        name, _, value = line.partition(":")
        name, *parameters = name.split(";")
        name = name.upper()
        if name == "BEGIN":
            if value.upper() == "VEVENT":
                depth, event = 0, {}
            depth += 1
        elif name == "END":
            depth -= 1
            if value.upper() == "VEVENT":
                yield event
        elif depth == 1:  # not what belongs to an alarm inside of it
            event[name] = (dict(each.upper().partition("=")[::2] for each in parameters), value, parameters)


def read(event):
    uid, starts = text(event, "UID"), time(event, "DTSTART")
    if not uid or starts is None:
        return None  # without these it is no event
    return {
        "uid": uid[:500],
        "title": text(event, "SUMMARY") or "untitled",
        "starts": starts,
        "ends": time(event, "DTEND"),
        "all_day": len(event["DTSTART"][1]) == 8,
        "place": text(event, "LOCATION"),
    }


def text(event, name):
    value = event.get(name, (None, ""))[1].replace("\0", "").strip()
    return re.sub(r"\\[nN,;\\]", lambda found: ESCAPES[found[0]], value) or None


def time(event, name):
    """20260131, 20260131T090000Z, or 20260131T090000 in a zone; None where it can't be read."""
    if name not in event:
        return None
    _, value, parameters = event[name]
    zone = next((each[5:] for each in parameters if each.upper().startswith("TZID=")), None)
    try:
        if len(value) == 8:
            when = datetime.strptime(value, "%Y%m%d")
        else:
            when = datetime.strptime(value.rstrip("Z"), "%Y%m%dT%H%M%S")
        if zone and ZoneInfo and not value.endswith("Z"):
            return when.replace(tzinfo=ZoneInfo(zone.strip('"'))).astimezone(timezone.utc).isoformat()
    except (KeyError, ValueError, OSError):
        if "when" not in locals():
            return None
    return when.replace(tzinfo=timezone.utc).isoformat()  # a zone nobody knows is taken for UTC
