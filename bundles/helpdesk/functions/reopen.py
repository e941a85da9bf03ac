"""A customer says that a solved ticket is not. It runs with the definer's rights, so it checks itself whose ticket it is."""

import layer


def reopen(id, why):
    me = layer.me()["principal"]
    ticket = layer.one(
        "select t.status from ticket t join customer c on c.id = t.customer join principal p on p.id = c.principal"
        " where t.id = :id and p.name = :me",
        id=id,
        me=me,
    )
    if ticket is None:
        raise layer.NotFound(f"there is no ticket {id}")
    if ticket["status"] != "solved":
        raise layer.Conflict(f"ticket {id} is {ticket['status']}, not solved")
    layer.update("ticket", id, status="open")
    layer.insert("comment", ticket=id, author=me, body=why)
