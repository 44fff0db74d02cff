"""Offline analysis: every file form gives the same document; what cannot be read is named."""

from __future__ import annotations

import gzip
import json
import struct

import pytest

from stratoscope.collector import views
from stratoscope.collector.analyze import AnalyzeError, analyze
from stratoscope.collector.otlp_json import encode_json


def merged(messages):
    whole = type(messages[0])()
    for message in messages:
        whole.MergeFrom(message)
    return whole


def forms(messages):
    lines = "".join(encode_json(m) + "\n" for m in messages).encode()
    return {
        "lines.json": lines,
        "lines.json.gz": gzip.compress(lines),
        "object.json": json.dumps(json.loads(encode_json(merged(messages))), indent=1).encode(),
        "plain.binpb": merged(messages).SerializeToString(),
        "framed.pb": b"".join(
            struct.pack(">I", len(raw)) + raw for raw in (m.SerializeToString() for m in messages)
        ),
    }


@pytest.mark.parametrize("name", ["lines.json", "lines.json.gz", "object.json", "plain.binpb", "framed.pb"])
def test_every_form_gives_the_same_document(vllm, tmp_path, name):
    messages = vllm(4, open_only=1).messages()
    for number, content in enumerate((forms(messages)["framed.pb"], forms(messages)[name])):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / name).write_bytes(content)
    expected, found = (views.summary(analyze([tmp_path / n]).attributor) for n in ("0", "1"))
    assert found == expected
    assert found["requests"] == 5 and found["outcomes"]["unfinished"] == 1
    assert found["conservation"]["max_abs_residual_ns"] == 0


def test_a_bad_line_is_named_and_the_rest_is_used(vllm, tmp_path):
    lines = forms(vllm(2).messages())["lines.json"].splitlines()
    lines.insert(1, b'{"resourceSpans": [')
    path = tmp_path / "traces.json"
    path.write_bytes(b"\n".join(lines))
    analysis = analyze([path])
    assert views.summary(analysis.attributor)["requests"] == 2
    assert len(analysis.problems) == 1 and analysis.problems[0].startswith(f"{path}:2: ")


@pytest.mark.parametrize("content", [b"", b"\x00\x01garbage", b'{"resourceSpans": 1}', b"\x1f\x8bnot gzip"])
def test_nothing_readable_is_an_error_that_names_the_path(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(AnalyzeError, match=r"x\.json"):
        analyze([path])


def test_a_path_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(AnalyzeError, match="no such file"):
        analyze([tmp_path / "nowhere"])
