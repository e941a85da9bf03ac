"""A bundle that uses every key there is: applied, it leaves nothing to do, and comes back from rows as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster import Cluster

from livinglayer import Layer
from livinglayer.bundle import documents, write
from livinglayer.bundle.apply import apply
from livinglayer.bundle.export import files_of, rebuilt
from livinglayer.bundle.load import Bundle, of_files
from livinglayer.bundle.plan import plan
from livinglayer.substrate.schema import OWNER

WHOLE: Mapping[str, str] = {
    "bundle.yaml": "{name: whole, version: 2.0.0, description: All there is., requires: {base: '>=1.0.0, <2.0.0'}}",
    "schema.yaml": """
entities:
  team: {fields: {name: text!}}
  task:
    description: "Multi\\nline: with # and 'quotes'"
    fields:
      a_text: {type: text, required: true, unique: true, indexed: true, default: "0", check: "length(a_text) < 99", description: yes, annotations: {x: [1, 1.5, null]}}
      an_int: {type: int, default: -3}
      a_float: {type: float, default: 2}
      a_decimal: {type: decimal, default: "1.50"}
      a_bool: {type: bool, default: false}
      a_date: {type: date, default: "2026-01-31"}
      a_time: {type: datetime, default: now()}
      a_json: {type: json, default: {k: [1, "2", 3.0, true, null]}}
      an_enum: {type: enum, values: [z, a, "no"], default: "no"}
      a_state: {type: state, machine: flow, initial: b, transitions: {b: [c, a], a: [], c: [a]}}
      a_ref: {type: ref, to: team, on_delete: cascade}
      self: {type: ref task, on_delete: "null"}
      of: ref thing
      doc: file
      who: ref principal
    unique: [[an_int, a_bool], [a_text, of]]
""",
    "policy.yaml": """
roles: {Role-ü: {description: "says: much"}, plain: null, empty: {}}
principals:
  ann: {kind: human, roles: [plain, Role-ü], attributes: {team: 1, big: 9007199254740993, f: 1.0, l: [a, {b: null}]}}
  svc: {kind: service}
  bare: {}
grants:
  - {to: Role-ü, action: read, resource: task, where: "an_int > 3 and a_text like 'x%'", fields: [an_int, a_text], branch: main, delegable: true, reason: "why: not"}
  - {to: plain, action: "*", resource: "*", effect: deny}
  - {to: plain, action: read, resource: task.an_int}
  - {to: ann, action: call, resource: "function:task.do"}
  - {to: ann, action: approve, resource: "contract:worker"}
  - {to: ann, action: read, resource: thing}
quotas:
  - {subject: plain, resource: money, amount: 0.5, seconds: 60, description: little}
  - {contract: worker, resource: tokens, amount: 1000, seconds: 3600}
  - {subject: ann, contract: worker, resource: boxes, amount: 2, seconds: 60}
""",
    "blueprints.yaml": """
blueprints:
  plain: {}
  Full One:
    description: everything
    tier: container
    base: host
    packages: [{pip: [x]}]
    limits: {memory: 256M, pids: 64, cpu: 0.5, disk: 1073741824, output: 1M, wall: 60}
    egress: [api.test, {host: model.test, protocol: https, secrets: [KEY]}, {host: bad.test, action: deny}]
    secrets: [{name: KEY, hosts: [model.test], readable: false}]
    mounts: [{source: /srv, target: /srv, readonly: true}]
    environment: {A: "1", EMPTY: ""}
    idle: {freeze: 1.5, checkpoint: null, archive: 100}
    ports: [80]
    slice: true
""",
    "functions.yaml": """
functions:
  task.do:
    description: does
    file: functions/do.py
    language: python
    signature: {arguments: {id: int!, how: {type: enum, values: [x, y], default: x}}, result: json}
    reads: {task: {fields: [a_text], where: an_int > 0}, thing: null}
    writes: {task: {actions: [update], fields: [an_int], where: an_int > 0}}
    calls: [task.sql]
    projections: [tasks]
    blueprint: plain
    timeout: 2.5
    rights: definer
    retries: {attempts: 3, backoff: 0.5, factor: 2, jitter: 0.1, longest: 60}
    deterministic: false
  task.sql: {language: sql, code: select 1 as one, reads: [task]}
  task.js: {file: functions/x.js}
  task.run: {language: executable, code: "#!/bin/sh\\necho hi\\n"}
""",
    "functions/do.py": "def do(id, how='x'):\n\treturn {'ü': id}\n",
    "functions/x.js": "exports.js = () => 1\n",
    "triggers.yaml": """
