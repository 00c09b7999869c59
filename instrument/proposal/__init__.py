"""The first profile that `instrument init` proposes, from what a service's processes did."""
