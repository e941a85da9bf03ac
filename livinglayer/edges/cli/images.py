"""The commands about what boxes are made of: `layer image …`."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from livinglayer.edges.cli.boxes import clock, telling
from livinglayer.edges.cli.commands import arg, command
from livinglayer.edges.cli.table import DIM, Printer
from livinglayer.errors import Invalid
from livinglayer.sandbox.sandbox import Images

GROUPS = {"image": "See, bring in, build and give away what boxes are made of."}
NAMED = arg("name", help="the name that `layer box create --base` takes")


@command("image list", opens=False, place="host")
def image_list(args: Namespace, out: Printer) -> None:
    """List the images of this machine; host and debian are always to be had."""
    found = Images.list()
    if out.json:
        out.data(found)
        return
    out.rows(
        [{"name": one["name"], "layers": len(one["layers"]), "created": clock(one["created"])} for one in found],
        noun="image",
    )


@command("image import", arg("archive", type=Path, help="an OCI or docker archive"), NAMED, opens=False, place="host")
def image_import(args: Namespace, out: Printer) -> None:
    """Bring in an image from an archive, layer by layer, each checked."""
    with telling("Importing") as say:
        _made(out, Images.import_archive(args.archive, args.name, progress=say))


@command(
    "image pull",
    arg("reference", help="such as registry.example/team/tool:1.2"),
    arg("--name", help="the name it gets here (default: the reference's own)"),
    arg("--insecure", action="store_true", help="a registry without TLS, such as one on loopback"),
    opens=False,
    place="host",
)
def image_pull(args: Namespace, out: Printer) -> None:
    """Bring in an image from a registry, by skopeo."""
    with telling("Pulling") as say:
        _made(out, Images.pull(args.reference, name=args.name, tls=not args.insecure, progress=say))


@command(
    "image build",
    NAMED,
    arg(
        "steps",
        type=Path,
        help='a JSON file: [{"apt": ["git"]}, {"pip": ["flask"]}, {"files": {"/etc/x": "…"}}, {"run": "make"}]',
    ),
    arg("--base", default="debian", help="what it stands on (default: debian)"),
    arg("--egress", action="append", default=[], metavar="RULE", help="what the steps may reach (repeat it)"),
    arg("--fresh", action="store_true", help="do every step again, whatever was kept"),
    opens=False,
    place="host",
)
def image_build(args: Namespace, out: Printer) -> None:
    """Build an image by steps, each run in a box and kept by content, so that what was done is not done again."""
    try:
        steps = json.loads(args.steps.read_text())
    except (OSError, ValueError) as error:
        raise Invalid(
            f"{str(args.steps)!r} holds no steps: {error}", hint='[{"apt": ["git"]}, {"run": "make"}]'
        ) from None
    if not isinstance(steps, list):
        raise Invalid(f"{str(args.steps)!r} holds no list of steps")
    with telling("Building") as say:
        _made(
            out, Images.build(args.name, steps, base=args.base, egress=args.egress, cache=not args.fresh, progress=say)
        )


@command(
    "image export",
    arg("snapshot", help="the id of a snapshot"),
    arg("archive", type=Path, help="the file to write"),
    arg("--name", default="latest", help="the image's name in the archive (default: latest)"),
    arg(
        "--changes-only",
        action="store_true",
        help="without its base: for a snapshot that stands on the host's own files",
    ),
    opens=False,
    place="host",
)
def image_export(args: Namespace, out: Printer) -> None:
    """Write a snapshot as an OCI image archive, for podman, skopeo or another machine."""
    with telling("Exporting"):
        digest = Images.export(args.snapshot, args.archive, name=args.name, changes_only=args.changes_only)
    out.data({"digest": digest, "archive": str(args.archive)}) if out.json else out.say(
        f"Wrote {args.archive} ({digest})"
    )


@command("image remove", NAMED, opens=False, place="host")
def image_remove(args: Namespace, out: Printer) -> None:
    """Forget an image; boxes that were made of it go on."""
    Images.remove(args.name)
    out.data({"removed": args.name}) if out.json else out.say(f"Removed {args.name}")


def _made(out: Printer, image: dict[str, Any]) -> None:
    if out.json:
        out.data(image)
        return
    out.say(f"Image {image['name']} is here, {len(image['layers'])} layers")
    out.say(f"Use it: layer box create --base {image['name']}", DIM)
