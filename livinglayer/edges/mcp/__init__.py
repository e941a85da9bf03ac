"""MCP: the layer as tools and resources for models, over HTTP and stdio."""
