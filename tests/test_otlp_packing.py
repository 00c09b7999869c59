"""The wire: what we pack as the official messages read it, and what they write as we read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2
from otlp_spans import ORIGIN, THREADS, expected_attributes, legal, requests_in, said, span, tree

from instrument.otlp import senders
from instrument.otlp.export_facts import Ids
from instrument.otlp.packed_spans import SpanIds, SpanPacker
from instrument.otlp.packing import EVENT_LIMIT, LinkedSpan
from instrument.otlp.span_forms import JSON, PROTOBUF, Form, split_into_requests
from instrument.recording.spans import BLOCKED_LOOP, DeviceInterval, Origin, Site, Span
from instrument.recording.trace_context import LINK, LINK_TRACE_ID, RemoteParent, make_link_attributes
from instrument.trace.columns import Columns
from instrument.trace.file import Saved
from instrument.trace.merge import merge_recordings
from instrument.trace.trace import Trace, columns_of_spans


def packer(trace: Columns, ids: Ids, form: Form = PROTOBUF, **facts: Any) -> SpanPacker:
    return SpanPacker(form, trace, SpanIds(trace, ids), ORIGIN, THREADS, **facts)


def decoded(spans: Sequence[Span], ids: Ids, **facts: Any) -> list[trace_pb2.Span]:
    """The packed spans as the official messages read them."""
    packed = packer(columns_of_spans(spans), ids, **facts).pack(np.arange(len(spans)))
    found: list[trace_pb2.Span] = []
    for body, count in split_into_requests(packed, b""):
        (of_resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
        (of_scope,) = of_resource.scope_spans
        assert of_scope.scope.name == "instrument"
        assert of_scope.schema_url == "https://opentelemetry.io/schemas/1.45.0"
        assert len(of_scope.spans) == count
        found += of_scope.spans
    return found


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [value_of(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def attributes_of(message: trace_pb2.Span) -> dict[str, Any]:
    found = {pair.key: value_of(pair.value) for pair in message.attributes}
    assert len(found) == len(message.attributes), "an attribute came twice"
    return found


texts = st.text(st.characters(exclude_categories=()), max_size=8)
values = st.one_of(
    texts,
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.lists(texts, max_size=3).map(tuple),
    st.lists(st.booleans(), max_size=2),
)
keys = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6).map("user.".__add__)
attributes = st.dictionaries(keys, values, max_size=4)
times = st.tuples(st.integers(1_000, 2**61), st.integers(0, 2**40)).map(lambda t: (t[0], t[0] + t[1]))
sites = st.builds(
    Site,
    name=texts,
    kind=st.sampled_from(("request", "op", "layer", "user")),
    module=texts,
    qualname=texts,
    file=texts,
    line=st.integers(0, 2**31),
    instance=texts,
    attributes=attributes.map(lambda found: tuple(found.items())),
)
intervals = st.builds(
    lambda device, stream, span_times, label: DeviceInterval(device, stream, *span_times, label, 5),
    st.integers(0, 7),
    st.integers(0, 2**63 - 1),
    times,
    st.sampled_from(("exclusive", "overlapped")),
)
remotes = st.builds(
    RemoteParent,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.integers(0, 255),
    st.booleans(),
    st.booleans(),
    st.sampled_from(("", "vendor=1", "other=2,vendor=3")),
)


@st.composite
def trees(draw: st.DrawFn) -> list[Span]:
    numbers = draw(st.lists(st.integers(1, 2**63 - 1), min_size=1, max_size=5, unique=True))
    places = draw(st.lists(sites, min_size=1, max_size=2))
    found = []
    for place, number in enumerate(numbers):
        start_ns, end_ns = draw(times)
        found.append(
            Span(
                site=draw(st.sampled_from(places)),
                span_id=number,
                parent_id=draw(st.sampled_from(numbers[:place] or [0, 2**63 - 5])),  # the root lies in another tree
                root_id=numbers[0],
                thread_id=draw(st.sampled_from((7, 8, 9))),
                task_id=draw(st.integers(0, 2**62)),
                start_ns=start_ns,
                end_ns=end_ns,
                active_ns=draw(st.sampled_from((end_ns - start_ns, 0))),
                self_ns=draw(st.integers(0, end_ns - start_ns)),
                error=draw(st.none() | texts),
                attributes=draw(attributes),
                device=tuple(draw(st.lists(intervals, max_size=2))),
                clipped=draw(st.booleans()),
                remote=None if place else draw(st.none() | remotes),
            )
        )
    return found


@pytest.mark.slow
@given(trees())
def test_official_messages_read_from_a_packed_tree_what_went_in(spans: list[Span]) -> None:
    ids = Ids()
    messages = iter(decoded(spans, ids))
    remote = spans[0].remote
    trace_id = (ids.trace_id(spans[0].root_id) if remote is None else remote.trace_id).to_bytes(16, "big")
    w3c_flags = 3 if remote is None else remote.flags  # sampled, and random where the id is ours
    for of in spans:
        message = next(messages)
        own_id = ids.span_id(of.span_id).to_bytes(8, "big")
        is_root = of.span_id == of.root_id
        parent_id = ids.span_id(of.parent_id) if not is_root else remote.span_id if remote else None
        from_remote = is_root and remote is not None and not remote.is_local
        serves = of.site.kind == "request" and is_root and not (remote and remote.in_server_span)
        assert message.trace_id == trace_id
        assert message.trace_state == ("" if remote is None else remote.state)
        assert message.span_id == own_id
        assert message.parent_span_id == (b"" if parent_id is None else parent_id.to_bytes(8, "big"))
        assert message.name == legal(of.site.name)
        assert message.kind == (2 if serves else 1)
        assert message.start_time_unix_nano == ORIGIN.realtime_of(of.start_ns)
        assert message.end_time_unix_nano == ORIGIN.realtime_of(of.end_ns)
        assert message.flags == (0x300 if from_remote else 0x100) | w3c_flags
        assert (message.status.code, message.status.message) == (
            (2, legal(of.error)) if of.error is not None else (0, "")
        )
        assert attributes_of(message) == expected_attributes(of)
        for interval in of.device:
            message = next(messages)
            assert (message.trace_id, message.parent_span_id) == (trace_id, own_id)
            assert message.trace_state == ("" if remote is None else remote.state)
            assert message.name == legal(of.site.name) + " (device)"
            assert (message.kind, message.flags) == (1, 0x100 | w3c_flags)
            assert message.start_time_unix_nano == ORIGIN.realtime_of(interval.start_ns)
            assert message.end_time_unix_nano == ORIGIN.realtime_of(interval.end_ns)
            assert attributes_of(message) == {
                "cuda.device.index": interval.device,
                "instrument.device.stream": said(interval.stream),
                "instrument.device.label": interval.label,
                "instrument.device.uncertainty_ns": 5,
            }
    assert next(messages, None) is None


@given(trees())
def test_json_says_what_protobuf_says(spans: list[Span]) -> None:
    ids, trace, rows = Ids(), columns_of_spans(spans), np.arange(len(spans))
    links = {0: [LinkedSpan(5, 6), LinkedSpan(7, 8, "vendor=1")]}
    hits = {0: [replace(spans[-1], device=())]}
    found = []
    for form in (PROTOBUF, JSON):
        ids._device_number = 1 << 63
        its = packer(trace, ids, form, links=links, interruptions=hits).pack(rows)
        if form is PROTOBUF:
            (body,) = split_into_requests(its, b"")
            request = ExportTraceServiceRequest.FromString(body.data)
        else:
            ((pieces, sizes, ends),) = its
            text = b"".join(pieces.ravel().tolist())
            assert (len(text), len(pieces)) == (sizes.sum(), ends[-1])
            line = '{"resourceSpans":[{"scopeSpans":[{"spans":[' + text[1:].decode() + "]}]}]}"
            (request,) = requests_in([line])
        found.append([sorted_attributes(one) for one in request.resource_spans[0].scope_spans[0].spans])
    of_protobuf, of_json = found
    assert of_json == of_protobuf
    assert [link.trace_state for link in of_json[0].links] == ["", "vendor=1"]
    (event,) = of_json[0].events
    assert event.time_unix_nano == ORIGIN.realtime_of(spans[-1].start_ns)


def sorted_attributes(message: trace_pb2.Span) -> trace_pb2.Span:
    """The span as JSON can hold it, by the names of its attributes."""
    for link in message.links:
        link.flags = 0
    for one in (message, *message.events):
        one.attributes.sort(key=lambda pair: pair.key)
    return message


def test_the_longest_interruptions_of_a_span_are_its_events_and_the_others_are_counted() -> None:
    hits = [span(BLOCKED_LOOP, 10 + at, start_ns=100 * at, end_ns=101 * at + 1) for at in range(EVENT_LIMIT + 3)]
    (message, other) = decoded([span(), span(span_id=2, root_id=2)], Ids(), interruptions={0: hits})
    assert [one.time_unix_nano for one in message.events] == [ORIGIN.realtime_of(one.start_ns) for one in hits[3:]]
    assert (message.dropped_events_count, other.dropped_events_count, len(other.events)) == (3, 0, 0)


def test_requests_keep_to_their_bounds() -> None:
    spans = [*tree(500), *tree(300, 1_000, device=(DeviceInterval(0, 1, 2_000, 3_000),))]
    trace, ids = columns_of_spans(spans), Ids()
    packed = list(packer(trace, ids).pack(np.arange(len(trace))))
    most = int(packed[0].sizes.max())
    for most_bytes, most_spans in ((1 << 20, 400), (10 * most, 4_000), (1, 4_000)):
        bodies = list(split_into_requests(packed, b"", most_bytes, most_spans))
        messages = [ExportTraceServiceRequest.FromString(body.data).resource_spans[0] for body in bodies]
        counts = [len(one.scope_spans[0].spans) for one in messages]
        assert [body.spans for body in bodies] == counts
        assert sum(counts) == 1_100
        assert max(counts) <= most_spans
        assert max(len(body.data) for body in bodies) <= max(most_bytes, most) + 100
        assert len({one.span_id for message in messages for one in message.scope_spans[0].spans}) == 1_100


def test_spans_of_several_processes_have_the_ids_that_each_process_gave() -> None:
    """A parent in another process has that one's id, and one that has no row the id of the process that named it."""
    own = [tree(4, 10), [*tree(3, 10), span(span_id=40, parent_id=39, root_id=38)]]
    saved = [
        Saved(replace(recorded(replace(ORIGIN, pid=pid, boot="one")), spans=spans), None)
        for pid, spans in enumerate(own, start=1)
    ]
    merged = merge_recordings(saved)
    trace = merged.saved.trace.columns
    first, second = merged.saved.trace.processes
    process = np.zeros(len(trace), dtype=np.int64)
    process[merged.parts[1].row] = 1
    moved = np.flatnonzero((process == 1) & (trace.own_id == 10))
    parent_id, root_id = trace.parent_id.copy(), trace.root_id.copy()
    top = trace.span_id[merged.parts[0].row[0]]
    parent_id[moved], root_id[trace.root_id == trace.span_id[moved]] = top, top
    trace = replace(trace, parent_id=parent_id, root_id=root_id)
    ids = [Ids(), Ids()]
    span_ids = SpanIds(trace, ids, process, second.absent)
    rows = merged.parts[1].row
    its = SpanPacker(PROTOBUF, trace, span_ids, ORIGIN, THREADS, part=second).pack(rows)
    (body,) = split_into_requests(its, b"")
    messages = ExportTraceServiceRequest.FromString(body.data).resource_spans[0].scope_spans[0].spans
    one, other = ids
    known = [
        tuple(int.from_bytes(its, "big") for its in (message.trace_id, message.span_id, message.parent_span_id))
        for message in messages
    ]
    assert known == [
        (one.trace_id(10), other.span_id(10), one.span_id(10)),
        (one.trace_id(10), other.span_id(11), other.span_id(10)),
        (one.trace_id(10), other.span_id(12), other.span_id(10)),
        (other.trace_id(38), other.span_id(40), other.span_id(39)),
    ]
    assert {attributes_of(message)["thread.id"] for message in messages} == {7}
    assert first.threads != second.threads


