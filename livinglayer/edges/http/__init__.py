"""One port for everybody: the native API, boxes for E2B's clients, MCP, and a page for people."""
