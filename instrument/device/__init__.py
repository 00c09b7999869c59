"""Measures the time of spans on devices, and reads gauges of GPUs and the host.

`timer` and its modules time spans by pairs of CUDA events. `gauges` reads gauges of torch's allocator, of GPUs by
`nvml`, and of the operating system. Nothing here initialises a device. A vendor's bindings are imported only with a
driver.

A span that asks for device time records one CUDA event on the current stream of torch, cupy or numba when it begins,
and one when it ends. A layer is timed on the devices of its parameters. A call is timed on the devices of the torch
model of its object, of its arguments or of its code, else on the devices of its tensors. The call then has an interval
on each of them (see `instrument.instrumentors.work`). A scope, and any other span, is timed on the device that is
current when it begins. A thread of ours polls for events that have happened and places them on the host's clock. No
call waits for the device, CUDA is never initialised, no context is made and CUPTI is not used, so Nsight and
torch.profiler may run at the same time. A stream that is being captured is left alone; each replay of a torch CUDA
graph is one span. Hosts without cuda-bindings, and ROCm, are timed by torch's own events.

An interval is a part of a stream, not a kernel. It has the uncertainty of its position in time, and a label:
`exclusive`; `overlapped` (another stream's timed work ran meanwhile); `launch-bound` (the stream was idle when the span
ended, or the interval is too short for events: the time is that of launching); `stale` (its length is right, its
position is uncertain); `captured` and `dropped` have no time and are counted. A device that fails is given up and
named; the service is not affected. All intervals together take an additional eighth of `limits.ring`.

Measured on an H200 (driver 580, CUDA 13, in a virtual machine): a pair takes 3.4 us of the stream. On an idle stream an
interval begins some 10 us before its first kernel, the time of a launch. It ends within 3 us of its last kernel's end
by CUPTI. Positions were right within their stated uncertainty, 4 to 600 us. Clocks differed by 4 ppm. Streams have
CUPTI's numbers, except the default one: 0 here and 7 there. A program with host functions in Python hung with `device:
{gil: hold}`, as documented, and never without it.

Under Nsight Systems, or any tool that sets `NVTX_INJECTION64_PATH`, every span except copies is an NVTX range in the
domain `instrument`. Without a tool nothing of that is imported.
"""
