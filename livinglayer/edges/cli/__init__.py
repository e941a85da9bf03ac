"""The `layer` command."""
