"""The `overview` view: Paddle's table where it is right, and every union from spans at random."""

from __future__ import annotations

import json

import pytest
from golden_views import is_golden, text_of
from hypothesis import given
from paddle_golden import GOLDEN, golden_trace
from raw_spans import lies_in, points, timed, traces

from instrument.recording.spans import Origin, Site, Span
from instrument.report.overview_view import ALL_DEVICES, Overview, overview
from instrument.report.view import Options, Recording, make_json_values
from instrument.trace.trace import Trace

MS = 1_000_000


def view(trace: Trace, **options: object) -> Overview:
    return overview(Recording.from_trace(trace), Options(**options))  # type: ignore[arg-type]


def paddle_rows() -> dict[str, list[str]]:
    """Calls, time and ratio of each row of Paddle's table; those of the device under `GPU` and their name."""
    text = (GOLDEN / "paddle_synthetic_summary.txt").read_text().split("Overview Summary-")[1].split("Note:")[0]
    rows: dict[str, list[str]] = {}
    prefix = ""
    for line in text.splitlines()[4:]:
        if "GPU Time" in line:
            prefix = "GPU "
        elif not line.startswith("-") and line.strip():
            name, *cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
            rows[prefix + name] = cells
    return rows


def as_paddle(use: object) -> list[str]:
    facts = make_json_values(use)
    return [
        str(facts.get("calls", facts.get("stretches"))),
        f"{facts['time_ns'] / MS:.2f}",
        f"{100 * facts['step_ratio']:.2f}",
    ]


def test_the_rows_are_those_of_paddles_overview() -> None:
    theirs = paddle_rows()
    use = view(golden_trace())
    ours = {one.kind: as_paddle(one) for one in use.kinds}
    assert (use.window_ns, use.steps_ns) == (190 * MS, 180 * MS)
    for kind, row in {
        "step": "ProfileStep",
        "loader": "Dataloader",
        "comm": "Communication",
        "copy": "UserDefined",
    }.items():
        assert ours[kind] == theirs[row]
    devices = {one.work: as_paddle(one) for one in use.devices}
    assert devices["copies"] == theirs["GPU Memcpy"]
    assert devices["communication"] == theirs["GPU Communication"]
    # Theirs counts kernels and memsets apart; the memsets ran beside kernels, so that the union is that of kernels.
    assert theirs["GPU Kernel"] == ["8", "104.00", "57.78"]
    assert devices["compute"] == ["10", "104.00", "57.78"]


def test_a_share_of_steps_is_of_what_is_in_steps() -> None:
    """Paddle sets all of the 6 ms of `MyRecord` against the steps, although 2 of them are between two steps."""
    assert paddle_rows()["PythonUserDefined"] == ["3", "6.00", "3.33"]
    (use,) = [one for one in view(golden_trace()).kinds if one.kind == "user"]
    assert (use.calls, use.time_ns, use.in_steps_ns) == (3, 6 * MS, 4 * MS)
    assert (use.ratio, use.step_ratio) == (6 / 190, 4 / 180)


def test_operators_that_communicate_are_paddles_operators_too() -> None:
    (use,) = [one for one in view(golden_trace(kinds={})).kinds if one.kind == "op"]
    assert as_paddle(use) == paddle_rows()["Operator"]


@given(traces())
def test_every_union_is_that_of_the_raw_spans(trace: Trace) -> None:
    use = view(trace)
    held = trace.coverage
    whole = set(range(*held))
    spans = [span for span in trace.spans if lies_in(span, held)]
    by_id = {span.span_id: span for span in trace.spans}

    def within(span: Span) -> list[str]:
        kinds, up = [span.site.kind], by_id.get(span.parent_id)
        while up is not None:
            kinds.append(up.site.kind)
            up = by_id.get(up.parent_id)
        return kinds

    steps = points((span.start_ns, span.end_ns) for span in spans if span.site.kind == "step") & whole
    has_steps = any(span.site.kind == "step" for span in spans)
    assert use.steps_ns == (len(steps) if has_steps else None)

    def facts(covered: set[int]) -> tuple[int, int, float | None, float | None]:
        inside = len(covered & steps)
        step_ratio = inside / len(steps) if steps else None
        return len(covered), inside, len(covered) / len(whole), step_ratio

    assert {one.kind: (one.calls, (one.time_ns, one.in_steps_ns, one.ratio, one.step_ratio)) for one in use.kinds} == {
        kind: (
            sum(span.site.kind == kind for span in spans),
            facts(points((span.start_ns, span.end_ns) for span in spans if span.site.kind == kind) & whole),
        )
        for kind in {span.site.kind for span in spans}
    }
    expected = {}
    devices = sorted({one.device for span in trace.spans for one in span.device if one.label != "dropped"})
    asked = {
        "busy": lambda span: True,
        "compute": lambda span: span.site.kind != "copy",
        "communication": lambda span: "comm" in within(span) and span.site.kind != "copy",
        "copies": lambda span: span.site.kind == "copy",
    }
    for device in [ALL_DEVICES, *devices]:
        for work, is_asked in asked.items():
            parts = [
                part
                for span in trace.spans
                if is_asked(span)
                for one in span.device
                if device in (one.device, ALL_DEVICES)
                for part in timed(Span(span.site, 0, 0, 0, 0, 0, 0, 0, 0, 0, device=(one,)), held)
            ]
            if parts:
                expected[device, work] = (len(parts), facts(points(parts)))
    if len({device for device, _ in expected}) == 2:
        expected = {key: value for key, value in expected.items() if key[0] != ALL_DEVICES}
    assert {
        (one.device, one.work): (one.stretches, (one.time_ns, one.in_steps_ns, one.ratio, one.step_ratio))
        for one in use.devices
    } == expected


def test_layout() -> None:
    is_golden("overview", text_of(view(golden_trace())))


@pytest.mark.parametrize("state", ["CPU", "GPU"])
def test_a_state_shows_its_own_rows(state: str) -> None:
    use = view(golden_trace(), state=state)
    assert (bool(use.kinds), bool(use.devices)) == (state == "CPU", state == "GPU")
    assert "Device 0" in text_of(use) or state == "CPU"
    assert "No " not in text_of(use)


def test_without_spans_it_says_what_to_do() -> None:
    text = text_of(view(Trace(Origin(1, "", 0, 0), 0, 5, [])))
    assert text.endswith("No span was recorded in it: name functions or layers in the profile, or open a scope.\n")


def test_without_device_time_it_says_so() -> None:
    trace = Trace(Origin(1, "", 0, 0), 0, 5, [Span(Site("f", "op"), 1, 0, 1, 1, 0, 0, 5, 5, 5)])
    assert text_of(view(trace)).endswith("No device time was recorded in it.\n")


def test_the_document_holds_the_numbers_of_the_text() -> None:
    said = json.loads(json.dumps(make_json_values(view(golden_trace()))))
    assert said["kinds"][0]["time_ns"] == said["steps_ns"] == 180 * MS
    assert [one["work"] for one in said["devices"]] == ["busy", "compute", "communication", "copies"]
