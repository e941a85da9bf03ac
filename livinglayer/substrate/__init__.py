"""One versioned, forkable, governed database on SQLite or PostgreSQL."""
