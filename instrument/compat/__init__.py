"""Faces: the calls of older profilers over the same session, for code that has them and is not to be rewritten yet.

Each room has the names of one of them (`fluid`, `paddle`, `minicaffe`) and holds no measuring of its
own: it says in our words what was asked. Where the answer differs on purpose, its text says how.
"""
