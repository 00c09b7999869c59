"""The agent: one process per run that maps the recordings of all its processes, so that they outlive them."""
