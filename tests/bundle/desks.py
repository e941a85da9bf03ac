"""A small help desk as a bundle, in versions, and what tests change in it."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import dedent

from livinglayer import Layer
from livinglayer.bundle.load import Bundle, of_files

DESK: Mapping[str, str] = {
    "README.md": "# desk\n",
    "bundle.yaml": "name: desk\nversion: 1.0.0\ndescription: A help desk.\n",
    "schema.yaml": """
# Who asks, and what for.
entities:
  customer:
    description: Somebody who asks.
    fields: {name: text!, email: {type: text!, unique: true}, who: {type: ref principal, on_delete: "null"}}
  ticket:
    fields:
      title: text!
      customer: ref customer!
      status: {type: state, transitions: {new: [open], open: [done], done: []}}
      priority: {type: int, default: 0, check: priority >= 0}
      note: text
    unique: [[customer, title]]
""",
    "policy.yaml": """
roles: {agent: {description: answers}, lead: {}}
principals:
  ann: {kind: human, roles: [agent], attributes: {team: billing}}
  bot: {kind: service}
grants:
  - {to: agent, action: read, resource: ticket, where: "priority < 5"}  # the rest is for leads
  - {to: agent, action: update, resource: ticket.note}
  - {to: lead, action: read, resource: ticket}
  - {to: agent, action: delete, resource: ticket, effect: deny, reason: nothing is lost here}
  - {to: agent, action: read, resource: "projection:open_tickets"}
quotas:
  - {subject: agent, resource: executions, amount: 100, seconds: 3600}
""",
    "blueprints.yaml": "blueprints: {small: {limits: {memory: 128M}}}\n",
    "functions.yaml": """
functions:
  ticket.rank:
    file: functions/rank.py
    signature: {arguments: {id: int!}, result: int}
    reads: [ticket]
    writes: {ticket: {actions: [update], fields: [priority]}}
    blueprint: small
""",
    "functions/rank.py": "def rank(id):\n    return 1  # everything is urgent\n",
    "triggers.yaml": """
triggers:
  rank-new: {function: ticket.rank, on_entity: ticket, on_actions: [insert], where: "status = 'new'"}
""",
    "projections.yaml": """
projections:
  open_tickets: {file: projections/open.sql, parameters: {least: {type: int, default: 0}}}
""",
    "projections/open.sql": "select id, title from ticket where status = 'open' and priority >= :least\n",
    "contracts.yaml": """
contracts:
  triage:
    blueprint: small
    reads: {ticket: {fields: [title, priority]}}
    scope: {ticket: {actions: [update], fields: [priority]}}
    functions: [ticket.rank]
    projections: [open_tickets]
    budget: {seconds: 60}
    instructions_file: instructions/triage.md
""",
    "instructions/triage.md": "Rank what is new.\n",
    "pages.yaml": """
components:
  - {name: home, kind: Column}
  - {name: list, kind: Table, parent: home, projection: open_tickets, properties: {columns: [title]}}
""",
    "seeds.yaml": """
seeds:
  - entity: customer
    key: [email]
    rows: [{name: Cara, email: c@x.test, who: {$principal: ann}}, {name: Dan, email: d@x.test}]
  - entity: ticket
    key: [title]
    rows:
      - {title: Help, customer: {$ref: {customer: {email: c@x.test}}}, status: open, priority: 2}
""",
}


def desk(changes: Mapping[str, str | None] | None = None, **more: str) -> Bundle:
    """The desk with files changed, added or left out (None); `version="1.1.0"` is another version of it."""
    files = {**DESK, **(changes or {})}
    if "version" in more:
        files["bundle.yaml"] = (files["bundle.yaml"] or "").replace("1.0.0", more["version"])
    return of_files({path: text.encode() for path, text in files.items() if text is not None})


def bundle(name: str, version: str = "1.0.0", **files: str) -> Bundle:
    """A bundle of a few files: `schema="entities: …"` is its schema.yaml."""
    given = {f"{part}.yaml": dedent(text) for part, text in files.items() if part != "requires"}
    needs = f"requires: {files['requires']}\n" if "requires" in files else ""
    given["bundle.yaml"] = f"name: {name}\nversion: {version}\n{needs}"
    return of_files({path: text.encode() for path, text in given.items()})


def swapped(part: str, old: str, new: str) -> dict[str, str]:
    """One file of the desk with a text changed."""
    assert old in DESK[part]
    return {part: DESK[part].replace(old, new)}


def last_tx(layer: Layer) -> int:
    return int(layer.query("select max(tx) as n from tx")[0]["n"])
