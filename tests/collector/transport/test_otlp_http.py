"""The HTTP receiver, spoken to by a real HTTP client."""

from __future__ import annotations

import gzip
import http.client
import json
import zlib
from typing import Any

import pytest
import requests
from google.rpc import code_pb2, status_pb2
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from stratoscope.collector.component import Refused, Signal, StartError
from stratoscope.collector.otlp import RESPONSE
from stratoscope.collector.otlp_json import encode_json

PROTOBUF, JSON = "application/x-protobuf", "application/json"
JSON_SPAN = {
    "traceId": "5B8EFFF798038103D269B633813FC60C",
    "spanId": "eee19b7ec3c1b174",
    "name": "json",
    "startTimeUnixNano": "1544712660000000000",
    "endTimeUnixNano": 1544712661000000000,
    "futureField": {"any": ["thing"]},
}

LINK = {"traceId": "0af7651916cd43dd8448eb211c80319c", "spanId": "b7ad6b7169203331"}


def post(port: int, body: bytes, content_type: str = PROTOBUF, signal: str = "traces", **headers: str) -> Any:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://127.0.0.1:{port}/v1/{signal}"
    return requests.post(url, data=body, headers={"Content-Type": content_type, **names}, timeout=20)


def span_json(**changes: Any) -> bytes:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [JSON_SPAN | changes]}]}]}).encode()


def http_only(**settings: Any) -> dict[str, Any]:
    return {"http": {"endpoint": "127.0.0.1:0", **settings}}


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("encoding", ["", "identity", "gzip", "deflate"])
def test_protobuf_arrives_untouched_in_every_encoding(kit: Any, signal: Signal, encoding: str) -> None:
    sink = kit.Collected()
    raw = kit.requests[signal](2).SerializeToString()
    body = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding, bytes)(raw)
    with kit.receiver(sink) as receiver:
        answer = post(receiver.ports[1], body, signal=signal, Content_Encoding=encoding)
    assert (answer.status_code, answer.headers["content-type"]) == (200, PROTOBUF)
    assert RESPONSE[signal].FromString(answer.content) == RESPONSE[signal]()
    assert [(b.signal, b.raw, b.items) for b in sink.batches] == [(signal, raw, 2)]


@pytest.mark.parametrize("signal", list(Signal))
def test_json_of_every_signal_means_the_same_as_protobuf(kit: Any, signal: Signal) -> None:
    sink = kit.Collected()
    request = kit.requests[signal](2)
    with kit.receiver(sink) as receiver:
        answer = post(receiver.ports[1], encode_json(request).encode(), JSON + "; charset=utf-8", signal)
    assert (answer.status_code, answer.headers["content-type"], answer.json()) == (200, JSON, {})
    assert sink.batches[0].message == request


@pytest.mark.parametrize("kind", [2, "SPAN_KIND_SERVER"])
def test_json_follows_the_otlp_mapping(kit: Any, kind: Any) -> None:
    sink = kit.Collected()
    attributes = [
        {"key": "bytes", "value": {"bytesValue": "AQID"}},
        {"key": "int", "value": {"intValue": "-7"}},
        {"key": "traceId", "value": {"stringValue": "not an id"}},
    ]
    with kit.receiver(sink) as receiver:
        answer = post(
            receiver.ports[1],
            span_json(kind=kind, attributes=attributes, parentSpanId="00f067aa0ba902b7", links=[LINK]),
            JSON,
        )
    assert answer.status_code == 200
    span = sink.batches[0].message.resource_spans[0].scope_spans[0].spans[0]
    assert span.trace_id.hex() == "5b8efff798038103d269b633813fc60c"
    assert span.span_id.hex() == "eee19b7ec3c1b174"
    assert span.parent_span_id.hex() == "00f067aa0ba902b7"
    assert span.links[0].trace_id.hex() == LINK["traceId"]
    assert (span.kind, span.start_time_unix_nano, span.end_time_unix_nano) == (
        2,
        1544712660000000000,
        1544712661000000000,
    )
    values = {a.key: a.value for a in span.attributes}
    assert values["bytes"].bytes_value == b"\x01\x02\x03"
    assert values["int"].int_value == -7
    assert values["traceId"].string_value == "not an id"


@pytest.mark.parametrize("bad_id", ["xyz", "", 12, "5b8e"])
def test_a_bad_json_id_costs_that_span_only(kit: Any, bad_id: Any) -> None:
    sink = kit.Collected()
    spans = [JSON_SPAN | {"traceId": bad_id}, JSON_SPAN]
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()
    with kit.receiver(sink) as receiver:
        answer = post(receiver.ports[1], body, JSON)
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "1"
    assert "spans[0]: trace_id" in answer.json()["partialSuccess"]["errorMessage"]
    assert sink.batches[0].items == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"\xff\xfe", "not valid UTF-8 (at byte 0)"),
        (b'{"resourceSpans": 3}', "resourceSpans"),
        (b'{"resourceSpans": NaN}', "NaN"),
        (b'{"resourceSpans": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"[" * 500_000, "nested"),
        (b'{"a":' * 150 + b"[" * 150 + b"]" * 150 + b"}" * 150, "nested more than 200 deep"),
        (span_json(name="\ud800"), "not a valid"),
        (span_json(startTimeUnixNano="-1"), "not a valid"),
        (span_json(startTimeUnixNano=10**30), "not a valid"),
    ],
)
def test_bad_json_is_a_400_with_a_reason(kit: Any, body: bytes, reason: str) -> None:
    sink = kit.Collected()
    with kit.receiver(sink) as receiver:
        answer = post(receiver.ports[1], body, JSON)
        assert answer.status_code == 400
        assert answer.json()["code"] == code_pb2.INVALID_ARGUMENT
        assert reason in answer.json()["message"]
        assert post(receiver.ports[1], span_json(), JSON).status_code == 200  # it lives on
    assert len(sink.batches) == 1


