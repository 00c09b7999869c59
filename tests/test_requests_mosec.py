"""mosec's batches, at the places where its workers receive and send."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any

from readback import spans_in

from instrument.instrumentors.requests.servers_and_routers import Requests
from instrument.profile.model import RequestsRule
from instrument.recording.spans import BATCH_KEYS, KEY

Status = enum.IntFlag("Status", ["OK", "INTERNAL_ERROR", "STREAM_EVENT"])


class Protocol:
    """The protocol of a mosec worker: batches whose ids are bytes."""

    name = "<Predict_2|1>"
    addr = "/nowhere/ipc_Predict_2.socket"

    def __init__(self) -> None:
        self.batches = [[b"\0\0\0\1", b"\0\0\1\0"], [b"\0\0\0\2"]]

    def receive(self) -> Any:
        ids = self.batches.pop(0)
        return 0, ids, [3] * len(ids), [b""] * len(ids)

    def send(self, flag: Any, ids: Any, states: Any, payloads: Any) -> None:
        pass


def test_a_batch_is_known_by_the_numbers_of_its_requests(recorder: Any) -> None:
    module: Any = ModuleType("mosec.protocol")
    module.Protocol, module.HTTPStatusCode = type("Protocol", (Protocol,), dict(vars(Protocol))), Status
    rules = Requests([RequestsRule()], recorder)
    rules.attach_to(module)
    worker = module.Protocol()
    for flag in (Status.OK, Status.INTERNAL_ERROR):
        _, ids, states, payloads = worker.receive()
        worker.send(flag, ids, states, payloads)
    rules.undo()
    batches, requests = (
        [span for span in spans_in(recorder) if span.site.kind == kind] for kind in ("step", "request")
    )
    found = [(span.site.name, span.attributes[BATCH_KEYS], span.error) for span in batches]
    assert found == [("mosec Predict_2", ("1", "256"), None), ("mosec Predict_2", ("2",), "500")]
    status = "http.response.status_code"
    assert [(span.attributes[KEY], span.attributes[status], span.error) for span in requests] == [
        ("1", 200, None),
        ("256", 200, None),
        ("2", 500, "500"),
    ]
    assert all(span.parent_id == 0 and span.root_id == span.span_id for span in requests)
