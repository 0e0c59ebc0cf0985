"""One server: what is asked again, what is not, and what counts as an answer."""

import contextlib
import json
import sys
import time

import pytest

from dflash_prep import endpoint
from dflash_prep.endpoint import RETRIES, Endpoint, NoAnswer, Refused, is_local, retry_after
from dflash_prep.errors import Reject, UserError
from tests.prep.chat_server import MODEL, Handler, completion, reply, serving

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Why?"}]}
SAID = {"role": "assistant", "content": "So."}


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """Short delays between tries."""
    monkeypatch.setattr(endpoint, "FIRST_DELAY", 0.001)


def scripted(*outcomes):
    """A script that gives these outcomes in turn and then answers."""
    left = list(outcomes)

    def script(body):
        outcome = left.pop(0) if left else reply(body)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return script


PASSING = {
    "429": (429, {}, {"error": {"message": "slow down"}}),
    "500": (500, {}, b"<html>"),
    "503": (503, {"Retry-After": "0"}, {}),
    "408": (408, {}, b""),
    "reset": ConnectionResetError(),
    "no JSON": b"<html>",
    "cut JSON": b'{"choices": [{"mess',
    "no object": b"[]",
    "nested": b"[" * 100_000,
    "no choices": {"choices": []},
    "null choices": {"choices": None},
    "no message": {"choices": [{"finish_reason": "stop"}]},
    "content is a number": completion(SAID | {"content": 5}),
    "content is parts": completion(SAID | {"content": [{"type": "text", "text": "x"}]}),
    "no reason to finish": completion(SAID, finish=None),
    "aborted": completion(SAID, finish="abort"),
    "an error as an answer": {"error": {"message": "out of memory"}},
}


@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_is_asked_again(name):
    with serving(scripted(PASSING[name], PASSING[name])) as server:
        answer = Endpoint(server.url).ask(BODY)
        assert (answer.message["content"], answer.finish, answer.tokens) == ("re 1: Why?", "stop", 7)
        assert server.requests == [BODY] * 3


@pytest.mark.parametrize("name", PASSING)
def test_what_does_not_pass_is_no_answer(name):
    with serving(scripted(*[PASSING[name]] * (RETRIES + 1))) as server:
        with pytest.raises(NoAnswer):
            Endpoint(server.url).ask(BODY)
        assert len(server.requests) == RETRIES + 1


FINAL = {
    "400": (
        (400, {}, {"error": {"message": "context\n too long"}}),
        Refused,
        r"refused by the server \(400\): context too long",
    ),
    "422": ((422, {}, {"detail": [{"loc": 1}]}), Refused, r"refused by the server \(422\)"),
    "413": ((413, {}, b"\xff\xfe"), Refused, r"\(413\)"),
    "401": ((401, {}, b""), NoAnswer, r"\(401\)"),
    "404": ((404, {}, {"message": "no such model"}), NoAnswer, "no such model"),
    "redirect": ((302, {"Location": "http://example.invalid"}, b""), Refused, r"\(302\)"),
    "withheld": (completion(SAID, finish="content_filter"), Refused, "withheld"),
    "empty": (completion(SAID | {"content": ""}), Refused, "an empty answer"),
    "null": (completion(SAID | {"content": None}), Refused, "an empty answer"),
    "lone surrogate": (json.dumps(completion(SAID | {"content": "\ud800"})).encode(), Refused, "surrogate"),
    "a cut call": (
        completion(SAID | {"tool_calls": [{"function": {"name": "f", "arguments": '{"x'}}]}, finish="length"),
        Refused,
        "not JSON",
    ),
    "a call of nothing": (completion(SAID | {"tool_calls": [None]}), Refused, "not JSON"),
}


@pytest.mark.parametrize("name", FINAL)
def test_what_is_final_is_asked_once(name):
    outcome, kind, words = FINAL[name]
    with serving(lambda body: outcome) as server:
        with pytest.raises(kind, match=words):
            Endpoint(server.url).ask(BODY)
        assert len(server.requests) == 1


def test_reasoning_and_calls_are_kept_and_nothing_else():
    call = {"id": "x", "index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": None, "refusal": None, "reasoning": "Hm.", "tool_calls": [call]}
    with serving(lambda body: completion(said, "tool_calls", 3)) as server:
        answer = Endpoint(server.url).ask(BODY)
    del call["index"]
    assert answer.message == {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call]}


