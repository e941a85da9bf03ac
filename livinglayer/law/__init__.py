"""The law: the one door, and everything that goes through it."""
