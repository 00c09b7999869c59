"""Devices: when they worked for which span, and what they say of themselves. Nothing here initialises a device."""
