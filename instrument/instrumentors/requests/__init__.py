"""Records the requests of servers, and continues the traces of their callers."""