def recorded(origin: Origin) -> Trace:
    """The facts of a process, without its spans."""
    return Trace(origin, 0, 10_000, [], THREADS)


@pytest.mark.parametrize("trace_id", [None, 0xABC << 64])
def test_a_root_is_linked_to_the_span_that_its_task_came_from(trace_id: int | None) -> None:
    ids = Ids()
    link = make_link_attributes(5, 3, None if trace_id is None else RemoteParent(trace_id, 9))
    spans = [span(span_id=8, root_id=8, attributes={"user.rows": 4, **link})]
    (message,) = decoded(spans, ids)
    in_trace = ids.trace_id(3) if trace_id is None else trace_id
    expected = in_trace.to_bytes(16, "big"), ids.span_id(5).to_bytes(8, "big")
    (found,) = message.links
    assert (found.trace_id, found.span_id, found.flags) == (*expected, 0x100)
    assert not message.parent_span_id
    assert attributes_of(message)["user.rows"] == 4
    assert not link.keys() & attributes_of(message).keys()


@pytest.mark.parametrize("link", ["5", (), (1,), ("x", "y"), (1.5, 2), [None, 3], {"a": 1}])
def test_an_attribute_that_only_looks_like_a_link_is_none(link: Any) -> None:
    (message,) = decoded([span(attributes={LINK: link})], Ids())
    assert not message.links
    (message,) = decoded([span(attributes={LINK: (1, 2), LINK_TRACE_ID: "no digits"})], Ids())
    assert not message.links


