"""Instrumentors find the functions, layers and copies that a profile selects, and make them record their calls."""
