"""Schemathesis over the OpenAPI document: all checks, stateful, two tenants beside each other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from edges.serving import Server

CONFIG = """
[checks]
# What the document says may be right and still be refused: no SELECT, no entity of that name, a conflict.
positive_data_acceptance.expected-statuses = ["2xx", "304", "400", "401", "403", "404", "406", "409", "412", "422", "429"]
"""
# What boxes do is tested where boxes are; a stream does not end.
SHORT = [
    "--include-path-regex",
    r"^/api/(row|query|projection|entity|permission|token|blob|why|can|schema|history|diff|me)",
]
PATIENT = ("--lock-out", "1000000", "--no-worker")  # whether wrong tokens are refused is asked often
LEFT_OUT = ["--exclude-path", "/api/live", "--exclude-path-regex", r"^/api/(box|agent|reality|volume)\."]


def tenants(server: Server) -> list[str]:
    """Two who share an entity and see their own rows only; what is the second one's."""
    server.layer.define("item", {"name": "text!", "qty": "int", "doc": "file"})
    for name in ("ann", "ben"):
        server.layer.principal(name)
        server.layer.grant(name, "*", "item", where=f"name like '{name}%'")
    ids = server.layer.insert("item", [{"name": f"ben-and-nobody-else-{n}"} for n in range(20)])
    server.layer.insert("item", [{"name": f"ann-{n}", "qty": n} for n in range(20)])
    server.layer.define("vault_of_ben", {"name": "text"})
    server.layer.fork("branch_of_ben")
    return ["ben-and-nobody-else", "vault_of_ben", *(f'"id":{number},' for number in ids)]


def run(server: Server, home: Path, principal: str, foreign: list[str], *more: str) -> None:
    """One run of Schemathesis as a principal; nothing may be found."""
    (home / "schemathesis.toml").write_text(CONFIG)
    command = [
        str(Path(sys.executable).with_name("st")), "--config-file", str(home / "schemathesis.toml"), "run", f"{server.url}/openapi.json", "--header",
        f"Authorization: Bearer {server.token(principal)}", "--checks", "all", "--warnings", "off", "--no-color", "--request-timeout", "30", *LEFT_OUT, *more,
    ]  # fmt: skip
    hooks = {
        "SCHEMATHESIS_HOOKS": "contract_checks",
        "PYTHONPATH": str(Path(__file__).parent),
        "FOREIGN": ",,".join(foreign),
    }
    told = subprocess.run(command, cwd=home, env=os.environ | hooks, capture_output=True, text=True, timeout=3600)
    assert told.returncode == 0, told.stdout[-8000:] + told.stderr[-2000:]
    assert "Traceback" not in server.log
    assert bool(server.layer.verify())


def test_a_tenant_finds_no_fault_and_nothing_of_another(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(None, *PATIENT)
    foreign = tenants(server)
    run(
        server,
        tmp_path,
        "ann",
        foreign,
        "--phases",
        "fuzzing,stateful",
        "--max-examples",
        "1",
        "--workers",
        "2",
        *SHORT,
    )
    rows = server.layer.query("select name from item where name like 'ben-and-nobody%'")
    assert len(rows) == 20, "ann has changed none of them"


@pytest.mark.torture
@pytest.mark.parametrize("principal", ["ann", "ben", "owner"])
def test_nobody_finds_a_fault(serve: Callable[..., Server], tmp_path: Path, principal: str) -> None:
    server = serve(None, *PATIENT)
    foreign = tenants(server)
    phases = ("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", os.environ.get("EXAMPLES", "100"))
    run(server, tmp_path, principal, foreign if principal == "ann" else [], *phases)
