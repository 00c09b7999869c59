"""Measures the time of spans on devices, and reads gauges of GPUs and the host.

`timing` and the modules that it uses time spans by pairs of CUDA events. `gauges` reads gauges of torch's allocator, of
GPUs by `nvml`, and of the operating system. `nvtx` shows spans in tools such as Nsight Systems.
`instrument/docs/gpu.md` explains what is timed, what the labels of intervals mean, and how exact the times are.

The SDK never initialises CUDA or makes a CUDA context, and no call waits for the device. If a device fails, its timing
ends with a message, and the service is not affected. Device intervals take an eighth of `limits.ring` in addition to
it.

On an H200 (driver 580, CUDA 13, in a virtual machine), the times of intervals were right within their stated
uncertainty, 4 to 600 us. The clocks of device and host differed by 4 ppm. Streams have the same numbers as in CUPTI,
except the default stream, which is 0 here and 7 in CUPTI. A program with CUDA host functions in Python hung with
`device: {gil: hold}`, as documented, but never without this setting.
"""
