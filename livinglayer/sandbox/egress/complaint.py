"""What went wrong in the gateway itself, on stderr: where, but not the error's text, which could quote a secret."""

import sys
import traceback
from pathlib import Path


def complain(error: BaseException) -> None:
    """Say where an error that nobody expected came from."""
    where = " < ".join(
        f"{Path(at.filename).name}:{at.lineno}" for at in reversed(traceback.extract_tb(error.__traceback__))
    )
    print(f"egress: {type(error).__name__} at {where}", file=sys.stderr, flush=True)
