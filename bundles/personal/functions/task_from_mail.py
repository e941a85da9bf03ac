"""What somebody wrote becomes something to do."""

import layer


def main(id, due=None):
    mail = layer.one("select subject, sender from mail where id = :id", id=id)
    if mail is None:
        raise layer.NotFound(f"there is no mail {id}")
    layer.update("mail", id, seen=True)
    return layer.insert("task", title=mail["subject"] or f"Answer {mail['sender']}", due=due, about=id)
