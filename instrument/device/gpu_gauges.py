"""Reads gauges of GPUs by NVML, NVIDIA's management library, without CUDA.

The gauges cover the GPUs that CUDA shows to this process (`CUDA_VISIBLE_DEVICES`). A call may take milliseconds, or
hang with the driver. One thread calls all functions except `explain_missing_nvml` and `explain_unreadable_gpus`.
"""

from __future__ import annotations

import os
import re
from _ctypes import dlopen
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from instrument.recording.spans import Gpu
from instrument.runtime.lazy_imports import dataclass, field

LIBRARY = "libnvidia-ml.so.1"

NO_DRIVER = f"no NVIDIA driver is visible here ({LIBRARY} is not found)"

VARIABLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"

GPM_NS = 100 * 10**6
"""The minimum ns between two samples of NVML's performance counters, GPM (NVML reference, `nvmlGpmSampleGet`)."""

ENERGY_NS = 400 * 10**6
"""The minimum ns between two energy readings from which an average power is computed."""

MIB = 2**20

GPM_METRICS: dict[str, tuple[str, float]] = {
    "sm_active": ("SM_UTIL", 1),
    "sm_occupancy": ("SM_OCCUPANCY", 1),
    "tensor_active": ("ANY_TENSOR_UTIL", 1),
    "dram_active": ("DRAM_BW_UTIL", 1),
    "pcie_sent": ("PCIE_TX_PER_SEC", MIB),
    "pcie_received": ("PCIE_RX_PER_SEC", MIB),
    "nvlink_sent": ("NVLINK_TOTAL_TX_PER_SEC", MIB),
    "nvlink_received": ("NVLINK_TOTAL_RX_PER_SEC", MIB),
}
"""The gauges that NVML's performance counters measure, each with NVML's name and the factor to our unit."""

Values = dict[str, float | None]


class NvmlError(Exception):
    """An error after which NVML cannot be used. The message is one line with the reason and the remedy."""


class Closed(Exception):  # noqa: N818 - no error: NVML must be opened again
    """An exception that is raised if other code of the process has shut NVML down."""


def explain_missing_nvml() -> str:
    """Return the reason why NVML cannot be opened, or "". The process must not fork meanwhile.

    Without an NVIDIA driver the call only tries `dlopen`. With a driver it imports `pynvml`, which takes 20 to 40 ms.
    """
    try:
        dlopen(LIBRARY, 0)  # `ctypes` itself takes longer to load than all of this module
    except OSError:
        return NO_DRIVER
    try:
        import pynvml  # the door: imported here, used by `Nvml`
    except (ImportError, Warning) as error:  # a deprecated distribution of that name warns, which may be an error
        return f"there is an NVIDIA driver, but not its Python bindings ({error}); install instrument-sdk[cuda]"
    if not hasattr(pynvml, "NVMLLibraryMismatchError"):
        return f"the bindings {pynvml.__file__} are too old; install nvidia-ml-py>=12.550"
    return ""


def explain_unreadable_gpus() -> str:
    """Return the reason why no GPU can be read, or "". The call opens and closes NVML, which may take seconds."""
    problem = explain_missing_nvml()
    if problem:
        return problem
    nvml = Nvml()
    try:
        nvml.open()
        return "" if nvml.gpus else "; ".join(nvml.notes) or "no GPU is there"
    except NvmlError as error:
        return str(error)
    finally:
        nvml.close()


@dataclass(slots=True, eq=False)
class NvmlDevice:
    """A GPU or MIG instance. `gpm` has two samples of NVML's performance counters, the older one first."""

    handle: Any
    uuid: str
    model: str = ""
    parent: Any = None
    gpu_instance: int = 0
    instances: list[NvmlDevice] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)
    lost: bool = False
    energy_mj: int | None = None
    first_energy_mj: int | None = None
    energy_ns: int = 0
    gpm: list[Any] = field(default_factory=list)
    gpm_ns: int = 0


