"""The first profile that `instrument init` proposes, from the calls that a service's processes made."""
