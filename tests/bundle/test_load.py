"""A bundle is read whole or refused, with the file and the place in it; hostile ones are refused without harm."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from livinglayer.bundle import documents, files
from livinglayer.bundle.load import Bundle, Migration, Seed, load, newer, of_files, pack, satisfies, unpack
from livinglayer.errors import Invalid, LayerError, LimitExceeded, NotFound

ROOT = Path(__file__).parents[2]

DESK: Mapping[str, str] = {
    "bundle.yaml": "name: desk\nversion: 1.1.0\ndescription: A help desk.\n",
    "schema.yaml": """
entities:
  customer:
    fields: {name: text!, email: {type: text!, unique: true}}
  ticket:
    description: What somebody asks for.
    fields:
      title: text!
      customer: ref customer!
      who: ref principal
      status: {type: state, transitions: {new: [open], open: [done], done: []}}
      priority: {type: int, check: priority > 0}
      due: date
      price: decimal
    unique: [[customer, title]]
""",
    "policy.yaml": """
roles: {agent: {description: Answers.}, lead: }
principals:
  ann: {kind: human, roles: [agent], attributes: {team: red}}
grants:
  - {to: agent, action: read, resource: ticket, where: status <> 'done', fields: [title, status]}
  - {to: lead, action: write, resource: ticket.priority}
  - {to: ann, action: call, resource: "function:ticket.triage", reason: she is on duty}
  - {to: lead, action: approve, resource: "contract:triage"}
quotas:
  - {subject: agent, resource: executions, amount: 100, seconds: 3600}
  - {contract: triage, resource: boxes, amount: 5, seconds: 60}
""",
    "blueprints.yaml": """
blueprints:
  small:
    limits: {memory: 256M, pids: 32}
    egress: ["api.test"]
    secrets: [{name: KEY, hosts: [api.test]}]
""",
    "functions/ticket.yaml": """
functions:
  ticket.triage:
    file: functions/triage.py
    signature: {arguments: {id: int!}}
    reads: [ticket]
    writes: {ticket: {fields: [priority], actions: [update]}}
    blueprint: small
    timeout: 5
  ticket.count: {file: functions/count.sql, reads: [ticket]}
""",
    "functions/triage.py": "import layer\n\n\ndef triage(id):\n    layer.update('ticket', id, {'priority': 1})\n",
    "functions/count.sql": "select count(*) as n from ticket\n",
    "triggers.yaml": """
triggers:
  on-new: {function: ticket.triage, on_entity: ticket, on_actions: [insert], where: status = 'new'}
  nightly: {function: ticket.count, schedule: "@daily"}
""",
    "projections.yaml": """
projections:
  open_tickets: {file: projections/open.sql, parameters: {status: text}}
""",
    "projections/open.sql": "select id, title\nfrom ticket\nwhere status = :status\n",
    "contracts.yaml": """
contracts:
  triage:
    instructions_file: instructions/triage.md
    blueprint: small
    reads: {ticket: {fields: [title]}, customer: }
    scope: {ticket: {actions: [update], fields: [priority], where: status = 'new'}}
    functions: [ticket.count]
    projections: [open_tickets]
    secrets: [KEY]
    budget: {seconds: 600, tokens: 10000}
    approvals:
      - {action: update, resource: ticket, where: priority > 8, by: [lead]}
      - {action: call, resource: "function:ticket.triage"}
    stops: [{denials: 5}]
    model: {api: anthropic, url: "https://api.test", model: m, secret: KEY}
""",
    "instructions/triage.md": "Look at each ticket.\n\nBe kind.\n",
    "pages.yaml": """
components:
  - {name: home, kind: page}
  - {name: list, kind: table, projection: open_tickets, parent: home, properties: {columns: [title]}}
""",
    "seeds.yaml": """
seeds:
  - {entity: customer, key: [email], file: seeds/customers.csv}
  - entity: ticket
    key: [customer, title]
    rows:
      - {title: Broken, customer: {$ref: {customer: {email: a@b.c}}}, who: {$principal: ann}, due: 2026-01-31, price: "1.50"}
  - {entity: ticket, key: [title], file: seeds/more.jsonl}