triggers:
  on row: {description: d, function: task.do, on_entity: task, on_actions: [insert, delete], where: an_int > 1, on_fields: [an_int], arguments: {how: y}, branch: main, enabled: false, retries: {attempts: 2}}
  timed: {function: task.do, schedule: "0 9 * * mon-fri", arguments: {id: 1}}
  then: {function: task.do, after_function: task.js, after_status: failed, arguments: {id: 2}}
""",
    "projections.yaml": """
projections:
  tasks: {description: d, file: projections/tasks.sql, parameters: {least: {type: int, default: 0}}, freshness: {bounded: 100}}
  two: {statement: "select id from thing", freshness: strong}
  theirs: {description: d, remote: {url: "https://other.example", projection: queue}}
""",
    "projections/tasks.sql": "select id, a_text from task where an_int >= :least -- ü\n",
    "contracts.yaml": """
contracts:
  bare: {}
  worker:
    description: d
    instructions_file: instructions/worker.md
    reads: {task: {fields: [a_text, an_int], where: an_int > 0}, thing: null}
    scope: {task: {actions: [update, insert], fields: [an_int], where: an_int > 0}}
    functions: [task.do]
    projections: [tasks]
    contracts: [bare, worker]
    blueprint: Full One
    tier: microvm
    minimum_tier: container
    egress: [{host: model.test, protocol: https, secrets: [KEY]}]
    secrets: [KEY]
    budget: {seconds: 60, steps: 100, cpu: 1.5, bytes: 1000, tokens: 10000, money: 0.25}
    approvals: [{action: update, resource: task, fields: [an_int], where: an_int > 5, by: [ann], expires: 60, reason: big}, {action: call, resource: "function:task.do"}]
    stops: [{denials: 3}, {refusals: 2}, {repeats: 9}, {query: select 1 from task where an_int > 100}]
    artifacts: ["*.md"]
    model: {api: openai, url: "https://model.test/v1", model: m, secret: KEY, max_tokens: 100, timeout: 30, prices: {input: 1, cached: 0.1, output: 2}}
    program: [python3, -m, x]
    decided: {untrusted: true}
  other: {instructions: "one line", program: "echo hi"}
""",
    "instructions/worker.md": "Do.\n\n  Indented.\n",
    "pages.yaml": """
components:
  - {name: "a page", kind: Page}
  - {name: list, kind: Table, parent: "a page", projection: tasks, properties: {columns: [a_text], wide: 1.0}}
""",
    "seeds.yaml": """
seeds:
  - {entity: thing, key: [name], rows: [{name: mine}]}
  - {entity: team, key: [name], file: seeds/team.csv}
  - entity: task
    key: [a_text, of]
    rows:
      - {a_text: one, of: {$ref: {thing: {name: mine}}}, a_ref: {$ref: {team: {name: "x,y"}}}, who: {$principal: ann}, a_decimal: "2.50", a_date: "2026-02-28", a_time: "2026-01-31T12:00:00Z", a_json: {$x: 1}, an_enum: a, a_state: c, an_int: 7, a_float: 1.0e3, a_bool: true}
  - {entity: task, key: [a_text], file: seeds/more.jsonl}
""",
    "seeds/team.csv": 'name\n"x,y"\nz\n',
    "seeds/more.jsonl": '{"a_text": "two", "of": {"$ref": {"thing": {"name": "mine"}}}, "an_int": 8, "self": {"$ref": {"task": {"a_text": "one"}}}}\n',
    "migrations/2.0.0.yaml": """
steps:
  - rename: {entity: job, field: label, to: a_text}
  - rename_entity: {entity: job, to: task}
  - retype: {entity: task, field: an_int, to: int}
  - backfill: {entity: task, field: an_int}
  - add: {entity: task, fields: {a_bool: bool}}
  - set: {entity: task, where: an_int is null, values: {an_int: 3, a_bool: true}}
  - drop: {entity: task, field: gone}
