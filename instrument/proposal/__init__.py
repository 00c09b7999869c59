"""The first profile that `instrument init` proposes: of what a service's processes did, or of its source alone."""
