"""The agent, a background process per run, which keeps what the run's processes record, even after they end."""
