"""Instrumentors find the targets of a profile's rules, attach probes to them and remove the probes again."""
