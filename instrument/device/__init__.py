"""Measures the time of spans on devices, and reads gauges of GPUs and the host.

`timing` and the modules that it uses time spans by pairs of CUDA events. `gauges` reads gauges of torch's allocator, of
GPUs by `nvml`, and of the operating system. `nvtx` shows spans in tools such as Nsight Systems.
`instrument/docs/gpu.md` explains what is timed, and how exact the times are.

The SDK never initialises CUDA or makes a CUDA context, and no call waits for the device. If a device fails, its timing
ends with a message, and the service is not affected.
"""