def nested_any_value(levels: int) -> bytes:
    """A request whose one attribute holds arrays inside arrays."""
    value = AnyValue(int_value=1).SerializeToString()
    for tag in [b"\x0a", b"\x2a"] * levels + [b"\x12", b"\x0a", b"\x0a", b"\x0a"]:  # up to resource_spans
        size, length = len(value), b""
        while size > 0x7F:
            length += bytes([size & 0x7F | 0x80])
            size >>= 7
        value = tag + length + bytes([size]) + value
    return value


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "varint"),
        (nested_any_value(5000), "nested more than 100 deep"),
    ],
)
def test_bad_protobuf_is_a_400_with_a_status_message(kit: Any, body: bytes, reason: str) -> None:
    with kit.receiver(kit.Collected()) as receiver:
        answer = post(receiver.ports[1], body)
    assert (answer.status_code, answer.headers["content-type"]) == (400, PROTOBUF)
    status = status_pb2.Status.FromString(answer.content)
    assert status.code == code_pb2.INVALID_ARGUMENT
    assert reason in status.message


def test_what_is_too_large_is_a_413(kit: Any) -> None:
    sink = kit.Collected()
    bomb = gzip.compress(bytes(1 << 20))
    twice = gzip.compress(bytes(3000)) * 2  # two members, each within the limit
    with kit.receiver(sink, http_only(max_request_body_size=4096)) as receiver:
        (port,) = receiver.ports
        answers = [post(port, bytes(5000)), *(post(port, b, Content_Encoding="gzip") for b in (bomb, twice))]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        chunks = iter([bytes(3000)] * 2)  # no Content-Length
        connection.request("POST", "/v1/traces", chunks, {"Content-Type": PROTOBUF}, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()
    assert [answer.status_code for answer in answers] == [413] * 3
    assert "once decompressed" in status_pb2.Status.FromString(answers[1].content).message
    assert sink.batches == []


@pytest.mark.parametrize(
    ("content_type", "encoding", "status"),
    [
        ("text/plain", "", 415),
        ("", "", 415),
        (PROTOBUF, "br", 415),
        (PROTOBUF, "gzip", 400),
        (JSON, "deflate", 400),
    ],
)
def test_what_is_not_spoken_is_named(kit: Any, content_type: str, encoding: str, status: int) -> None:
    with kit.receiver(kit.Collected()) as receiver:
        answer = post(receiver.ports[1], b"plain", content_type, Content_Encoding=encoding)
        (counted,) = (
            value
            for name, value in receiver.telemetry.snapshot().items()
            if "receiver_invalid_requests" in name
        )
    assert answer.status_code == status
    assert counted == 1


def test_truncated_gzip_is_a_400(kit: Any) -> None:
    body = gzip.compress(kit.trace_request(50).SerializeToString())
    with kit.receiver(kit.Collected()) as receiver:
        answer = post(receiver.ports[1], body[:-10], Content_Encoding="gzip")
    assert answer.status_code == 400
    assert "ends early" in status_pb2.Status.FromString(answer.content).message


def test_a_retryable_refusal_is_a_503_with_retry_after(kit: Any) -> None:
    sink = kit.Collected()
    sink.refusal = Refused("no room", retryable=True, retry_after_s=2.5)
    with kit.receiver(sink) as receiver:
        answer = post(receiver.ports[1], span_json(), JSON)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert answer.json() == {"code": code_pb2.UNAVAILABLE, "message": "no room"}


@pytest.mark.parametrize("refusal", [Refused("never", retryable=False), ZeroDivisionError("a bug")])
def test_a_final_refusal_and_a_bug_are_a_500_without_retry_after(kit: Any, refusal: Exception) -> None:
    sink = kit.Collected()
    sink.refusal = refusal
    with kit.receiver(sink) as receiver:
        answer = post(receiver.ports[1], span_json(), JSON)
    assert answer.status_code == 500
    assert "retry-after" not in answer.headers


def test_other_paths_and_methods_are_not_served(kit: Any) -> None:
    with kit.receiver(kit.Collected()) as receiver:
        base = f"http://127.0.0.1:{receiver.ports[1]}"
        assert requests.post(f"{base}/v1/profiles", timeout=20).status_code == 404
        assert requests.get(f"{base}/v1/traces", timeout=20).status_code == 405


def test_a_port_in_use_is_an_error_that_names_key_and_port(kit: Any) -> None:
    with kit.receiver(kit.Collected()) as receiver:
        taken = f"127.0.0.1:{receiver.ports[1]}"
        with (
            pytest.raises(StartError, match=rf"receivers\.otlp\.protocols\.http\.endpoint.*{taken}.*in use"),
            kit.receiver(kit.Collected(), http_only(endpoint=taken)),
        ):
            pass
