"""The view `batches`, and one request's life: what they say, and how they are laid out."""

from __future__ import annotations

import pytest
from golden_views import is_golden, text_of
from test_ledger import ENGINE, STEP, engine, made

from instrument.errors import TraceError
from instrument.recording.spans import DeviceInterval, Origin, Site, Span
from instrument.report.batches_view import batches
from instrument.report.request_life import RequestLife, make_request_life
from instrument.report.requests_view import requests
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

US = Options(unit="us")
PREFILL = Site("engine.prefill", "step")


def recording_of(spans: list[Span]) -> Recording:
    spans = sorted(spans, key=lambda span: span.start_ns)
    return Recording.from_trace(Trace(Origin(1, "shop", 0, 1_700_000_000 * 10**9), 0, 2000, spans))


def mixed() -> list[Span]:
    """The engine's requests and steps, a prefill with weights that differ, and a batch without anyone."""
    return [
        *engine(),
        made(20, PREFILL, 1000, 1400, thread=ENGINE, batch=["a", "b", "c"], weights=[100, 50, 10.5]),
        made(21, STEP, 1400, 1500, thread=ENGINE, batch=[]),
    ]


def test_the_layout_of_batches() -> None:
    assert is_golden("batches", text_of(batches(recording_of(mixed()), US)))


def test_batches_have_their_sizes_and_how_uneven_they_were() -> None:
    step, prefill = batches(recording_of(mixed()), US).rows
    assert (step.name, step.batches, step.items, step.max_size, step.unbound) == ("engine.step", 6, 8, 2, 1)
    assert step.fill == 8 / 12
    assert step.per_item_ns == step.summed_ns / 8
    assert (prefill.weight, prefill.uneven) == (160.5, pytest.approx(1 - 160.5 / 300))
    (rest,) = batches(recording_of(mixed()), Options(least_ns=10**9)).rows
    assert (rest.remaining, rest.batches, rest.items) == (2, 7, 11)


def on_device() -> list[Span]:
    """The same with device times: of steps, of an uneven prefill, and of a request's own work."""
    spans = mixed()
    for at, start, end in ((8, 215, 275), (10, 440, 541), (12, 1010, 1310), (1, 20, 30)):
        spans[at].device = (DeviceInterval(0, 7, start, end),)
    return spans


def test_the_layout_of_batches_with_device_times() -> None:
    assert is_golden("batches_device", text_of(batches(recording_of(on_device()), US)))


def test_device_time_of_a_batch_is_its_requests_and_part_of_it_may_be_padding() -> None:
    step, prefill = batches(recording_of(on_device()), US).rows
    assert (step.device_ns, step.uneven_ns) == (161, None)
    assert (prefill.device_ns, prefill.uneven_ns) == (300, round(300 * (1 - 160.5 / 300)))
    (chat,) = requests(recording_of(on_device()), US).device_shares
    # Two steps of both requests, of one a quarter; the prefill came when both had ended.
    assert (chat.requests, chat.own_ns, chat.shared_ns) == (2, 10, 60 + 101 + 280)
    assert is_golden("requests_device", text_of(requests(recording_of(on_device()), US)))
    life = life_of("a", on_device())
    assert (life.device_own_ns, life.device_shared_ns) == (10, 45 + 50 + 186)


def test_without_batches_it_says_how_to_get_some() -> None:
    text = text_of(batches(recording_of([made(1, STEP, 0, 5)]), US))
    assert "No batch was recorded: a rule with `batch:` says which requests a call serves." in text


def life_of(asked: str, spans: list[Span] | None = None) -> RequestLife:
    return make_request_life(recording_of(spans or engine()), asked, US)


def test_the_layout_of_a_requests_life() -> None:
    assert is_golden("request_life", text_of(life_of("a")))


def test_a_request_is_found_by_its_key_or_the_number_of_its_span() -> None:
    assert life_of("b").span_id == life_of("5").span_id == 5
    assert life_of("b").parts == dict(life_of("5").parts)
    with pytest.raises(TraceError, match=r"there is no request 'bb' among 2 requests with 2 keys.*; nearest is 'b'"):
        life_of("bb")
    with pytest.raises(TraceError, match="there is no request '9"):
        life_of("9" * 5000)


def test_the_longest_of_several_requests_of_one_key_is_shown_and_the_others_are_named() -> None:
    chat = Site("POST /chat", "request")
    spans = [
        made(number, chat, 100 * number, 100 * number + lasts, key="a") for number, lasts in ((1, 20), (2, 90), (3, 50))
    ]
    told = text_of(life_of("a", spans))
    assert "span 2\nThe longest of 3 requests of that key; the others are spans 3, 1\n" in told
    assert "requests of that key" not in text_of(life_of("3", spans))


