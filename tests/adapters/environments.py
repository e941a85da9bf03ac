"""An environment for each package that is adapted to, kept in .venvs/ by the hash of what is in it.

`python tests/adapters/environments.py` resolves NEEDS anew and writes requirements/NAME.txt, which pin everything.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINS = Path(__file__).parent / "requirements"
KEPT = ROOT / ".venvs"
NEEDS = {
    # those that import an adapter of ours have this project too
    "inspect": [str(ROOT / "pyproject.toml"), "inspect-ai==0.3.285", "pytest==9.1.1"],
    "deepagents": [str(ROOT / "pyproject.toml"), "deepagents==0.7.32", "langchain-tests==1.1.9"],
    # those that ask a server know nothing of it
    "openai-agents": ["openai-agents==0.24.0", "e2b==2.63.0"],
    "langchain": ["langchain==1.4.7", "langchain-openai==1.7.3", "langchain-mcp-adapters==0.3.2"],
    "pydantic-ai": ["pydantic-ai-slim[mcp,openai]==2.66.0"],
    "smolagents": ["smolagents[e2b,openai]==1.26.0"],
    "crewai": ["crewai==1.15.30", "crewai-tools==1.15.30", "e2b==2.63.0"],
    "claude-agent-sdk": ["claude-agent-sdk==0.2.182"],
}


def python(name: str) -> str:
    """The interpreter of an environment with the package `name` and what it needs."""
    pins, ours = PINS / f"{name}.txt", [need for need in NEEDS[name] if need.endswith(".toml")]

    def make(place: Path) -> None:
        uv("venv", "--python", sys.executable, str(place))
        project = ["-e", str(ROOT)] if ours else []
        uv("pip", "install", "--python", str(place / "bin/python"), "-r", str(pins), *project)

    return str(kept(name, [pins, *map(Path, ours)], make) / "bin/python")


def beside(name: str) -> Path:
    """A directory for PYTHONPATH, with what requirements/NAME.txt names and nothing else."""
    pins = PINS / f"{name}.txt"

    def make(place: Path) -> None:
        uv("pip", "install", "--python", sys.executable, "--target", str(place), "--no-deps", "-r", str(pins))

    return kept(name, [pins], make)


def node(name: str) -> Path:
    """A directory with the packages that node/package-lock.json names."""
    files = [Path(__file__).parent / "node" / file for file in ("package.json", "package-lock.json")]

    def make(place: Path) -> None:
        place.mkdir()
        for file in files:
            shutil.copy(file, place)
        told("npm", "ci", "--prefix", str(place), "--no-audit", "--no-fund", "--silent")

    return kept(name, files, make)


def kept(name: str, made_of: list[Path], make: Callable[[Path], None]) -> Path:
    """The directory that `make` fills; made when it is not there, or was made of something else."""
    place = KEPT / f"{name}-{hashlib.sha256(bytes(0).join(file.read_bytes() for file in made_of)).hexdigest()[:12]}"
    KEPT.mkdir(exist_ok=True)
    with open(KEPT / ".lock", "w") as lock:  # installing this project writes into its own directory: one at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "made").exists():
            for old in KEPT.glob(f"{name}-{'?' * 12}"):
                shutil.rmtree(old)
            make(place)
            (place / "made").touch()
    return place


def uv(*words: str) -> None:
    """uv, of the environment this runs in: from nothing it took 19 s where pip took 162, once, on a busy machine."""
    told(str(Path(sys.executable).with_name("uv")), "-q", *words)


def told(*words: str) -> None:
    """A command that must exit with 0."""
    said = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert said.returncode == 0, f"{' '.join(words)}: {said.stderr}"


def run(name: str, *words: str, environment: dict[str, str] | None = None, timeout: float = 180) -> str:
    """What Python said in that environment, which must exit with 0."""
    return heard([python(name), *words], environment or {}, timeout)


def heard(words: list[str], environment: dict[str, str], timeout: float = 180, place: Path | None = None) -> str:
    """What a command said, which must exit with 0."""
    said = subprocess.run(
        words,
        env=os.environ | environment,
        cwd=place,
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
        ours = [need for need in NEEDS[name] if need.endswith(".toml")]
        wanted = PINS / f"{name}.in"
        wanted.write_text("\n".join(need for need in NEEDS[name] if need not in ours) + "\n")
        options = ["--universal", "--no-header", "--no-annotate", "--python-version", "3.11"]
        uv("pip", "compile", *options, "-o", str(PINS / f"{name}.txt"), str(wanted), *ours)
        wanted.unlink()
