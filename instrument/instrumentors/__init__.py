"""Instrumentors: how targets are found and made to record, and the way back."""
