"""The recorder, the Python side of the C core. It times calls and scopes, and keeps its own cost within a budget."""