class Nvml:
    """Reads the gauges of GPUs by NVML, between `open` and `close`.

    `notes` are sentences for the user. `failures` counts calls that failed for unknown reasons. `pid` is the process
    whose GPUs and memory are read.
    """

    def __init__(self, pid: int | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.gpus: list[Gpu] = []
        self.notes: list[str] = []
        self.failures = 0
        self._pid = os.getpid() if pid is None else pid
        self._environ = environ
        self._open = False
        self._devices: list[NvmlDevice] = []
        self._shown: list[NvmlDevice] = []
        self._variable: str | None = None
        self._metrics: Any = None

    def open(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
            self._open = True
            self._find_gpus(pynvml)
        except pynvml.NVMLError as error:
            raise NvmlError(_describe_error(pynvml, error)) from error

    def close(self) -> None:
        if not self._open:
            return
        import pynvml

        self._open = False
        try:
            for device in (*self._devices, *(instance for gpu in self._devices for instance in gpu.instances)):
                for sample in device.gpm:
                    pynvml.nvmlGpmSampleFree(sample)
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            pass  # the driver has gone before us, or other code has shut NVML down
        self._shown, self._devices = [], []

    def read(self, now_ns: int, rarely: bool) -> list[tuple[int, Values]]:
        """Read the gauges of each GPU. Raises an exception if the driver has gone, or if NVML must be opened again."""
        import pynvml

        if self._environ.get(VARIABLE) != self._variable:
            self._update_visible_gpus()
        readings = [*_OFTEN, *(_RARELY if rarely else ())]
        return [
            (gpu.device, self._read_gpu(pynvml, gpu, device, readings, now_ns))
            for gpu, device in zip(self.gpus, self._shown, strict=True)
        ]

    @property
    def gpu_count(self) -> int:
        """The number of GPUs, including those that are not read."""
        return len(self._devices)

    # ------------------------------------------------------------ the choice of GPUs

    def _find_gpus(self, nvml: Any) -> None:
        places: list[tuple[tuple[int, int, int], NvmlDevice]] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                pci = nvml.nvmlDeviceGetPciInfo(handle)
                device = NvmlDevice(handle, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle))
                device.instances = list(_find_mig_instances(nvml, handle))
            except nvml.NVMLError as error:
                self._add_note(f"GPU {index} of NVML is left out: {_describe_error(nvml, error)}")
                continue
            places.append(((pci.domain, pci.bus, pci.device), device))
        self._devices = [device for _, device in sorted(places, key=lambda place: place[0])]
        self._update_visible_gpus()

    def _update_visible_gpus(self) -> None:
        self._variable = self._environ.get(VARIABLE)
        for device in self._shown:
            device.energy_mj = device.first_energy_mj = None
        self._shown = select_visible_gpus(self._variable, self._devices)
        self.gpus = [Gpu(number, device.model, device.uuid) for number, device in enumerate(self._shown)]
        if self._devices and not self._shown:
            self._add_note(f"{VARIABLE}={self._variable!r} shows none of {len(self._devices)} GPUs; no GPU is read")
        ordered = self._environ.get(ORDER) == "PCI_BUS_ID"
        if not ordered and len({device.model for device in self._devices}) > 1 and self._shown:
            self._add_note(
                "GPUs of several models: they are numbered by PCI bus here, and fastest first by CUDA; "
                "CUDA_DEVICE_ORDER=PCI_BUS_ID makes both the same"
            )

    def _add_note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # ------------------------------------------------------------ the gauges

    def _read_gpu(self, nvml: Any, gpu: Gpu, device: NvmlDevice, readings: Sequence[_Reading], now_ns: int) -> Values:
        values: Values = {}
        for gauges, ask in readings:
            names = [name for name in gauges if name not in device.absent]
            if not names or device.lost:
                continue
            try:
                values.update(ask(self, nvml, device, now_ns))
            except (nvml.NVMLError, nvml.NVMLLibraryMismatchError) as error:
                values.update(dict.fromkeys(names))
                self._stop_failed_gauges(nvml, gpu, device, names, error)
        if device.lost:  # reported once, and not read again
            names = [name for gauges, _ in (*_OFTEN, *_RARELY) for name in gauges if name not in device.absent]
            device.absent.update(names)
            values = {**dict.fromkeys(names), **values}
        return values

    def _stop_failed_gauges(
        self, nvml: Any, gpu: Gpu, device: NvmlDevice, names: Sequence[str], error: Exception
    ) -> None:
        code = getattr(error, "value", nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        if code == nvml.NVML_ERROR_UNINITIALIZED:
            raise Closed from error
        if code in (nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH):
            raise NvmlError(_describe_error(nvml, error)) from error
        if code in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
            device.lost = True
            self._add_note(f"GPU {gpu.device} ({device.model}, {device.uuid}) is no longer read: {error}")
        elif code in (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_INVALID_ARGUMENT,  # how some drivers answer for a MIG instance
            nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            nvml.NVML_ERROR_DEPRECATED,
        ):
            device.absent.update(names)
        elif code not in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_NO_DATA, nvml.NVML_ERROR_NOT_READY):
            self.failures += 1

    def _read_utilization(self, nvml: Any, device: NvmlDevice, _: int) -> Values:
        rates = nvml.nvmlDeviceGetUtilizationRates(device.handle)
        return {"utilization": rates.gpu, "memory_active": rates.memory}

    def _read_memory(self, nvml: Any, device: NvmlDevice, _: int) -> Values:
        """Read the GPU's memory. Like nvidia-smi, leave out the memory of the driver."""
        memory = nvml.nvmlDeviceGetMemoryInfo(device.handle, version=nvml.nvmlMemory_v2)
        return {"memory_used": memory.used, "memory_total": memory.total}

    def _read_power(self, nvml: Any, device: NvmlDevice, now_ns: int) -> Values:
        if device.energy_mj is not None and now_ns - device.energy_ns >= ENERGY_NS:
            return {}  # `_read_energy` has it
        return {"power": nvml.nvmlDeviceGetPowerUsage(device.handle) / 1e3}

    def _read_energy(self, nvml: Any, device: NvmlDevice, now_ns: int) -> Values:
        before_mj, before_ns = device.energy_mj, device.energy_ns
        energy_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(device.handle)
        if before_mj is None or energy_mj < before_mj:  # the first reading, or the driver was reloaded
            device.first_energy_mj = energy_mj - ((before_mj or 0) - (device.first_energy_mj or 0))
        device.energy_mj, device.energy_ns = energy_mj, now_ns
        values: Values = {"energy": (energy_mj - (device.first_energy_mj or 0)) / 1e3}
        if before_mj is not None and now_ns - before_ns >= ENERGY_NS:
            values["power"] = (energy_mj - before_mj) * 1e6 / (now_ns - before_ns) if energy_mj >= before_mj else None
        return values

    def _read_temperature(self, nvml: Any, device: NvmlDevice, _: int) -> Values:
        return {"temperature": nvml.nvmlDeviceGetTemperature(device.handle, nvml.NVML_TEMPERATURE_GPU)}

    def _read_clocks(self, nvml: Any, device: NvmlDevice, _: int) -> Values:
        kinds = {"sm_clock": nvml.NVML_CLOCK_SM, "memory_clock": nvml.NVML_CLOCK_MEM}
        return {name: nvml.nvmlDeviceGetClockInfo(device.handle, kind) for name, kind in kinds.items()}

    def _read_process_memory(self, nvml: Any, device: NvmlDevice, _: int) -> Values:
        """Read the process's memory. NVML does not know processes in other pid namespaces (containers)."""
        used = [p.usedGpuMemory for p in nvml.nvmlDeviceGetComputeRunningProcesses(device.handle) if p.pid == self._pid]
        sizes = [size for size in used if size is not None]
        return {"memory_of_process": sum(sizes) if sizes else None}

    def _read_gpm(self, nvml: Any, device: NvmlDevice, now_ns: int) -> Values:
        handle = device.handle if device.parent is None else device.parent
        if not device.gpm:
            if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                device.absent.update(GPM_METRICS)
                return dict.fromkeys(GPM_METRICS)
            device.gpm = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        elif now_ns - device.gpm_ns < GPM_NS:
            return {}
        before, fresh = device.gpm
        if device.parent is None:
            nvml.nvmlGpmSampleGet(handle, fresh)
        else:
            nvml.nvmlGpmMigSampleGet(handle, device.gpu_instance, fresh)
        is_first, device.gpm_ns = not device.gpm_ns, now_ns
        device.gpm = [fresh, before]
        return {} if is_first else self._convert_gpm(nvml, device, before, fresh)

    def _convert_gpm(self, nvml: Any, device: NvmlDevice, before: Any, fresh: Any) -> Values:
        metrics_read = [(name, *GPM_METRICS[name]) for name in GPM_METRICS if name not in device.absent]
        metrics = self._metrics = self._metrics or nvml.c_nvmlGpmMetricsGet_t()  # 19 KB, made once
        metrics.version = nvml.NVML_GPM_METRICS_GET_VERSION
        metrics.numMetrics, metrics.sample1, metrics.sample2 = len(metrics_read), before, fresh
        for place, (_, metric, _) in enumerate(metrics_read):
            metrics.metrics[place].metricId = getattr(nvml, f"NVML_GPM_METRIC_{metric}")
        nvml.nvmlGpmMetricsGet(metrics)
        values: Values = {}
        for place, (name, _, scale) in enumerate(metrics_read):
            answer = metrics.metrics[place]
            number = answer.value * scale
            values[name] = number if answer.nvmlReturn == nvml.NVML_SUCCESS and number == number else None
            if answer.nvmlReturn == nvml.NVML_ERROR_NOT_SUPPORTED:
                device.absent.add(name)
        return values


_Reading = tuple[tuple[str, ...], Callable[[Nvml, Any, NvmlDevice, int], Values]]
"""The names of gauges, and the method that reads them."""

_OFTEN: tuple[_Reading, ...] = (
    (("utilization", "memory_active"), Nvml._read_utilization),
    (("memory_used", "memory_total"), Nvml._read_memory),
    (("power",), Nvml._read_power),
    (("energy",), Nvml._read_energy),
    (tuple(GPM_METRICS), Nvml._read_gpm),
)
_RARELY: tuple[_Reading, ...] = (
    (("temperature",), Nvml._read_temperature),
    (("sm_clock", "memory_clock"), Nvml._read_clocks),
    (("memory_of_process",), Nvml._read_process_memory),
)


def select_visible_gpus(variable: str | None, devices: Sequence[NvmlDevice]) -> list[NvmlDevice]:
    """Return the GPUs or MIG instances that CUDA shows for a value of `CUDA_VISIBLE_DEVICES`.

    `devices` are all GPUs, in the order of PCI buses.
    """
    if variable is None:
        chosen = list(devices)
    elif variable.startswith("MIG-"):
        chosen = _select_by_uuid_prefix(variable, "MIG-", [instance for gpu in devices for instance in gpu.instances])[
            :1
        ]
    elif variable.startswith("GPU-"):
        chosen = _select_by_uuid_prefix(variable, "GPU-", devices)
    else:
        chosen = []
        for part in variable.split(","):
            number = re.match(r"\s*([+-]?[0-9]+)", part)
            if number is None or not 0 <= int(number[1]) < len(devices):
                break
            if devices[int(number[1])] in chosen:
                return []
            chosen.append(devices[int(number[1])])
    # CUDA shows one MIG instance, and no whole GPU with it.
    instances = [instance for gpu in chosen for instance in gpu.instances]
    return instances[:1] or chosen


def _select_by_uuid_prefix(variable: str, prefix: str, devices: Sequence[NvmlDevice]) -> list[NvmlDevice]:
    chosen: list[NvmlDevice] = []
    for part in variable.split(","):
        matching = [device for device in devices if device.uuid.startswith(part)]
        if not part.startswith(prefix) or len(matching) != 1:
            break
        if matching[0] in chosen:
            return []
        chosen += matching
    return chosen


def _find_mig_instances(nvml: Any, handle: Any) -> Sequence[NvmlDevice]:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        room = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current else 0
    except nvml.NVMLError:
        return []  # no MIG on this device
    instances = []
    for index in range(room):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            uuid, model = nvml.nvmlDeviceGetUUID(instance), nvml.nvmlDeviceGetName(instance)
            instances.append(NvmlDevice(instance, uuid, model, handle, nvml.nvmlDeviceGetGpuInstanceId(instance)))
        except nvml.NVMLError:
            continue  # an empty place
    return instances


def _describe_error(nvml: Any, error: Exception) -> str:
    advice = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: f"{LIBRARY} is not found",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel driver is not loaded, or the container has no access",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was upgraded while this container or machine ran; restart",
        nvml.NVML_ERROR_NO_PERMISSION: "this user may not open the NVIDIA devices; see /dev/nvidia*",
        nvml.NVML_ERROR_GPU_IS_LOST: "a GPU has fallen off its bus; reset it or restart the machine",
    }.get(getattr(error, "value", None))
    return f"NVML: {error}" + (f" ({advice})" if advice else "")
