"""The law: the one door, and everything that goes through it."""

# Their verbs: the table is whole once the law is imported.
from . import agents, contracts, held, projections, quotas, reality, replay, tokens, transcripts, triggers, volumes  # noqa: F401
