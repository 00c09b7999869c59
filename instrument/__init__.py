"""Instrumentation for inference services, selected by one `profile.yaml`."""
