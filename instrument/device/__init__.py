"""Measures the time of spans on devices, and reads gauges of GPUs and the host.

`timer` and its modules time spans by pairs of CUDA events. `gauges` reads gauges of torch's allocator, of GPUs by
`nvml`, and of the operating system. Nothing here initialises a device. A vendor's bindings are imported only with a
driver.

A span that asks for device time records one CUDA event on the current stream of torch, cupy or numba when it begins,
and one when it ends. A layer is timed on the devices of its parameters. A call is timed on the devices of its torch
model. The model may be in the call's object, in its arguments or in its code (see `instrument.instrumentors.work`).
Without a model, the call is timed on the devices of its tensors. Any other span is timed on the device that is current
when the span begins. A span on several devices has an interval on each. A thread of ours polls for events that have
happened and places them on the host's clock. The SDK never initialises CUDA or makes a context, and no call waits for
the device. The SDK does not use CUPTI, so Nsight and torch.profiler may run at the same time. A stream that is being
captured is left alone. Each replay of a torch CUDA graph is one span. With ROCm or without cuda-bindings, torch's own
events are used.

An interval is a part of a stream, not a kernel. It has a label, and an uncertainty of its position in time. The label
is `exclusive` except in these cases. `overlapped`: another stream's timed work ran meanwhile. `launch-bound`: the
stream was idle when the span ended, or the interval is too short for events, so the time is that of the launch.
`stale`: the length is right, but the position is uncertain. Intervals with the labels `captured` and `dropped` have no
time and are only counted. If a device fails, its timing ends with a message, and the service is not affected. Intervals
need an eighth of `limits.ring`, in addition to it.

On an H200 (driver 580, CUDA 13, in a virtual machine), a pair of events takes 3.4 us of the stream. On an idle stream
an interval begins some 10 us before its first kernel, the time of a launch. It ends within 3 us of the end that CUPTI
reports for its last kernel. Positions were right within their stated uncertainty, 4 to 600 us. Clocks differed by 4
ppm. Streams have the same numbers as in CUPTI, except the default stream, which is 0 here and 7 in CUPTI. A program
with CUDA host functions in Python hung with `device: {gil: hold}`, as documented, and never without this setting.

Under Nsight Systems, or any tool that sets `NVTX_INJECTION64_PATH`, every span except copies is an NVTX range in the
domain `instrument`. Without such a tool, nothing is imported for NVTX.
"""