@pytest.mark.parametrize(
    ("direction", "memcpy_kind"),
    [
        ("h2d", "MemcpyHostToDevice"),
        ("d2h", "MemcpyDeviceToHost"),
        ("d2d", "MemcpyDeviceToDevice"),
        ("p2p", "MemcpyDeviceToDevice"),
        ("h2h", "MemcpyHostToHost"),
    ],
)
@pytest.mark.parametrize("on_site", [True, False])
def test_a_copy_names_its_kind_as_cuda_does_and_its_device_span_too(
    direction: str, memcpy_kind: str, on_site: bool
) -> None:
    site = Site("to", "copy", attributes=(("direction", direction),) if on_site else ())
    given_attributes = {"bytes": 4096, "pinned": True, "sync": False, "note": "x"}
    given_attributes |= {} if on_site else {"direction": direction}
    copy, on_device = decoded([span(site, attributes=given_attributes, device=(DeviceInterval(1, 3, 1, 2),))], Ids())
    ours = {
        "cuda.memcpy.kind": memcpy_kind,
        "instrument.direction": direction,
        "instrument.bytes": 4096,
        "instrument.pinned": True,
        "instrument.sync": False,
        "note": "x",
    }
    assert ours.items() <= attributes_of(copy).items()
    assert not {"direction", "bytes", "pinned", "sync"} & attributes_of(copy).keys()
    assert {"cuda.memcpy.kind": memcpy_kind, "instrument.bytes": 4096}.items() <= attributes_of(on_device).items()


