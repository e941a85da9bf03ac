"""The ways in: each translates and authenticates, none decides."""