def test_shares_of_a_batch_that_has_several_turns_add_up_to_those_of_the_ledger() -> None:
    spans = [
        made(1, Site("POST /chat", "request"), 0, 1000, key="a"),
        made(2, STEP, 100, 500, thread=ENGINE, batch=["a", "z"]),
    ]
    spans += [made(3 + n, Site("detokenise", "phase"), 150 + 100 * n, 167 + 100 * n, parent=1) for n in range(3)]
    life = life_of("a", spans)
    shares = [(one.times, one.own_ns, one.length_ns) for one in life.turns if one.own_ns is not None]
    assert [(times, length) for times, _, length in shares] == [(1, 50), (1, 83), (1, 83), (1, 133)]
    assert sum(own or 0 for _, own, _ in shares) == life.parts["share of batches"] == 200


def test_a_thousand_batches_are_one_line() -> None:
    spans = [made(1, Site("POST /chat", "request"), 0, 20_000, key="a")]
    spans += [made(n + 2, STEP, 100 + 15 * n, 110 + 15 * n, thread=ENGINE, batch=["a", "z"]) for n in range(1000)]
    life = life_of("a", spans)
    assert [(one.part, one.times, one.own_ns, one.length_ns) for one in life.turns] == [
        ("queue", 1, None, 100),
        ("share of batches", 1000, 5000, 14_995),
        ("unknown", 1, None, 4905),
    ]
    assert "engine.step x 1000, 50.0% its own of 2" in text_of(life)


def test_batches_of_several_kinds_by_turns_are_one_line() -> None:
    spans = [made(1, Site("POST /chat", "request"), 0, 1000, key="a")]
    for number in range(20):
        at = 20 + 45 * number
        spans.append(made(3 * number + 2, STEP, at, at + 33, thread=ENGINE, batch=["a"]))
        for which, sampled in enumerate((at + 35, at + 40)):
            site = Site("sample", "step")
            spans.append(made(3 * number + 3 + which, site, sampled, sampled + 4, thread=ENGINE, batch=["a"]))
    assert [(one.part, one.times, one.length_ns) for one in life_of("a", spans).turns] == [
        ("queue", 1, 20),
        ("share of batches", 60, 899),
        ("unknown", 1, 81),
    ]


@pytest.mark.parametrize("stalled", [True, False])
def test_a_long_stall_or_batch_among_a_thousand_has_a_line_of_its_own(stalled: bool) -> None:
    spans = [made(1, Site("POST /chat", "request"), 0, 26_100, key="a")]
    at = 10
    for number in range(1000):
        lasts = 6000 if number == 600 and not stalled else 18
        spans.append(made(number + 2, STEP, at, at + lasts, thread=ENGINE, batch=["a"]))
        at += lasts + (6000 if number == 600 and stalled else 2)
    told = [(one.part, one.times, one.length_ns) for one in make_request_life(recording_of(spans), "a", US).turns]
    before, long, after = [one for one in told if one[2] > 1000]
    assert (before[:2], after[:2]) == (("share of batches", 601 - (not stalled)), ("share of batches", 399))
    assert long == (("stall", 1, 6000) if stalled else ("share of batches", 1, 6000))


def test_slow_requests_say_what_made_them_slow() -> None:
    chat, tokenise = Site("POST /chat", "request"), Site("tokenise", "phase")
    spans = []
    for number in range(5):
        start, lasts = 300 * number, 200 if number == 3 else 20
        spans.append(made(2 * number + 1, chat, start, start + lasts + 10, key=f"r{number}"))
        spans.append(made(2 * number + 2, tokenise, start + 5, start + 5 + lasts, parent=2 * number + 1))
    view = requests(recording_of(spans), US)
    slow, *others = view.slowest
    assert (slow.keys, slow.blame and slow.blame.part, [one.blame for one in others]) == (
        ("r3",), "tokenise", [None] * 4,
    )  # fmt: skip
    assert "slower by tokenise: 0.2 us, typical 0.02" in text_of(view)


def test_the_request_that_made_another_one_slow_is_named() -> None:
    chat, compile_regex = Site("POST /chat", "request"), Site("Grammar.compileRegex")
    spans = [made(number, chat, 300 * number, 300 * number + 20, key=f"r{number}") for number in range(1, 5)]
    spans += [made(5, chat, 3000, 3200, key="r5"), made(6, Site("tokenise", "phase"), 3000, 3150, parent=5)]
    spans.append(made(7, compile_regex, 3000, 3150, parent=6))
    told = text_of(make_request_life(recording_of(spans), "r5", US))
    assert "Slower by tokenise: 0.15 us, typical 0; 0.15 us of it were Grammar.compileRegex" in told
