"""What the devices and the host say of themselves: gauges that are read now and then, by one thread of ours.

`gauges` has the thread and keeps what it read, `nvml` asks the GPUs and `host` the operating system. NVIDIA's bindings
are imported in `nvml` alone, and only where there is a driver.
"""
