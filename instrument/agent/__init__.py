"""The agent, one process per run, which keeps the run's recordings in memory after their processes have ended."""
