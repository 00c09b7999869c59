"""The Device Summary: what each gauge of host and devices read, at least, at most and on average.

Rows are named as in Paddle's Device Summary: `CPU(Process)`, `CPU(System)`, `GPU n`. What every share is a share of
stands below the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from instrument.recording.spans import GAUGES, HOST, Gauge, Gpu, Sample
from instrument.report.section import Section
from instrument.report.table import GAP, LINE, in_unit, number, safe, shorten, wrapped
from instrument.report.view import Options

NOT_TOLD = "n/a"
"""Stands for what a device does not tell."""

NAME_WIDTH = 20
WIDTHS = (14, NAME_WIDTH + GAP, 7, 9, 12, 12, 12, 12)

UNITS = {"bytes": ("MiB", 2**20), "bytes/s": ("GB/s", 10**9)}
"""Units that are shown as larger ones."""

_LABELS = dict.fromkeys(("cores", "process_cpu", "process_memory", "process_memory_peak"), "CPU(Process)")


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One gauge of one device, in the gauge's unit.

    `samples` counts those that told a value. Without any, `mean`, `least`, `most` are None: the device does not tell.
    Of a gauge that counts up they are None too, and `total` is what it grew by from its first sample to its last.
    """

    device: int
    label: str
    gauge: str
    samples: int
    mean: float | None = None
    least: float | None = None
    most: float | None = None
    total: float | None = None

    def unit(self) -> str:
        """In which numbers are shown."""
        return shown_unit(GAUGES[self.gauge])[0] if self.gauge in GAUGES else ""

    def shown(self) -> DeviceRow:
        """The same in that unit."""
        scale = shown_unit(GAUGES[self.gauge])[1] if self.gauge in GAUGES else 1
        numbers = (self.mean, self.least, self.most, self.total)
        mean, least, most, total = (None if one is None else one / scale for one in numbers)
        return replace(self, mean=mean, least=least, most=most, total=total)


def _read(value: float | None, row: DeviceRow) -> str:
    return number(value) if value is not None or row.samples else NOT_TOLD


def device_rows(samples: Iterable[Sample]) -> list[DeviceRow]:
    """The rows in their order: process, machine, then the devices by number; gauges in the order of `GAUGES`."""
    told: dict[tuple[int, str], list[float]] = {}
    for sample in samples:
        values = told.setdefault((sample.device, sample.name), [])
        if sample.value is not None:
            values.append(sample.value)
    places = {name: place for place, name in enumerate(GAUGES)}
    rows = []
    for device, name in sorted(told, key=lambda key: (key[0], places.get(key[1], len(places)), key[1])):
        values = told[device, name]
        label = f"GPU {device}" if device != HOST else _LABELS.get(name, "CPU(System)")
        if not values:
            rows.append(DeviceRow(device, label, name, 0))
        elif name in GAUGES and GAUGES[name].grows:
            rows.append(DeviceRow(device, label, name, len(values), total=values[-1] - values[0]))
        else:
            mean = sum(values) / len(values)
            rows.append(DeviceRow(device, label, name, len(values), mean, min(values), max(values)))
    return rows


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """What the gauges read: a row for each of each device. `interval_ns` is the median between two readings."""

    read_ns: int
    interval_ns: int | None
    gpus: tuple[Gpu, ...]
    rows: tuple[DeviceRow, ...]
    _options: Options

    def section(self) -> Section:
        """Return the table, with the base of every share below it."""
        unit = self._options.unit
        every = "" if self.interval_ns is None else f", every {in_unit(self.interval_ns, unit)} {unit}"
        known = [name for name in dict.fromkeys(row.gauge for row in self.rows) if name in GAUGES]
        return Section(
            "Device Summary", [row.shown() for row in self.rows],
            "label=Device|gauge=Gauge|unit=Unit|samples=Samples|mean=Mean|least=Min.|most=Max.|total=Sum",
            [line for name in known for line in wrapped(f"{name}: {shown_unit(GAUGES[name])[0]} {GAUGES[name].about}")],
            {
                "gauge": lambda row, unit: shorten(safe(row.gauge), NAME_WIDTH),
                "unit": lambda row, unit: row.unit(),
                "mean": lambda row, unit: _read(row.mean, row),
                "least": lambda row, unit: _read(row.least, row),
                "most": lambda row, unit: _read(row.most, row),
                "total": lambda row, unit: number(row.total),
            },
            widths=WIDTHS,
            lead=[
                f"Read from first to last: {in_unit(self.read_ns, unit)} {unit}{every}",
                f"Mean, Min., Max.: of the samples; Sum: growth; {NOT_TOLD}: the device does not tell it",
                *(shorten(f"GPU {gpu.device}: {safe(gpu.model)}, {safe(gpu.uuid)}", LINE) for gpu in self.gpus),
                "",
            ],
            empty=["No gauges were read."],
        )  # fmt: skip


def device_summary(samples: Sequence[Sample], gpus: Sequence[Gpu], options: Options) -> DeviceSummary:
    """The summary. `samples` are those of a trace, by time, and `gpus` its GPUs."""
    return DeviceSummary(
        read_ns=samples[-1].at_ns - samples[0].at_ns if samples else 0,
        interval_ns=_interval_ns(samples),
        gpus=tuple(gpus),
        rows=tuple(device_rows(samples)),
        _options=options,
    )


def _interval_ns(samples: Sequence[Sample]) -> int | None:
    """How far apart the readings were, the median of all gauges."""
    before: dict[tuple[str, int], int] = {}
    gaps = []
    for sample in samples:
        key = sample.name, sample.device
        if key in before:
            gaps.append(sample.at_ns - before[key])
        before[key] = sample.at_ns
    return sorted(gaps)[len(gaps) // 2] if gaps else None


def shown_unit(gauge: Gauge) -> tuple[str, float]:
    """The unit in which values of a gauge are shown, and how many of the gauge's own it has."""
    return UNITS.get(gauge.unit, (gauge.unit, 1))