""",
    "seeds/customers.csv": 'name,email\nAnn,a@b.c\n"Bob, jr.",b@b.c\n',
    "seeds/more.jsonl": '{"title": "Loud", "customer": {"$ref": {"customer": {"email": "b@b.c"}}}}\n\n',
    "migrations/1.1.0.yaml": "steps: [{rename: {entity: ticket, field: name, to: title}}, {set: {entity: ticket, values: {priority: 1}}}]\n",
    "migrations/1.0.10.yaml": "steps: [{add: {entity: ticket, fields: {due: date}}}]\n",
    "migrations/1.0.9.yaml": "steps: []\n",
    "README.md": "# Desk\n",
    "docs/how.md": "How.\n",
}


def desk(**changed: str | bytes | None) -> dict[str, bytes]:
    """The files of a good bundle, some of them others: `schema_yaml=...`, None takes one away."""
    made = {path: text.encode() for path, text in DESK.items()}
    for key, text in changed.items():
        path = key.replace("__", "/").replace("_yaml", ".yaml").replace("_py", ".py")
        made.pop(path, None)
        if text is not None:
            made[path] = text.encode() if isinstance(text, str) else text
    return made


def lay(place: Path, given: Mapping[str, bytes]) -> Path:
    for path, data in given.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(data)
    return place


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return lay(tmp_path / "desk", desk())


def refused(given: Mapping[str, Any]) -> Invalid:
    with pytest.raises(Invalid) as caught:
        of_files(given)
    return caught.value


# What a good one is


def test_a_directory_becomes_definitions_with_its_files_put_in(directory: Path) -> None:
    found = load(directory)
    assert (found.name, found.version, found.description) == ("desk", "1.1.0", "A help desk.")
    assert found.roles == {"agent": {"description": "Answers."}, "lead": {}}
    assert found.functions["ticket.triage"]["code"] == DESK["functions/triage.py"]
    assert found.functions["ticket.count"] == {
        "reads": ["ticket"], "code": "select count(*) as n from ticket\n", "language": "sql",
    }  # fmt: skip
    assert found.projections == {
        "open_tickets": {"parameters": {"status": "text"}, "statement": DESK["projections/open.sql"]}
    }
    assert found.contracts["triage"]["instructions"] == "Look at each ticket.\n\nBe kind.\n"
    assert found.seeds == (
        Seed("customer", ("email",), ({"name": "Ann", "email": "a@b.c"}, {"name": "Bob, jr.", "email": "b@b.c"})),
        Seed("ticket", ("customer", "title"), ({
            "title": "Broken", "customer": {"$ref": {"customer": {"email": "a@b.c"}}}, "who": {"$principal": "ann"},
            "due": "2026-01-31", "price": "1.50",
        },)),
        Seed("ticket", ("title",), ({"title": "Loud", "customer": {"$ref": {"customer": {"email": "b@b.c"}}}},)),
    )  # fmt: skip
    assert [each.version for each in found.migrations] == ["1.0.9", "1.0.10", "1.1.0"]
    assert found.migrations[0] == Migration("1.0.9", ())
    assert found.signer is None
    assert set(found.files) == set(DESK)
    assert found == of_files(found.files)


def test_the_smallest_bundle_is_a_name_and_a_version() -> None:
    found = of_files({"bundle.yaml": b"name: x\nversion: 0.0.1\n"})
    assert found == Bundle("x", "0.0.1", files=found.files, digest=found.digest)


def test_a_part_may_be_a_directory_and_a_name_twice_is_refused() -> None:
    halves = desk(schema_yaml=None)
    a, b = DESK["schema.yaml"].split("  ticket:", 1)
    halves |= {"schema/people.yaml": a.encode(), "schema/work.yaml": f"entities:\n  ticket:{b}".encode()}
    assert of_files(halves).entities == of_files(desk()).entities
    halves["schema/again.yaml"] = b"entities: {customer: {fields: {name: text}}}"
    assert (
        refused(halves).message
        == "desk/schema/people.yaml: entities.customer: 'customer' is in schema/again.yaml already"
    )


def test_the_digest_is_what_sha256sum_makes_of_the_files(directory: Path) -> None:
    command = "find . -type f | cut -c3- | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c-64"
    assert load(directory).digest == os.popen(f"cd {directory} && {command}").read().strip()


def test_an_archive_has_one_form_and_any_other_is_refused() -> None:
    packed = pack(desk())
    assert pack(dict(reversed(desk().items()))) == packed
    assert unpack(packed) == dict(sorted(desk().items()))
    for bad in (b"", b"x" * 1024, packed[:-1], packed + b"\0" * 512, packed.replace(b"0000644", b"0000755", 1)):
        with pytest.raises(Invalid, match="no packed bundle"):
            unpack(bad)


@given(st.binary(max_size=3000))
def test_unpacking_anything_raises_nothing_else(data: bytes) -> None:
    with pytest.raises(LayerError):
        unpack(data)
    with pytest.raises(LayerError):
        unpack(pack({"bundle.yaml": b"x"})[:512] + data)


def test_byte_order_marks_and_crlf_make_no_difference() -> None:
    windows = {path: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n") for path, data in desk().items()}
    ours, theirs = of_files(desk()), of_files(windows)
    for name in ("entities", "grants", "functions", "projections", "contracts", "seeds", "migrations"):
        assert getattr(theirs, name) == getattr(ours, name)


def test_versions() -> None:
    assert newer("1.10.0", "1.9.9") and not newer("1.0.0", "1.0.0")
    assert satisfies("1.10.0", ">=1.2.0") and satisfies("1.5.0", ">=1.2.0, <2.0.0") and satisfies("1.0.0", "==1.0.0")
    assert not satisfies("2.0.0", ">=1.2.0, <2.0.0") and not satisfies("1.0.0", ">1.0.0")


def test_the_published_schema_is_the_one_that_decides() -> None:
    published = (ROOT / "docs" / "bundle.schema.json").read_text()
    assert published == documents.schema_text()
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(json.loads(published))
    whole = Draft202012Validator(json.loads(published))
    for path, text in DESK.items():  # what an editor is given is one schema for all files
        if path.endswith(".yaml"):
            assert list(whole.iter_errors(documents.parse(path, text.encode()))) == []
    assert [
        each
        for each in _nodes(json.loads(published)["$defs"])
        if isinstance(each.get("properties"), dict) and each.get("type") == "object" and not _told(each)
    ] == []


def _nodes(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value, *(each for inner in value.values() for each in _nodes(inner))]
    return [each for inner in value for each in _nodes(inner)] if isinstance(value, list) else []


def _told(node: Mapping[str, Any]) -> bool:
    """Whether everything that can be written here says what it is."""
    defs = documents.schema()["$defs"]
    return all(
        "description" in each or "description" in defs.get(each.get("$ref", "").rpartition("/")[2], {}) or "properties" in each
        for each in node["properties"].values()
    )  # fmt: skip


# What is wrong is said with its place


@pytest.mark.parametrize(
    ("changed", "message", "hint"),
    [
        ({"bundle_yaml": None}, "bundle/bundle.yaml: is missing: every bundle has one", "name: helpdesk, version: 1.0.0"),
        ({"bundle_yaml": "name: desk"}, "desk/bundle.yaml: 'version' is missing", "three numbers, e.g. 1.0.0"),
        ({"bundle_yaml": "name: desk\nverison: 1.0.0"}, "desk/bundle.yaml: there is no 'verison' here", "did you mean version?"),
        ({"bundle_yaml": "name: desk\nversion: 1.0"}, "desk/bundle.yaml: version: 1.0 is not text", "three numbers, e.g. 1.0.0"),
        ({"bundle_yaml": 'name: desk\nversion: "1.0.0\\n"'}, 'desk/bundle.yaml: version: "1.0.0\\n" is not what belongs here', "three numbers, e.g. 1.0.0"),
        ({"bundle_yaml": "name: ../desk\nversion: 1.0.0"}, '../desk/bundle.yaml: name: "../desk" is not what belongs here', "lower-case letters, digits and hyphens, a letter first, at most 60"),
        ({"bundle_yaml": "name: desk\nversion: 1.1.0\nrequires: {desk: '>=1.0.0'}"}, "desk/bundle.yaml: requires.desk: a bundle can't require itself", None),
        ({"bundle_yaml": "name: desk\nversion: 1.1.0\nrequires: {crm: latest}"}, 'desk/bundle.yaml: requires.crm: "latest" is not what belongs here', 'e.g. ">=1.2.0", or ">=1.2.0, <2.0.0"'),
        ({"contracts_yaml": DESK["contracts.yaml"].replace("budget", "budgte")}, "desk/contracts.yaml: contracts.triage: there is no 'budgte' here", "did you mean budget?"),
        ({"contracts_yaml": DESK["contracts.yaml"].replace("seconds: 600", "seconds: long")}, 'desk/contracts.yaml: contracts.triage.budget.seconds: "long" is not a number', "Seconds that it works."),
        ({"contracts_yaml": DESK["contracts.yaml"].replace("priority > 8", "priorty > 8")}, "desk/contracts.yaml: contracts.triage.approvals[0]: predicate 'priorty > 8': 'ticket' has no field 'priorty'", None),
        ({"contracts_yaml": DESK["contracts.yaml"].replace("[KEY]", "[OTHER]")}, "desk/contracts.yaml: contracts.triage.secrets: the blueprint of contract 'triage' has no secret 'OTHER'", None),
        ({"contracts_yaml": DESK["contracts.yaml"].replace("[ticket.count]", "[ticket.cuont]")}, "desk/contracts.yaml: contracts.triage.functions[0]: there is no function 'ticket.cuont' in this bundle", "did you mean ticket.count or ticket.triage?"),
        ({"contracts_yaml": "contracts: {t: {egress: [other.test]}}", "policy_yaml": None, "instructions__triage.md": None}, "desk/contracts.yaml: contracts.t.egress: egress rule other.test of contract 't' is not within what its blueprint allows", "a contract narrows its blueprint"),
        ({"schema_yaml": DESK["schema.yaml"] + "  grant: {fields: {a: text}}"}, "desk/schema.yaml: entities.grant: 'grant' is a word of SQL and can't be the name of an entity", None),
        ({"schema_yaml": DESK["schema.yaml"] + "  permission: {fields: {a: text}}"}, "desk/schema.yaml: entities.permission: 'permission' is a name of the system's own", None),
        ({"schema_yaml": "entities: {a/../b: {fields: {a: text}}}"}, "desk/schema.yaml: entities: \"a/../b\" can't be a name here", "lower-case letters, digits and single underscores, a letter first, at most 48"),
        ({"schema_yaml": DESK["schema.yaml"].replace("due: date", "due: dat")}, "desk/schema.yaml: entities.ticket.fields.due: ticket.due: there is no type 'dat'", None),
        ({"schema_yaml": DESK["schema.yaml"].replace("unique: true", "uniqe: true")}, "desk/schema.yaml: entities.customer.fields.email: there is no 'uniqe' here", "did you mean unique?"),
        ({"schema_yaml": DESK["schema.yaml"].replace("ref customer", "ref custmer")}, "desk/schema.yaml: entities.ticket.fields.customer: there is no entity 'custmer' in this bundle", "did you mean customer?"),
        ({"schema_yaml": DESK["schema.yaml"].replace("[[customer, title]]", "[[customer, name]]")}, "desk/schema.yaml: entities.ticket.unique[0]: 'ticket' has no field 'name'", None),
        ({"policy_yaml": "grants: [{to: agent, action: read, resource: ticket}]"}, "desk/policy.yaml: grants[0].to: there is no role or principal 'agent' in this bundle", None),
        ({"policy_yaml": "roles: {owner: {}}"}, "desk/policy.yaml: roles.owner: 'owner' is the layer's own", "choose another name"),
        ({"policy_yaml": "principals: {eve: {roles: [owner]}}"}, "desk/policy.yaml: principals.eve.roles[0]: 'owner' is no role that a bundle could give", "an owner makes owners"),
        ({"policy_yaml": "roles: {a: }\ngrants: [{to: a, action: reed, resource: ticket}]"}, 'desk/policy.yaml: grants[0].action: "reed" is none of its values', "did you mean read?"),
        ({"policy_yaml": "roles: {a: }\ngrants: [{to: a, action: read, resource: tickets}]"}, "desk/policy.yaml: grants[0].resource: there is no entity 'tickets' in this bundle", "did you mean ticket?"),
        ({"policy_yaml": "roles: {a: }\nquotas: [{resource: cpu, amount: 1, seconds: 1}]"}, "desk/policy.yaml: quotas[0]: has none of subject, contract", "it needs one of them"),
        ({"functions__triage_py": "def triage(id:\n"}, "desk/functions/ticket.yaml: functions.ticket.triage.code: is not Python: line 1: '(' was never closed", "the code defines a function"),
        ({"functions__triage_py": None}, "desk/functions/ticket.yaml: functions.ticket.triage.file: there is no file functions/triage.py", None),
        ({"functions__extra_py": "x = 1"}, "desk/functions/extra.py: no definition names this file", "name it in functions.yaml, or move it to docs/"),
        ({"functions__more_yaml": "functions: {triage: {code: x = 1}}"}, "desk/functions/more.yaml: functions: \"triage\" can't be a name here", "noun.verb, e.g. ticket.triage"),
        ({"functions__more_yaml": "functions: {contract.define: {code: x = 1}}"}, "desk/functions/more.yaml: functions.contract.define: 'contract.define' is a name of the layer's own verbs", "choose another noun"),
        ({"functions__more_yaml": "functions: {a.b: {code: x = 1, file: functions/triage.py}}"}, "desk/functions/more.yaml: functions.a.b: has file and code of file, code", "it needs one of them"),
        ({"functions__more_yaml": "functions: {a.b: {file: ../../etc/passwd}}"}, 'desk/functions/more.yaml: functions.a.b.file: "../../etc/passwd" is not what belongs here', "Its code: a file in functions/."),
        ({"functions__more_yaml": "functions: {a.b: {file: functions/../../x.py}}"}, "desk/functions/more.yaml: functions.a.b.file: there is no file functions/../../x.py", None),
        ({"triggers_yaml": "triggers: {t: {function: ticket.triage}}"}, "desk/triggers.yaml: triggers.t: has none of on_entity, schedule, after_function", "it needs one of them"),
        ({"triggers_yaml": "triggers: {t: {function: ticket.triage, schedule: often}}"}, "desk/triggers.yaml: triggers.t.schedule: schedule 'often' has not the five fields of cron", None),
        ({"triggers_yaml": "triggers: {t: {function: ticket.triage, schedule: '@daily', where: a = 1}}"}, "desk/triggers.yaml: triggers.t: where goes with on_entity", None),
        ({"blueprints_yaml": DESK["blueprints.yaml"].replace("256M", "lots")}, "desk/blueprints.yaml: blueprints.small: memory 'lots' is not a size", None),
        ({"blueprints_yaml": DESK["blueprints.yaml"].replace('"api.test"]', '"http://a b/"]')}, "desk/blueprints.yaml: blueprints.small.egress: egress rule 'http://a b/'", None),
        ({"pages_yaml": "components: [{name: a, kind: page, parent: b}, {name: b, kind: page, parent: a}]"}, "desk/pages.yaml: components[0]: 'a' is part of itself: 'a' is above and below it", None),
        ({"pages_yaml": "components: [{name: a, kind: page, parent: c}]"}, "desk/pages.yaml: components[0]: there is no component 'c' in this bundle", None),
        ({"seeds__customers.csv": "name,mail\nA,b\n"}, "desk/seeds/customers.csv: line 1: 'customer' has no field 'mail'", "did you mean email?"),
        ({"seeds__customers.csv": "name,email\nA\n"}, "desk/seeds/customers.csv: line 2: has not the 2 cells of the first line", None),
        ({"seeds__more.jsonl": "{}\n[1]\n"}, "desk/seeds/more.jsonl: line 2: is not an object", "a row is {field: value}"),
        ({"seeds__more.jsonl": '{"title": "x", "title": "y"}'}, "desk/seeds/more.jsonl: line 1: is not JSON: a key is there twice", None),
        ({"seeds__more.jsonl": '{"title": "x", "customer": 7}'}, "desk/seeds.yaml: seeds[2].rows[0]: customer: 7 is an id, which is another in each layer", None),
        ({"seeds__more.jsonl": '{"title": "x"}'}, "desk/seeds.yaml: seeds[2].rows[0]: has no customer, which ticket requires", None),
        ({"seeds__more.jsonl": '{"title": "x", "customer": {"$ref": {"customer": {"mail": 1}}}}'}, "desk/seeds.yaml: seeds[2].rows[0]: 'customer' has no field 'mail'", None),
        ({"seeds_yaml": "seeds: [{entity: permission, key: [action], rows: []}]", "seeds__customers.csv": None, "seeds__more.jsonl": None}, "desk/seeds.yaml: seeds[0]: 'permission' is the system's own: its rows have files of their own", None),
        ({"seeds__customers.csv": "name,email\nA,b\nC,b\n"}, "desk/seeds.yaml: seeds[0].rows[1]: another row has the same email", "its key tells a row from all others"),
        ({"migrations__1.2.0_yaml": "steps: []"}, "desk/migrations/1.2.0.yaml: leads beyond version 1.1.0 of the bundle", "raise version in bundle.yaml"),
        ({"migrations__next_yaml": "steps: []"}, "desk/migrations/next.yaml: is not called after a version", "e.g. migrations/1.1.0.yaml"),
        ({"migrations__1.0.1_yaml": "steps: [{rnm: {}}]"}, "desk/migrations/1.0.1.yaml: steps[0]: ", None),
        ({"migrations__1.0.1_yaml": "steps: [{drop: {entity: permission}}]"}, "desk/migrations/1.0.1.yaml: steps[0].drop: 'permission' is the system's own", None),
        ({"schemas_yaml": ""}, "desk/schemas.yaml: nothing of a bundle has this name", "did you mean schema.yaml?"),
        ({"schema.yml": ""}, "desk/schema.yml: nothing of a bundle has this name", "did you mean schema.yaml?"),
        ({"code__x_py": ""}, "desk/code: a bundle has no directory 'code'", None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(changed: dict[str, str | None], message: str, hint: str | None) -> None:
    error = refused(desk(**changed))
    assert error.message.startswith(message)
    if hint is not None:
        assert error.hint == hint


def test_all_that_is_wrong_is_told_at_once() -> None:
    error = refused(desk(policy_yaml="roles: {owner: }\ngrants: [{to: a, action: read, resource: b}]", pages_yaml="components: [{name: a, kind: page, parent: c}]"))  # fmt: skip
    assert error.details["problems"][:2] == [
        "desk/policy.yaml: roles.owner: 'owner' is the layer's own",
        "desk/policy.yaml: grants[0].to: there is no role or principal 'a' in this bundle",
    ]


def test_names_of_a_bundle_that_is_required_are_left_to_the_layer() -> None:
    found = of_files(
        {
            "bundle.yaml": b"name: more\nversion: 1.0.0\nrequires: {desk: '>=1.0.0'}\n",
            "schema.yaml": b"entities: {note: {fields: {ticket: ref ticket, text: text}}}",
            "policy.yaml": b"grants: [{to: agent, action: read, resource: ticket, where: 'ticket.customer = :me'}]",
        }
    )
    assert found.requires == {"desk": ">=1.0.0"}


# YAML


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: !!python/object/apply:os.system [id]", "line 1: tags (tag:yaml.org,2002:python/object/apply:os.system) have no place in a bundle"),
        (b"a: !x 1", "line 1: tags (!x) have no place in a bundle"),
        (b"a: ! 1", "line 1: tags (!) have no place in a bundle"),
        (b"a: &x [1]\nb: *x", "line 1: anchors (&name) have no place in a bundle"),
        (b"a: *x", "line 1: aliases (*name) have no place in a bundle"),
        (b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "line 1: anchors (&name) have no place in a bundle"),
        (b"<<: {a: 1}\n<<: {b: 1}", "line 2: '<<' is there twice"),
        (b"a: 1\nb: {c: 1, c: 2}", "line 2: 'c' is there twice"),
        (b"a: 1\n'a': 2", "line 2: 'a' is there twice"),
        (b"1: a", "line 1: a key is text, not 1"),
        (b"true: a", "line 1: a key is text, not True"),
        (b"? [a]\n: b", "line 1: a key is text, not []"),
        (b"? {a: 1}\n: b", "line 1: a key is text, not {}"),
        (b'"a\\nb": 1', "line 1: 'a\\nb' can't be a key"),
        (b"[" * 51 + b"]" * 51, "line 1: is nested more than 50 deep"),
        (b"[" * 1_000_000, "line 1: is nested more than 50 deep"),
        (b"- " * 1_000_000, "line 1: is nested more than 50 deep"),
        (b"{a: " * 1_000_000, "line 1: is nested more than 50 deep"),
        (b"a: \x00", "line 1 has a NUL character"),
        (b'a: "\\0"', "line 1: has the control character U+0000"),
        (b'a: "\\e[31m"', "line 1: has the control character U+001B"),
        (b"a: \x1b[31m", "is not YAML: "),
        (b"a: \xff\xfe", "is not UTF-8: byte 4 is 0xff"),
        ("a: 1".encode("utf-16"), "is not UTF-8: byte 1 is 0xff"),
        (b"a: \xed\xa0\x80", "is not UTF-8: byte 4 is 0xed"),
        (b"a: .inf", "line 1: .inf is no number that can be stored"),
        (b"a: 1e999", "line 1: 1e999 is too large for a number"),
        (b"a: " + b"9" * 100_000, "line 1: 9999999999999999999999999999999999999999 has more than 64 bits"),
        (b"a: 1\n---\nb: 2", "line 2: there is one document in a file"),
        (b"%YAML 1.1\n---\na: 1", "line 1: directives have no place in a bundle"),
        (b"%TAG ! tag:x,1:\n---\na: 1", "line 1: directives have no place in a bundle"),
        (b"a: [1, 2", "line 2, column 1: is not YAML: "),
        (b"a: b: c", "line 1, column 5: is not YAML: "),
        (b"\ta: 1", "line 1, column 1: is not YAML: "),
    ],
)  # fmt: skip
def test_what_yaml_could_do_and_a_bundle_may_not(text: bytes, message: str) -> None:
    with pytest.raises(Invalid) as caught:
        documents.parse("x.yaml", text)
    assert caught.value.message.startswith("x.yaml: ") and message in caught.value.message


def test_plain_words_mean_what_yaml_1_2_says() -> None:
    text = b"a: no\nb: on\nc: 2026-01-31\nd: 12:30:00\ne: 010\nf: 0x1F\ng: 0o17\nh: 1e3\ni: .5\nj: ~\nk:\nl: true\nm: 1_000\nn: -7\no: 1.10.0\np: 'null'\nq: |\n  x\r\n  y\n"
    assert documents.parse("x", text) == {
        "a": "no", "b": "on", "c": "2026-01-31", "d": "12:30:00", "e": 10, "f": 31, "g": 15, "h": 1000.0, "i": 0.5, "j": None, "k": None,
        "l": True, "m": "1_000", "n": -7, "o": "1.10.0", "p": "null", "q": "x\ny\n",
    }  # fmt: skip


# Directories


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no directory"):
        load(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(Invalid, match="can't be read as a bundle: Not a directory"):
        load(tmp_path / "file")
    with pytest.raises(Invalid, match=r"is no bundle: it has no bundle\.yaml"):
        load(lay(tmp_path / "empty", {"README": b""}))


def test_links_are_refused_wherever_they_lead(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.py").write_text("token = 1\n")
    for place, target in (("functions/x.py", tmp_path / "secret.py"), ("functions/x.py", "triage.py"), ("docs/etc", "/etc"),
                          ("README.txt", "/etc/passwd"), ("docs/gone", "nowhere"), ("docs/loop", ".")):  # fmt: skip
        link = directory / place
        link.symlink_to(target)
        with pytest.raises(Invalid, match=f"desk/{place}: is a symbolic link"):
            load(directory)
        link.unlink()
    load(directory)


def test_pipes_sockets_and_devices_are_refused_and_not_waited_for(directory: Path) -> None:
    place = directory / "docs" / "x"
    os.mkfifo(place)
    with pytest.raises(Invalid, match="desk/docs/x: is a pipe"):
        load(directory)
    place.unlink()
    if os.geteuid() == 0:
        os.mknod(place, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero has no end
        with pytest.raises(Invalid, match="desk/docs/x: is a device"):
            load(directory)


def test_what_is_swapped_while_it_is_read_is_never_followed(directory: Path, tmp_path: Path) -> None:
    outside = lay(tmp_path / "outside", {"triage.py": b"token = 'planted'\n", "a.md": b"planted"})
    over = threading.Event()

    def swap() -> None:
        place, spare = directory / "functions", tmp_path / "spare"
        while not over.is_set():
            os.rename(place, spare)
            place.symlink_to(outside)
            place.unlink()
            os.rename(spare, place)

    def swap_file() -> None:
        place = directory / "docs" / "how.md"
        while not over.is_set():
            fresh = directory / "docs" / ".fresh"
            fresh.symlink_to(outside / "a.md")
            os.replace(fresh, place)
            fresh.write_bytes(b"How.\n")
            os.replace(fresh, place)

    threads = [threading.Thread(target=each) for each in (swap, swap_file)]
    for each in threads:
        each.start()
    try:
        for _ in range(300):
            try:
                found = load(directory)
            except LayerError:
                continue
            assert not any(b"planted" in data for data in found.files.values())
    finally:
        over.set()
        for each in threads:
            each.join()


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = lay(tmp_path / "many", {"bundle.yaml": b"x"})
    (many / "docs").mkdir()
    for n in range(10_001):
        (many / "docs" / f"{n}.md").touch()
    with pytest.raises(LimitExceeded, match="many: a bundle has at most 1,000 files"):
        load(many)
    with pytest.raises(LimitExceeded, match="at most 1,000 files"):
        of_files({f"docs/{n}.md": b"" for n in range(10_001)})
    huge = lay(tmp_path / "huge", desk())
    with open(huge / "docs" / "sparse.bin", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(LimitExceeded, match=r"huge/docs/sparse\.bin: has more than 4 MiB"):
        load(huge)
    os.rename(huge / "docs" / "sparse.bin", huge / "seeds" / "rows.jsonl")
    with pytest.raises(LimitExceeded, match="huge: the files of a bundle have at most 64 MiB together"):
        load(huge)
    together = {f"docs/{n}": bytes(4 << 20) for n in range(17)}
    with pytest.raises(LimitExceeded, match="at most 64 MiB together"):
        of_files(together)
    nested = lay(tmp_path / "nested", {"bundle.yaml": b"x"})
    (nested / "docs" / "/".join("d" * 20)).mkdir(parents=True)
    with pytest.raises(Invalid, match="is no path of a bundle"):
        load(nested)


@pytest.mark.parametrize(
    "path",
    ["../x.py", "/etc/passwd", "functions/../x.py", "functions//x.py", "functions/", "docs/.hidden", ".git/config", "docs/a b",
     "docs/a\n", "docs/\0", "docs/é", "docs/" + "x" * 100, "", ".", "..", "docs\\x", "functions/\udc80", "docs/a\u202ebc"],
)  # fmt: skip
def test_paths_that_are_none_of_a_bundle(path: str) -> None:
    error = refused({**desk(), path: b""})
    assert (
        "path of a bundle" in error.message or "nothing of a bundle" in error.message or "no directory" in error.message
    )
    assert error.message.isprintable()


def test_a_file_that_is_also_a_directory() -> None:
    assert (
        refused({**desk(), "docs/a": b"", "docs/a/b": b""}).message == "desk/docs/a/b: docs/a is a file and a directory"
    )


@pytest.mark.parametrize("given", [None, [], {"bundle.yaml": "text"}, {1: b""}, {"bundle.yaml": None}])
def test_what_is_no_files(given: Any) -> None:
    refused(given)


def test_hidden_files_and_caches_are_passed_over(directory: Path) -> None:
    lay(directory, {".git/config": b"x", "functions/__pycache__/triage.pyc": b"\0", "docs/.how.md.swp": b"x"})
    assert set(load(directory).files) == set(DESK)


def test_writing_files_leaves_exactly_these(tmp_path: Path) -> None:
    files.write(tmp_path / "out", desk())
    assert files.read(tmp_path / "out") == dict(sorted(desk().items()))
    files.write(tmp_path / "out", {"bundle.yaml": b"name: x\nversion: 1.0.0\n"})
    assert files.read(tmp_path / "out") == {"bundle.yaml": b"name: x\nversion: 1.0.0\n"}


# Anything at all


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(DESK)),
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")),
)
def test_any_bytes_in_any_file_raise_nothing_but_errors_of_ours(path: str, data: bytes) -> None:
    try:
        of_files({**desk(), path: data})
    except LayerError as error:
        assert error.message


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["ticket", "ticket.triage", "title", "read", "text!", "ref ticket", "state"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["to", "where", "fields", "type", "file", "code", "rows", "$ref", "entity"]) | st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=100)
@given(st.sampled_from([path for path in sorted(DESK) if path.endswith(".yaml")]), st.data())
def test_any_value_in_any_place_raises_nothing_but_errors_of_ours(path: str, data: st.DataObject) -> None:
    document = documents.parse(path, DESK[path].encode())
    spot, place = [document], 0
    while isinstance(spot[place], dict | list) and spot[place] and data.draw(st.integers(0, 4)):  # type: ignore[index]
        inner = spot[place]  # type: ignore[index]
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        spot, place = inner, data.draw(st.sampled_from(keys))
    spot[place] = data.draw(values)
    try:
        of_files(
            {
                **desk(),
                path: json.dumps(document[0] if isinstance(document, list) else document, allow_nan=True).encode(),
            }
        )
    except LayerError as error:
        assert error.message
