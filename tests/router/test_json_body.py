"""Bodies are JSON objects in the strictest sense; everything else is `invalid_json`, and nothing raises otherwise."""

from __future__ import annotations

import contextlib
import json
import random
import time

import pytest

from cluster.errors import InvalidRequest
from router.json_body import parse_json_object

HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"hello",
    "array": b"[1]",
    "string": b'"a"',
    "null": b"null",
    "byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "not UTF-8": b'{"a": "\xff"}',
    "overlong UTF-8": b'{"a": "\xc0\xaf"}',
    "surrogate in UTF-8": b'{"a": "\xed\xa0\x80"}',
    "lone surrogate escape": b'{"a": "\\ud800"}',
    "lone surrogate in a key": b'{"\\uDC00": 1}',
    "lone surrogate upper case": b'{"a": ["\\uD800x"]}',
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": -Infinity}',
    "infinite float": b'{"a": 1e999}',
    "infinite float of digits": b'{"a": ' + b"9" * 400 + b".0}",
    "too wide integer": b'{"a": 18446744073709551616}',
    "too wide negative integer": b'{"a": -9223372036854775809}',
    "400 digits": b'{"a": ' + b"1" * 400 + b"}",
    "5,000 digits": b'{"a": ' + b"1" * 5000 + b"}",
    "depth 65": b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}",
    "depth 10,000": b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "a million arrays": b'{"prompt": [' + b"[],".join([b""] * 1_000_000) + b"[]]}",
    "trailing": b'{"a": 1} x',
    "trailing comma": b'{"a": 1,}',
    "single quotes": b"{'a': 1}",
    "duplicate key": b'{"a": 1, "a": 2}',
    "nested duplicate key": b'{"a": {"b": 1, "b": 1}}',
    "NUL byte": b'{"a": "\x00"}',
    "control character": b'{"a": "\n"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_f35_hostile_bodies_are_invalid_json(name: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_json_object(HOSTILE[name])
    assert raised.value.error_code == "invalid_json"
    assert len(raised.value.message) < 300


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"a": 18446744073709551615, "b": -9223372036854775808}',
        b'{"a": "\\ud83d\\ude00", "\xf0\x9f\x98\x80": 1}',
        b'{"a": "\\u0000"}',
        b'{"a": 1e300, "b": 0.1234567890123456789012345}',
        b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}",
        json.dumps({"m": [{"x": [1]}] * 200}).encode(),
    ],
)
def test_what_is_strict_json_is_taken_as_it_is(body: bytes) -> None:
    assert parse_json_object(body) == json.loads(body)


def test_f35_truncations_at_every_byte_are_refused() -> None:
    body = '{"model": "m", "messages": [{"role": "user", "content": "ď\\u00e9 \\ud83d\\ude00"}], "n": 1}'.encode()
    for length in range(len(body)):
        with pytest.raises(InvalidRequest):
            parse_json_object(body[:length])


def test_f35_random_bytes_never_raise_anything_else() -> None:
    generator = random.Random(5)
    alphabet = b'{}[]",:\\ud0123456789eE+-.NIaf \x00\xff\xc3'
    for _ in range(20_000):
        body = bytes(generator.choice(alphabet) for _ in range(generator.randrange(1, 40)))
        with contextlib.suppress(InvalidRequest):
            parse_json_object(body)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"prompt": [17] * 1_000_000}).encode(),
        json.dumps({str(key): 0 for key in range(300_000)}).encode(),
        json.dumps({"a": "\\ud83d" + "x" * 4_000_000}).encode(),
    ],
    ids=["a million ids", "many keys", "one letter"],
)
def test_f34_giant_bodies_are_read_without_blocking_for_long(body: bytes) -> None:
    started = time.process_time()
    parse_json_object(body)
    assert time.process_time() - started < 5  # far above: machines differ