@pytest.mark.parametrize(
    "usage", [None, {}, {"completion_tokens": None}, {"completion_tokens": "5"}, {"completion_tokens": 10**9}]
)
def test_a_server_may_count_no_tokens(usage):
    with serving(lambda body: completion(SAID) | {"usage": usage}) as server:
        assert Endpoint(server.url).ask(BODY).tokens == 0


def test_a_server_that_asks_for_a_pause_gets_it():
    with serving(scripted((429, {"Retry-After": "1"}, {}))) as server:
        start = time.monotonic()
        Endpoint(server.url).ask(BODY)
        assert 1 <= time.monotonic() - start < 3


@pytest.mark.parametrize("drip", [False, True])
def test_a_slow_answer_times_out_and_is_asked_again(monkeypatch, drip):
    def script(body):
        if len(server.requests) == 1:
            time.sleep(0 if drip else 1)
        return reply(body)

    with serving(script) as server:
        if drip:
            slow_once(monkeypatch, server)
        answer = Endpoint(server.url, timeout=0.3).ask(BODY)
        assert answer.finish == "stop" and len(server.requests) == 2


def slow_once(monkeypatch, server) -> None:
    """Let the first answer come a byte every tenth of a second: each in time, the whole far too late."""
    whole = Handler.send

    def send(self, outcome):
        if self.command != "POST" or len(server.requests) > 1:
            return whole(self, outcome)
        data = json.dumps(outcome).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        for place in range(len(data)):
            self.wfile.write(data[place : place + 1])
            time.sleep(0.1)

    monkeypatch.setattr(Handler, "send", send)


