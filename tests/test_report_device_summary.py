"""The Device Summary: rows, numbers and what they are of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.recording.metric_definitions import GAUGES
from instrument.recording.spans import HOST, Gpu, Sample
from instrument.report.device_view import DeviceRow, make_gauge_rows
from instrument.report.device_view import summarise_gauges as summary_of
from instrument.report.view import Options

SECOND = 10**9


def device_summary(samples: Sequence[Sample], gpus: Sequence[Gpu] = (), **options: str) -> str:
    return "\n".join(summary_of(samples, gpus, Options(**options)).section().lines("ms")) + "\n"


def sample(name: str, device: int, at_s: float, value: float | None) -> Sample:
    return Sample(name, device, round(at_s * SECOND), value)


READ = [
    sample("cores", HOST, 1, 4.0),
    sample("process_cpu", HOST, 1, 150.0),
    sample("process_memory", HOST, 1, 2**30),
    sample("system_cpu", HOST, 1, 40.0),
    sample("energy", 0, 1, 0.0),
    sample("sm_active", 0, 1, None),
    sample("utilization", 0, 1, 0),
    sample("utilization", 1, 1, None),
    sample("process_cpu", HOST, 2, 50.0),
    sample("energy", 0, 2, 300.5),
    sample("utilization", 0, 2, 90),
]


def test_it_names_rows_as_paddle_does_and_says_what_each_share_is_of() -> None:
    expected = """
-------------------------      Device Summary       -------------------------

Read from first to last: 1000 ms, every 1000 ms
Mean, Min., Max.: of the samples; Sum: growth; n/a: the device does not report it
GPU 0: NVIDIA H200, GPU-aaaa

Device        Gauge                 Unit   Samples  Mean        Min.        Max.        Sum
CPU(Process)  cores                 cores  1        4           4           4           -
CPU(Process)  process_cpu           %      2        100         50          150         -
CPU(Process)  process_memory        MiB    1        1024        1024        1024        -
CPU(System)   system_cpu            %      1        40          40          40          -
GPU 0         utilization           %      2        45          0           90          -
GPU 0         energy                J      2        -           -           -           300.5
GPU 0         sm_active             %      0        n/a         n/a         n/a         -
GPU 1         utilization           %      0        n/a         n/a         n/a         -
cores: cores that the process may use, by its affinity and the limits of its control groups
process_cpu: % of one core, by all threads of the process since the reading before
process_memory: MiB resident memory of the process
system_cpu: % of all cores of the machine, by all that runs on it since the reading before
utilization: % of NVML's last sample period (1/6 s to 1 s), in which any kernel ran
energy: J since the first reading
sm_active: % of the streaming multiprocessors, busy on average since the reading before
"""
    assert device_summary(READ, [Gpu(0, "NVIDIA H200", "GPU-aaaa")]) == expected.lstrip("\n")


def test_rows_are_plain_numbers_in_the_units_of_the_gauges() -> None:
    rows = {(row.label, row.gauge): row for row in make_gauge_rows(READ)}
    assert rows["CPU(Process)", "process_memory"] == DeviceRow(
        HOST, "CPU(Process)", "process_memory", 1, 2**30, 2**30, 2**30
    )
    assert rows["GPU 0", "energy"] == DeviceRow(0, "GPU 0", "energy", 2, total=300.5)
    assert rows["GPU 1", "utilization"] == DeviceRow(1, "GPU 1", "utilization", 0)


@pytest.mark.parametrize(("samples", "line"), [([], "No gauges were read."), (READ[:1], "to last: 0 ms\n")])
def test_reports_with_little_or_no_content(samples: list[Sample], line: str) -> None:
    assert line in device_summary(samples)


def test_names_that_are_data_break_no_line() -> None:
    text = device_summary([sample("a\nb", 0, 1, 1.0)], [Gpu(0, "x\ny", "z")])
    assert "a\\nb" in text
    assert "x\\ny" in text


values = st.none() | st.integers(0, 100) | st.floats(0, 1e15)


@given(st.lists(st.builds(sample, st.sampled_from(list(GAUGES)), st.integers(-1, 3), st.integers(0, 9), values)))
def test_every_gauge_of_every_device_has_one_row_within_its_bounds(samples: list[Sample]) -> None:
    samples.sort(key=lambda s: s.at_ns)
    rows = make_gauge_rows(samples)
    assert len(rows) == len({(s.name, s.device) for s in samples})
    assert sum(row.samples for row in rows) == sum(s.value is not None for s in samples)
    for row in rows:
        if row.mean is not None and row.least is not None and row.most is not None:
            assert row.least <= row.mean * (1 + 1e-9)
            assert row.mean <= row.most * (1 + 1e-9)
    text = device_summary(samples)
    assert all(line == line.rstrip() for line in text.splitlines())
