"""Verbs of quotas: how much of a resource a principal, the holders of a role or a contract may use in a time."""

from __future__ import annotations

from typing import Any

from ..errors import Invalid
from ..substrate.ledger import MAIN_CHAIN
from ..substrate.schema import SYSTEM
from .blueprints import row_of
from .usage import RESOURCES, Quota, spent
from .verbs import Call, verb

QUOTA = SYSTEM.by_name["quota"]
LONGEST = 366 * 86_400  # seconds of a window


@verb("quota.set")
def set_(
    call: Call, *, resource: str, amount: float, seconds: int, subject: str | None = None, contract: str | None = None,
    description: str | None = None,
) -> Any:  # fmt: skip
    """Allow so much of a resource in any span of so many seconds; of a role: to each who holds it. Gives the quota's id."""
    if resource not in RESOURCES:
        raise Invalid(f"there is no quota of {resource!r:.60}", hint=", ".join(RESOURCES))
    if not 0 <= amount < 1e18:
        raise Invalid(f"an amount of {resource} is 0 or more, not {amount!r}")
    if not 1 <= seconds <= LONGEST:
        raise Invalid(f"a window has 1 to {LONGEST} seconds, not {seconds!r}")
    if subject is None and contract is None:
        raise Invalid("a quota is of a subject (a principal or a role), of a contract, or of both")
    layer = call.layer
    with layer.engine.reading() as session:
        who = None if subject is None else layer.catalog.principal(session, subject)["id"]
        rows = layer.catalog.rows(session, QUOTA, MAIN_CHAIN)
    row = {
        "subject": who, "contract": None if contract is None else row_of(layer, "contract", contract)["id"],
        "resource": resource, "seconds": seconds,
    }  # fmt: skip
    values = row | {"amount": amount, "description": description}
    known = next((each["id"] for each in rows if all(each[key] == value for key, value in row.items())), None)
    if known is None:
        return layer.insert("quota", values, reason=call.reason)
    layer.update("quota", known, values, reason=call.reason)
    return known


@verb("quota.remove", sealed=True)
def remove(call: Call, *, id: int) -> Any:
    """Take a quota away; what was used stays recorded."""
    return call.layer.delete("quota", id, reason=call.reason)


def listed(layer: Any, principal: str | None = None) -> list[dict[str, Any]]:
    """The quotas that a principal may read, each with what counts against it now; of a role, which has many holders, null."""
    rows = layer.query(
        "select id, subject, contract, resource, amount, seconds, description from quota order by id",
        principal=principal,
    )
    with layer.engine.reading() as session:
        people = {row["id"]: row for row in layer.catalog.rows(session, SYSTEM.by_name["principal"], MAIN_CHAIN)}
        contracts = {row["id"]: row for row in layer.catalog.rows(session, SYSTEM.by_name["contract"], MAIN_CHAIN)}
    found = []
    for row in rows:
        quota = Quota(*(row[name] for name in ("id", "subject", "contract", "resource", "amount", "seconds")))
        who, of = people.get(quota.subject or 0), contracts.get(quota.contract or 0)
        used = None if who is not None and who["kind"] == "role" else spent(layer, quota, quota.subject or 0)
        names = {"subject": who and who["name"], "contract": of and of["name"]}
        found.append({**row, **names, "used": used})
    return found
