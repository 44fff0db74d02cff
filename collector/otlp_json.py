"""OTLP/JSON, both ways: protobuf's JSON mapping, except that ids are hex and enums are numbers.

Decoding takes what the specification allows (enums as numbers or names, 64-bit integers as
numbers or text, unknown fields ignored) and bounds depth. See ``otlp.py`` for the errors.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final, NoReturn

from google.protobuf import json_format
from google.protobuf.message import EncodeError, Message

from stratoscope.collector.component import Signal
from stratoscope.collector.otlp import REQUEST, Decoded, InvalidPayload, decode_protobuf

MAX_DEPTH: Final = 200  # JSON containers; an AnyValue level takes up to three
_ID_KEYS: Final = frozenset(
    {"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"}  # snake case is tolerated
)


def decode_json(signal: Signal, body: bytes) -> Decoded:
    """Parse an OTLP/JSON export request. Raises :class:`InvalidPayload`."""
    name = REQUEST[signal].DESCRIPTOR.name
    try:
        tree = json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
    except UnicodeDecodeError as error:
        raise InvalidPayload("body is not valid UTF-8", error.start) from None
    except json.JSONDecodeError as error:
        raise InvalidPayload(f"body is not valid JSON: {error.msg}", error.pos) from None
    except RecursionError:
        raise InvalidPayload(f"JSON is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:  # integers of thousands of digits, NaN
        raise InvalidPayload(f"body is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise InvalidPayload(f"body must be a JSON object, a {name}")
    _convert_ids(tree, _hex_to_base64, max_depth=MAX_DEPTH)
    try:
        message = json_format.ParseDict(tree, REQUEST[signal](), ignore_unknown_fields=True)
        raw = message.SerializeToString()
    except (
        json_format.ParseError,
        EncodeError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        text = " ".join(str(error).split())[:300]
        raise InvalidPayload(f"body is not a valid {name}: {text}") from None
    # Parsing what we made applies the binary form's own limits, so what is forwarded is good.
    return decode_protobuf(signal, raw)


def encode_json(message: Message) -> str:
    """One line of OTLP/JSON."""
    tree = json_format.MessageToDict(message, use_integers_for_enums=True)
    _convert_ids(tree, _base64_to_hex)
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; write it as text")


def _hex_to_base64(text: Any) -> str:
    """An id for protobuf's JSON parser; what is not hex becomes an empty, hence invalid, id."""
    if isinstance(text, str) and len(text) <= 64:
        try:
            return base64.b64encode(bytes.fromhex(text)).decode()
        except ValueError:
            pass
    return ""


def _base64_to_hex(text: str) -> str:
    return base64.b64decode(text).hex()


def _convert_ids(tree: Any, convert: Any, max_depth: int | None = None) -> None:
    """Rewrite every id in place, without recursion."""
    stack = [(tree, 1)]
    while stack:
        node, depth = stack.pop()
        if max_depth is not None and depth > max_depth:
            raise InvalidPayload(f"JSON is nested more than {max_depth} deep")
        if isinstance(node, dict):
            for name in _ID_KEYS & node.keys():
                if node[name] is not None:
                    node[name] = convert(node[name])
            stack.extend((v, depth + 1) for v in node.values() if isinstance(v, dict | list))
        else:
            stack.extend((v, depth + 1) for v in node if isinstance(v, dict | list))