def test_a_region_of_a_model_says_what_it_is() -> None:
    (message,) = decoded([span(Site("MLP", "layer", attributes=(("region", "compiled"),)))], Ids())
    assert attributes_of(message)["instrument.region"] == "compiled"
    assert "region" not in attributes_of(message)


def test_a_span_that_is_no_copy_keeps_its_bytes_under_their_own_name() -> None:
    (message,) = decoded([span(attributes={"bytes": 5, "direction": "h2d"})], Ids())
    assert attributes_of(message) == {
        "bytes": 5,
        "direction": "h2d",
        "instrument.kind": "op",
        "instrument.self_ns": 3_000,
        "thread.id": 7,
        "thread.name": "MainThread",
    }


def test_a_spans_attribute_wins_over_its_sites_and_ours_over_both() -> None:
    site = Site("op", "op", attributes=(("size", 1), ("colour", "red"), ("thread.id", -1), ("instrument.kind", "mine")))
    (message,) = decoded([span(site, attributes={"size": 2, "instrument.self_ns": 0, "code.file.path": "x"})], Ids())
    found = attributes_of(message)
    assert found["size"] == 2
    assert found["colour"] == "red"
    assert (found["thread.id"], found["instrument.kind"], found["instrument.self_ns"]) == (7, "op", 3_000)
    assert "code.file.path" not in found


