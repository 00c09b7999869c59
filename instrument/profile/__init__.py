"""The profile: the model of its keys (`model`), and the reader of its file (`keys`, `document`)."""
