"""Measures the time that spans take on devices, and reads gauges of GPUs and the host.

`timing` times spans by pairs of CUDA events. `gauge_thread` reads torch's allocator, GPUs (by `gpu_gauges`) and the
operating system. `instrument/docs/gpu.md` explains how exact the times are.

This package never initialises CUDA, makes no CUDA context, and never waits for the device.
"""
