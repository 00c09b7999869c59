"""The profile: the settings of a deployment as frozen classes (`model`), and the reader of `profile.yaml` (`keys`)."""