""",
    "docs/x.md": "kept\n",
    "tests/t.py": "kept\n",
    "README.md": "# whole\n",
}  # fmt: skip
BASE = {"bundle.yaml": b"{name: base, version: 1.0.0}", "schema.yaml": b"entities: {thing: {fields: {name: text!}}}"}


def whole(changes: Mapping[str, str] | None = None) -> Bundle:
    return of_files({path: text.encode() for path, text in {**WHOLE, **(changes or {})}.items()})


def keys(schema: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for name, part in schema.get("properties", {}).items():
        yield f"{at}.{name}"
        yield from keys(part, f"{at}.{name}")
    for other in ("items", "additionalProperties"):
        if isinstance(schema.get(other), Mapping):
            yield from keys(schema[other], at)
    for each in schema.get("oneOf", ()):
        yield from keys(each, at)


def used(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(used, value))
    if isinstance(value, Mapping):
        return set(value).union(*map(used, value.values()))
    return set()


def test_it_uses_every_key() -> None:
    said = set[str]().union(*(used(documents.parse(p, t.encode())) for p, t in WHOLE.items() if p.endswith(".yaml")))
    known = {each.rpartition(".")[2] for part in documents.schema()["$defs"].values() for each in keys(part)}
    assert known - said == {"key", "signature"} - said


def test_nothing_is_left_to_do_and_it_comes_back(layer: Layer) -> None:
    beside = {"base": of_files(BASE)}
    made = plan(layer, whole(), beside=beside)
    apply(layer, whole(), accept=made.digest, beside=beside)
    left = plan(layer, whole())
    assert left.empty and not left.changes, left.lines()
    assert files_of(layer, "whole") == dict(sorted(whole().files.items()))


def test_written_anew_it_says_the_same(layer: Layer) -> None:
    """Every file is written from rows alone, and what is written is nothing new."""
    from livinglayer.bundle.export import bundle_of, standing

    apply(layer, whole(), yes=True, beside={"base": of_files(BASE)})
    found = found_in(layer)
    original = whole()
    fresh = write.files_of(bundle_of(found, standing(found, original), original))
    again = of_files(fresh)
    left = plan(layer, again)
    assert [c for c in left.changes if c.kind != "bundle"] == [], left.lines()
    apply(layer, again)
    assert plan(layer, again).empty
    assert rebuilt(found_in(layer), again) == dict(sorted(fresh.items()))


def found_in(layer: Layer) -> Any:
    from livinglayer.bundle.definitions import Found
    from livinglayer.substrate.reads import clock

    with layer.engine.snapshot() as session:
        epoch = clock(layer.engine, session)[1]
        return Found(layer.catalog, session, layer.catalog.chain(session, layer.catalog.branch(session, "main")), epoch)


def test_drift_of_every_definition_shows_and_goes(layer: Layer) -> None:
    """Whatever is deleted by hand comes back, and then nothing is left to do."""
    apply(layer, whole(), yes=True, beside={"base": of_files(BASE)})
    for kind in ("component", "trigger", "quota", "contract", "function", "projection", "blueprint"):
        for row in layer.query(f"select id from {kind} order by id desc"):
            layer.delete(kind, row["id"])
    for row in layer.query("select id from permission where subject <> :owner", {"owner": OWNER}):
        layer.revoke(row["id"])
    made = plan(layer, whole())
    assert {c.action for c in made.changes} == {"add"}, made.lines()
    apply(layer, whole(), accept=made.digest)
    assert not plan(layer, whole()).changes


def test_two_layers_and_any_seed_of_hashes_give_the_same_bytes(
    tmp_path: Path, postgres_cluster: Callable[..., Cluster]
) -> None:
    code = """
import sys; sys.path[:0] = sys.argv[2:]
from bundle.test_whole import BASE, found_in, whole
import livinglayer, hashlib
from livinglayer.bundle import write
from livinglayer.bundle.apply import apply
from livinglayer.bundle.export import bundle_of, standing
from livinglayer.bundle.load import of_files
from livinglayer.bundle.plan import plan
from livinglayer.substrate.schema import OWNER
layer = livinglayer.open(sys.argv[1], create=True)
beside = {"base": of_files(BASE)}
print(plan(layer, whole(), beside=beside).digest)
apply(layer, whole(), yes=True, beside=beside)
found = found_in(layer)
for path, data in sorted(write.files_of(bundle_of(found, standing(found, whole()), whole())).items()):
    print(path, hashlib.sha256(data).hexdigest())
layer.close()
"""
    tests = str(Path(__file__).parents[1])
    answers = []
    with postgres_cluster().database() as other:
        for seed, place in (("1", str(tmp_path / "a")), ("2", str(tmp_path / "b")), ("3", other)):
            env = {**os.environ, "PYTHONHASHSEED": seed}
            ran = subprocess.run(
                [sys.executable, "-c", code, place, tests], capture_output=True, text=True, env=env, timeout=120
            )
            assert ran.returncode == 0, ran.stderr
            answers.append(ran.stdout)
    assert answers[0] == answers[1] == answers[2]
