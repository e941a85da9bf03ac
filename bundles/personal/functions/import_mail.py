"""An mbox becomes rows: one for each message that is not there yet."""

import email.utils
import hashlib
import mailbox
import os
import tempfile
from datetime import timezone
from email.header import decode_header, make_header

import layer


def main(id):
    upload = layer.one("select name, format, content from upload where id = :id", id=id)
    if upload is None or upload["format"] != "mbox":
        raise layer.NotFound(f"there is no mbox {id}")
    known = {row["message_id"] for row in layer.query("select message_id from mail")}
    rows, skipped = [], 0
    with tempfile.TemporaryDirectory() as place:
        path = os.path.join(place, "mbox")
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(upload["content"])
        for message in mailbox.mbox(path):
            row = read(message)
            if row["message_id"] in known:
                skipped += 1
                continue
            known.add(row["message_id"])
            rows.append(row)
    if rows:
        layer.insert("mail", rows)
    return {"imported": len(rows), "skipped": skipped}


def read(message):
    # A message without an id gets one that is the same whenever it is imported.
    found = header(message, "Message-ID") or "sha256:" + hashlib.sha256(message.as_bytes()).hexdigest()
    return {
        "message_id": found[:500],
        "sender": header(message, "From") or "unknown",
        "recipients": header(message, "To"),
        "subject": header(message, "Subject"),
        "sent": sent(message),
        "body": body(message),
    }


def header(message, name):
    value = message[name]
    if value is None:
        return None
    try:
        return clean(str(make_header(decode_header(value))))
    except (LookupError, UnicodeError, ValueError):
        return clean(str(value))  # an encoding nobody knows


def sent(message):
    try:
        when = email.utils.parsedate_to_datetime(message["Date"])
    except (TypeError, ValueError, IndexError):
        return None  # no date, or one that nobody can read
    when = when.replace(tzinfo=timezone.utc) if when.tzinfo is None else when
    return when.isoformat()


def body(message):
    """The text of a message: its first plain part, what is attached left out."""
    for part in message.walk():
        if part.get_content_type() == "text/plain" and part.get_content_disposition() != "attachment":
            data = part.get_payload(decode=True) or b""
            try:
                return clean(data.decode(part.get_content_charset() or "utf-8", "replace"))
            except LookupError:
                return clean(data.decode("utf-8", "replace"))
    return None


def clean(text):
    """What can be stored: no NUL, nothing that is half a character."""
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8").strip()
