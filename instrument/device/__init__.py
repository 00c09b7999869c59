"""Devices: when they worked for which span, and what they and the host say of themselves.

`timer` and what it is made of time spans by pairs of events. `gauges` has the thread that reads gauges now and then,
`nvml` asks the GPUs for them, `host` the operating system, `torch_memory` torch's allocator. Nothing here initialises a
device, and a vendor's bindings are imported only where there is a driver.
"""
