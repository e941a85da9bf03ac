"""A refund, and a word to the customer, together or not at all."""

from decimal import Decimal

import layer


def refund(id, amount, why):
    ticket = layer.one("select title, status from ticket where id = :id", id=id)
    if ticket is None:
        raise layer.NotFound(f"there is no ticket {id}")
    if ticket["status"] == "closed":
        raise layer.Conflict(f"ticket {id} is closed")
    if layer.query("select id from refund where ticket = :id and status <> 'cancelled'", id=id):
        raise layer.Conflict(f"ticket {id} was refunded already")
    me = layer.me()["principal"]
    made = layer.insert("refund", ticket=id, amount=str(amount), reason=why, issued_by=me)
    layer.insert("comment", ticket=id, author=me, body=f"We refund {Decimal(amount):.2f} EUR: {why}")
    return {"refund": made, "ticket": id, "amount": str(amount)}
