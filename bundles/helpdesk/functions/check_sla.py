"""Tickets whose answer is late become urgent, once each, and those who work on them are told."""

from datetime import datetime, timezone

import layer


def check_sla():
    now, late = datetime.now(timezone.utc), []
    waiting = layer.query(
        "select id, due from ticket where due is not null and breached = false and status in ('new', 'triaged', 'open') order by id"
    )
    for ticket in waiting:
        due = datetime.fromisoformat(ticket["due"].replace("Z", "+00:00"))
        if due < now:
            layer.update("ticket", ticket["id"], breached=True, priority="urgent")
            layer.insert(
                "comment",
                ticket=ticket["id"],
                author=layer.me()["principal"],
                internal=True,
                body=f"An answer was promised by {due:%Y-%m-%d %H:%M} UTC.",
            )
            late.append(ticket["id"])
    return {"late": late}