ENDLESS = {
    "interim responses": (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    "a status line": (b"HTTP/1.1 200 ", b"O"),
    "a header": (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "a body": (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_the_timeout_ends_whatever_never_ends(monkeypatch, name):
    """Each piece comes well in time, and there is always one more."""
    start, piece = ENDLESS[name]

    def send(self, outcome):
        self.wfile.write(start)
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(piece)
                time.sleep(0.02)

    monkeypatch.setattr(Handler, "send", send)
    monkeypatch.setattr(endpoint, "RETRIES", 1)
    with serving() as server:
        with pytest.raises(NoAnswer, match="timed out: no whole answer"):
            Endpoint(server.url, timeout=0.2).ask(BODY)
        with pytest.raises(UserError, match="no server answers here"):
            Endpoint(server.url, timeout=0.2).models()


def test_a_connection_that_is_used_again_has_the_whole_time_again(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(endpoint.time, "monotonic", lambda: clock[0])
    with serving() as server:
        asked = Endpoint(server.url, timeout=5)
        for _ in range(3):
            assert asked.ask(BODY).finish == "stop"
            clock[0] += 4.0


def test_an_endless_answer_is_refused(monkeypatch):
    monkeypatch.setattr(endpoint, "MOST_BYTES", 1000)
    with serving(lambda body: b" " * 5000, models=b" " * 5000) as server:
        with pytest.raises(Refused, match="an answer of more than"):
            Endpoint(server.url).ask(BODY)
        with pytest.raises(UserError, match=r"lists no models \(an answer of more than"):
            Endpoint(server.url).models()


def test_what_cannot_be_unpacked_is_a_malformed_answer(monkeypatch):
    monkeypatch.setattr(endpoint, "RETRIES", 0)
    packed = 200, {"Content-Encoding": "gzip"}, b"garbage"
    with serving(lambda body: packed) as server, pytest.raises(NoAnswer, match="malformed answer"):
        Endpoint(server.url).ask(BODY)


def test_a_key_is_sent_and_never_told():
    with serving(lambda body: (400, {}, {"error": "the key secret is odd"})) as server:
        with pytest.raises(Refused) as caught:
            Endpoint(server.url, "secret").ask(BODY)
        assert server.headers[0]["Authorization"] == "Bearer secret"
        assert "secret" not in str(caught.value)
        with pytest.raises(Refused):
            Endpoint(server.url).ask(BODY)
        assert "Authorization" not in server.headers[1]


@pytest.mark.parametrize("key", ["a\nb", "clé", "a\x00"])
def test_an_impossible_key(key):
    with pytest.raises(UserError, match="API key"):
        Endpoint("http://127.0.0.1:1/v1", key)


def test_text_that_is_no_utf8_is_not_sent():
    with serving() as server:
        with pytest.raises(Reject, match="surrogate"):
            Endpoint(server.url).ask(BODY | {"model": "\ud800"})
        assert not server.requests


NO_URLS = ["", "nonsense", "127.0.0.1:8000/v1", "ftp://x/v1", "http://", "http://[::1/v1", "http://a\0b", "http://a..b/v1"]
NO_URLS += [f"http://{'a' * 64}.org/v1", "http://☃☃.org/v1", "http://x:65536/v1", "http://x:0/v1", "http://\ud800/v1"]


@pytest.mark.parametrize("url", NO_URLS)
def test_no_url(url):
    with pytest.raises(UserError):
        Endpoint(url)


@pytest.mark.parametrize("url", ["ftp://me:secret@x/v1", "http://me:sec/secret@x", "http://me:secret@x:99999/v1"])
def test_a_password_in_the_url_is_never_told(url):
    with pytest.raises(UserError, match=r"//\*\*\*@") as caught:
        Endpoint(url)
    assert "sec" not in str(caught.value)


def test_a_password_in_the_url_is_sent_and_never_told():
    with serving() as server:
        url = server.url.replace("//", "//me:secret@")
        answering = Endpoint(url)
        answering.ask(BODY)
        assert server.headers[0]["Authorization"].startswith("Basic ")
    with pytest.raises(UserError) as caught:
        Endpoint(url).models()
    assert "secret" not in str(caught.value) + answering.url


BAD_ENVIRONMENT = {
    "HTTPS_PROXY": ["socks5://127.0.0.1:1", "gopher://me:secret@127.0.0.1:1", "http://[::1", "http://x:port"],
    "ALL_PROXY": ["nonsense://"],
    "SSL_CERT_FILE": ["/nowhere.pem", __file__],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_ENVIRONMENT.items() for value in values])
def test_a_variable_that_cannot_be_used_is_named(monkeypatch, name, value):
    for other in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir"):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.delenv(other.upper(), raising=False)
    monkeypatch.setenv(name, value)
    if value.startswith("socks"):
        monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(UserError, match=f"^{name}, a variable of the environment, cannot be used") as caught:
        Endpoint("https://elsewhere.invalid/v1")
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("proxy", [f"http://{'a' * 64}:80", "http://127.0.0.1:99999"])
def test_a_proxy_that_nobody_can_reach(monkeypatch, proxy):
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(UserError, match="no server answers here"):
        Endpoint("http://elsewhere.invalid/v1").models()


def test_a_proxy_of_the_environment_is_used_for_other_machines_only(monkeypatch):
    """The scripted server plays the proxy: it sees the whole URL as the path."""
    with serving() as server, serving() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert Endpoint(server.url).models() == [MODEL]
        with pytest.raises(UserError, match="lists no models"):  # the proxy has no such path
            Endpoint("http://elsewhere.invalid/v1").models()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.0.1", "localhost", "LocalHost", "x.localhost", "::1", "[::1]", "0.0.0.0"]
)
def test_this_machine(host):
    assert is_local(host)


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "example.org", "localhost.example.org", "127.0.0.1.example.org", "2001:db8::1"]
)
def test_another_machine(host):
    assert not is_local(host)


def test_pauses_are_read_as_servers_give_them():
    assert retry_after(None) is None
    assert retry_after("3") == 3 and retry_after("0.5") == 0.5 and retry_after("-3") == 0
    assert retry_after("1e9") == retry_after("inf") == endpoint.LONGEST_REQUESTED_DELAY
    assert retry_after("soon") is None and retry_after("nan") is None and retry_after("") is None
    assert retry_after("Fri, 01 Jan 2100 00:00:00 GMT") == endpoint.LONGEST_REQUESTED_DELAY
    assert retry_after("Fri, 01 Jan 1999 00:00:00 GMT") == 0


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (b"<html>", "lists no models"),
        ({}, "lists no models"),
        ({"data": [{"name": "x"}]}, "lists no models"),
        ({"data": [{"id": 5}]}, "lists no models"),
        ((404, {}, b""), r"lists no models \(404\)"),
        ((500, {}, b""), r"lists no models \(500\)"),
        ((401, {}, b""), "refuses the API key"),
        ((503, {}, {"error": {"message": "Loading\n model"}}), r"is not ready \(503\): Loading model; run the same again"),
        ((429, {}, b"busy"), r"is not ready \(429\): busy"),
        (json.dumps({"data": [{"id": "m\ud800"}]}).encode(), "lists no models"),
    ],
)
def test_what_is_no_server_of_this_kind(models, words):
    with serving(models=models) as server, pytest.raises(UserError, match=words):
        Endpoint(server.url).models()
