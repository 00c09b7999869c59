"""The calls of older profilers over the same session, for code that has them and is not to be rewritten yet.

Each module has the names of one of them, and measures nothing itself. Its text has the differences on purpose.
"""
