"""The law: the one door, and everything that goes through it."""

# Their verbs: the table is whole once the law is imported.
from . import (  # noqa: F401
    agents,
    contracts,
    held,
    projections,
    quotas,
    reality,
    replay,
    templates,
    tokens,
    transcripts,
    triggers,
    volumes,
)
