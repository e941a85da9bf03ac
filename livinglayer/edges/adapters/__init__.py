"""What other people's frameworks load: each file needs the package it is named after, and nothing else here imports it."""
