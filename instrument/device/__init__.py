"""Devices: the intervals in which they worked for spans, and gauges of GPUs and host.

`timer` and what it is made of time spans by pairs of events. `gauges` reads gauges now and then, of torch's allocator
itself, of GPUs by `nvml`, and of the operating system by `host`. Nothing here initialises a
device, and a vendor's bindings are imported only where there is a driver.

A span that asks for device time records one CUDA event on the current stream of torch, cupy or numba when it begins,
and one when it ends. A layer is timed on the devices of its parameters. A call is timed on those of the torch
model of its object, of its arguments or of its code, else on those of its tensors. Each device has an interval (see
`instrument.instrumentors.work`). A scope, and all else, is timed on the device that is current when it begins. A thread
of ours asks for events that have happened and puts them on the host's clock. No call waits for the device, CUDA is
never initialised, no context is made and CUPTI is not used, so that Nsight and torch.profiler may run at the same time.
A stream that is being captured is left alone; each replay of a torch CUDA graph is one span. Hosts without
cuda-bindings, and ROCm, are timed by torch's own events.

A pair of events spans a stretch of a stream, not a kernel, so each interval has the uncertainty of its place and a
label: `exclusive`; `overlapped` (another stream's timed work ran meanwhile); `launch-bound` (the stream had run dry
when the span ended, or the stretch is too short for events: launching is what took the time); `stale` (its length is
right, its place is uncertain); `captured` and `dropped` have no time and are counted. A device that fails is given
up and named; the service is not affected. All intervals together take an eighth of `limits.ring` once more.

Seen on an H200 (driver 580, CUDA 13, in a virtual machine): a pair takes 3.4 us of the stream. On a stream that is idle
an interval begins some 10 us before its first kernel, for launching takes so long. It ends within 3 us of the end of
its last one by CUPTI. Places hold within what is stated, 4 to 600 us. Clocks differed by 4 ppm. Streams
have the numbers that CUPTI gives them but for the default one, which is 0 here and 7 there. With
`device: {gil: hold}` a program with host functions in Python did hang, as is said there; without it never.

Under Nsight Systems, or any tool that sets `NVTX_INJECTION64_PATH`, every span but those of copies is an NVTX range in
the domain `instrument`. Without a tool nothing of that is imported.
"""
