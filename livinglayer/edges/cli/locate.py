"""Which layer a command means: `--dir`, else LAYER_DIR, else the nearest directory upwards that holds one, as git does."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from livinglayer.errors import Conflict, Corrupt, Invalid, NotFound

HOME = ".layer"


def is_url(place: str) -> bool:
    return place.startswith(("postgresql://", "postgres://"))


def hide_password(sentence: str) -> str:
    """The same text with the password of any URL in it left out."""
    return re.sub(r"(\w+://[^\s:/@]*):[^\s@]*@", r"\1:…@", sentence)


def find(given: str | None) -> str:
    """The path or URL to open, or NotFound."""
    place = given or os.environ.get("LAYER_DIR")
    if place and is_url(place):
        return place
    if place and "://" in place:
        raise Invalid(
            f"{hide_password(place)!r} is no layer this release can reach", hint="a directory, or postgresql://…"
        )
    if place:
        home = Path(place)
        if not (home / HOME).is_dir():
            raise NotFound(f"there is no layer in {place!r}", hint=f"layer init {place}")
        return target(home)
    here = Path.cwd()
    for home in (here, *here.parents):
        if (home / HOME).is_dir():
            return target(home)
    raise NotFound(
        f"there is no layer in {str(here)!r} or above it", hint="layer init, or name one with --dir or LAYER_DIR"
    )


def target(home: Path) -> str:
    """The database that a layer's directory stands for: its own, or the one its config names."""
    return configured(home) or str(home)


def configured(home: Path) -> str | None:
    """The URL in a directory's config, if it has one."""
    config = home / HOME / "config.json"
    try:
        url = json.loads(config.read_text()).get("db")
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError) as error:
        raise Corrupt(f"{str(config)!r} does not hold a JSON object", hint='{"db": "postgresql://…"}') from error
    if url is not None and not (isinstance(url, str) and is_url(url)):
        raise Corrupt(f"{str(config)!r} names a db that is no PostgreSQL URL", hint='{"db": "postgresql://…"}')
    return url


def check_free(home: Path, url: str | None) -> str | None:
    """The URL a directory shall stand for, if any: the given one or its own. Refuses to give it a second database."""
    if home.exists() and not home.is_dir():
        raise Invalid(f"{str(home)!r} is a file", hint="name a directory, which may not exist yet")
    held = configured(home)
    if (home / HOME / "layer.db").exists() and url:
        raise Conflict(
            f"{str(home)!r} already holds an embedded layer", hint="init another directory for this database"
        )
    if held and url and url != held:
        raise Conflict(
            f"{str(home)!r} already stands for {hide_password(held)}",
            hint=f"remove {home / HOME / 'config.json'} first",
        )
    return url or held


def configure(home: Path, url: str) -> None:
    """Make a directory stand for a PostgreSQL database; only its owner may read the URL, which can hold a password."""
    (home / HOME).mkdir(parents=True, exist_ok=True)
    config = home / HOME / "config.json"
    with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(json.dumps({"db": url}) + "\n")
