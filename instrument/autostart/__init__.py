"""The folder that `instrument run` puts on PYTHONPATH, so that each interpreter starts its session by itself."""
