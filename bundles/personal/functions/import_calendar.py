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
    """Each VEVENT as {name: (zone, value)}; long lines are put together first."""
    depth, event = 0, {}
    for line in re.sub(r"\r?\n[ \t]", "", text).splitlines():
        name, _, value = line.partition(":")
        name, *parameters = name.split(";")
        if name == "BEGIN":
            depth, event = (1, {}) if value == "VEVENT" else (depth + 1, event)
        elif name == "END":
            depth -= 1
            if value == "VEVENT":
                yield event
        elif depth == 1:  # not what belongs to an alarm inside of it
            event[name] = next((each[5:].strip('"') for each in parameters if each.startswith("TZID=")), None), value


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
    zone, value = event.get(name, (None, ""))
    try:
        when = datetime.strptime(value.rstrip("Z"), "%Y%m%d" if len(value) == 8 else "%Y%m%dT%H%M%S")
    except ValueError:
        return None
    return when.replace(tzinfo=known(zone)).astimezone(timezone.utc).isoformat()


def known(zone):
    """A zone by its name; one that nobody knows is taken for UTC."""
    try:
        return ZoneInfo(zone) if zone and ZoneInfo else timezone.utc
    except (KeyError, ValueError, OSError):
        return timezone.utc