class Tensor:
    """A tensor whose content may not be looked at."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"looked into with {name}")

    __str__ = __repr__ = __int__ = __float__ = __index__ = __len__ = __iter__ = lambda self: self.looked  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (2**63, str(2**63)),
        (1 << 40_000, hex(1 << 40_000)),
        (True, True),
        (-0.5, -0.5),
        (float("inf"), float("inf")),
        ((1, "a", True), [1, "a", True]),
        ([], []),
        (range(3), [0, 1, 2]),
        (None, "<NoneType>"),
        (b"secret", "<bytes>"),
        (Tensor(), "<Tensor>"),
        ([Tensor()], ["<Tensor>"]),
        ({"a": 1}, "<dict>"),
        (type("Name", (str,), {"__str__": lambda self: "lie"})("truth"), "truth"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_arrives_as_otlp_can_say_it(value: Any, arrives: Any) -> None:
    (message,) = decoded([span(attributes={"value": value})], Ids())
    assert attributes_of(message)["value"] == arrives


def test_two_who_send_for_one_process_give_no_two_device_intervals_one_id() -> None:
    own = Ids()
    other = Ids(own.seeds, own.instance)
    assert own.span_id(7) == other.span_id(7)
    found = [ids.span_id(ids.reserve_numbers(1)) for ids in (own, other) for _ in range(1_000)]
    assert len(set(found)) == len(found)


def test_numbers_of_numpy_arrive_as_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    (message,) = decoded([span(attributes={"i": numpy.int32(-3), "f": numpy.float32(0.5), "a": numpy.ones(9)})], Ids())
    found = attributes_of(message)
    assert (found["i"], found["f"], found["a"]) == (-3, 0.5, "<ndarray>")


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1, 2**63, -5 % 2**64])
def test_ids_are_distinct_and_never_zero_with_any_seed(seed: int) -> None:
    ids = Ids()
    ids._seed, ids._trace_seeds = seed, [seed, seed]
    found = [ids.span_id(number) for number in range(1, 3_000)]
    found += [ids.span_id(ids.reserve_numbers(1)) for _ in range(3_000)]
    found += [ids.span_id(number) for number in range(2**63 - 3_000, 2**63)]
    assert len(set(found)) == len(found)
    assert all(0 < found_id < 2**64 for found_id in found)
    traces = [ids.trace_id(number) for number in range(1, 3_000)]
    assert len(set(traces)) == len(traces)
    assert all(trace_id >> 64 > 0 and trace_id & (2**64 - 1) > 0 for trace_id in traces)


def test_two_processes_share_no_ids() -> None:
    one, other = Ids(), Ids()
    assert one.instance != other.instance
    assert not {one.span_id(n) for n in range(1, 2_000)} & {other.span_id(n) for n in range(1, 2_000)}
    assert one.trace_id(1) != other.trace_id(1)


@given(st.integers(-(2**63), 2**63 - 1), st.text(max_size=200))
def test_a_partial_success_is_read_as_the_official_message_wrote_it(rejected: int, message: str) -> None:
    partial = ExportTracePartialSuccess(rejected_spans=rejected, error_message=message)
    answer = ExportTraceServiceResponse(partial_success=partial).SerializeToString()
    assert senders.parse_partial_success(answer) == (max(0, rejected), message)


@given(st.binary(max_size=40))
def test_an_answer_that_is_no_message_breaks_nothing(answer: bytes) -> None:
    rejected, message = senders.parse_partial_success(answer)
    assert rejected >= 0
    assert isinstance(message, str)
