"""The substrate measured against a plain table on the same engine, and against DoltLite: `python -m bench`."""
