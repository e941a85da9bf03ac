"""A virtual environment for each package that is adapted to, kept in .venvs/ by the hash of what is in it.

`python tests/adapters/environments.py` resolves NEEDS anew and writes requirements/NAME.txt, which pin everything.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINS = Path(__file__).parent / "requirements"
KEPT = ROOT / ".venvs"
NEEDS = {
    "inspect": ["inspect-ai==0.3.285", "pytest==9.1.1"],
    "deepagents": ["deepagents==0.7.32", "langchain-tests==1.1.9"],
}


def python(name: str) -> str:
    """The interpreter of an environment with the package `name`, what it needs, and this project; made when it is not there."""
    pins = PINS / f"{name}.txt"
    made_of = hashlib.sha256(b"\0".join([pins.read_bytes(), (ROOT / "pyproject.toml").read_bytes()])).hexdigest()
    place = KEPT / f"{name}-{made_of[:12]}"
    KEPT.mkdir(exist_ok=True)
    with open(KEPT / ".lock", "w") as lock:  # installing this project writes into its own directory: one at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "made").exists():
            for old in KEPT.glob(f"{name}-*"):
                shutil.rmtree(old)
            uv("venv", "--python", sys.executable, str(place))
            uv("pip", "install", "--python", str(place / "bin/python"), "-r", str(pins), "-e", str(ROOT))
            (place / "made").touch()
    return str(place / "bin/python")


def uv(*words: str) -> None:
    """uv, of the environment this runs in; pip takes ten times as long."""
    binary = Path(sys.executable).with_name("uv")
    said = subprocess.run([str(binary), "-q", *words], capture_output=True, text=True, timeout=300, check=False)
    assert said.returncode == 0, f"uv {' '.join(words)}: {said.stderr}"


def run(name: str, *words: str, environment: dict[str, str] | None = None, timeout: float = 180) -> str:
    """What Python said in that environment, which must exit with 0."""
    said = subprocess.run(
        [python(name), *words],
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert said.returncode == 0, said.stdout[-8000:]
    return said.stdout


def checks(name: str, file: str, place: Path, environment: dict[str, str], *options: str) -> str:
    """The last line of pytest, which ran a file beside this one in that environment, without what this project says to pytest."""
    alone = ["-c", "/dev/null", "--rootdir", str(place), "--noconftest", "-p", "no:cacheprovider", "-q", *options]
    said = run(name, "-m", "pytest", *alone, str(PINS.parent / file), environment=environment, timeout=400)
    return said.splitlines()[-1]


if __name__ == "__main__":
    for name in sys.argv[1:] or NEEDS:
        wanted = PINS / f"{name}.in"
        wanted.write_text("\n".join(NEEDS[name]) + "\n")
        options = ["--universal", "--no-header", "--no-annotate", "--python-version", "3.11"]
        uv("pip", "compile", *options, "-o", str(PINS / f"{name}.txt"), str(wanted), str(ROOT / "pyproject.toml"))
        wanted.unlink()
