"""Measures the time of spans on devices, and reads gauges of GPUs and the host.

`timing` times spans by pairs of CUDA events, and shows spans in tools such as Nsight Systems. `gauges` reads gauges of
torch's allocator, of GPUs (`nvml`) and of the operating system. `instrument/docs/gpu.md` explains how exact the times
are.

This package never initialises CUDA, makes no CUDA context, and never waits for the device. If a device fails, its
timing ends with a message, and the service is not affected.
"""
