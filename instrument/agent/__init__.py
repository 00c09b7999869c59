"""The agent, a background process of each run. It keeps the recordings of the run's processes, even of ended ones."""
