"""An OpenAI-compatible server (vLLM, SGLang, llama-server): asked again where that may help, its answers checked."""

import ipaddress
import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import httpx2

from dflash_prep.errors import Reject, UserError

RETRIES = 6
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds; doubled from try to try: 16 to 32 seconds in all
LONGEST_REQUESTED_DELAY = 600.0  # of what a server asks for by Retry-After
CONNECT_TIMEOUT = START_TIMEOUT = 30.0  # seconds in which a server must be reached, and must list its models
MOST_BYTES = 1 << 26  # of one answer
MOST_TOKENS = 10_000_000  # of one answer: a greater count is none
PIECE = 1 << 16  # bytes that are sent at once
AGAIN = {408, 425, 429}  # and every 5xx: may be answered when asked later
NOT_READY = {429, 503}  # from a server that is there, but still loads its model, or has too much to do
CLOSED = {401, 403, 404}  # whoever asks, whatever for: the server or the key is wrong, not the record
FAILED = {"content_filter": "withheld", "abort": "aborted", "error": "aborted"}  # reasons to finish that leave no answer


class Refused(Reject):
    """The server answers that this request cannot be served."""


class NoAnswer(Reject):
    """The server gave no usable answer: it may be at fault and not the record."""


class Answer(NamedTuple):
    """What the model said as an assistant's message, why it ended there, and how many tokens it wrote."""

    message: dict
    finish: str
    tokens: int


class Endpoint:
    """One server; may be asked from many threads."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0, connections: int = 1):
        self._base, self._key, self._timeout = url.rstrip("/"), (api_key or "").strip(), timeout
        self.url = without_login(self._base)  # as it is told
        self._stopped, self._due = threading.Event(), threading.local()
        if not (self._key.isascii() and self._key.isprintable()):
            raise UserError("the API key holds characters that no HTTP header can hold; give it as the server knows it")
        host = host_of(self._base)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        with faults_of_the_environment():
            self._client = httpx2.Client(
                headers=headers,
                limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
                trust_env=not is_local(host),  # a proxy named in the environment cannot reach this machine's own servers
            )

    def models(self) -> list[str]:
        """The names of the models it serves; raises UserError where no server of this kind is."""
        try:
            status, _, data = self._exchange("GET", "/models", None, min(START_TIMEOUT, self._timeout))
        except httpx2.RequestError as fault:
            raise UserError(f"{self.url}: no server answers here ({said(fault)}); start it, or name its URL") from None
        except Refused as fault:
            status, data = str(fault), b""
        if status in (401, 403):
            raise UserError(f"{self.url}: refuses the API key ({status}); give --api-key or set OPENAI_API_KEY")
        if status in NOT_READY:
            raise UserError(f"{self.url}: is not ready ({status}): {self._words(data)}; run the same again once it is")
        try:
            names = [entry["id"] for entry in json.loads(data)["data"]] if status == 200 else None
        except (ValueError, RecursionError, TypeError, KeyError):
            names = None
        if names is None or not all(isinstance(name, str) and is_utf8(name) for name in names):
            raise UserError(
                f"{self.url}/models: lists no models ({status}), so this is no OpenAI-compatible server's URL; "
                "it often ends in /v1"
            )
        return names

    def ask(self, body: dict) -> Answer:
        """The answer to one chat; raises Refused or NoAnswer with the reason, the latter after several tries."""
        try:
            content = json.dumps(body, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise Reject("text with a lone surrogate") from None
        except (ValueError, RecursionError):
            raise Reject("nested too deeply") from None
        delay = FIRST_DELAY
        for left in reversed(range(RETRIES + 1)):
            try:
                status, headers, data = self._exchange("POST", "/chat/completions", content, self._timeout)
                if status == 200:
                    return read_answer(data)
                fault = self._fault(status, data)
                if status in CLOSED or not isinstance(fault, NoAnswer):
                    raise fault
                requested = retry_after(headers.get("Retry-After"))
            except httpx2.RequestError as problem:
                fault, requested = NoAnswer(self._reason(problem)), None
            except Malformed as problem:
                fault, requested = problem, None
            wait = delay * random.uniform(0.5, 1) if requested is None else requested + random.uniform(0, 0.5)
            if not left or self._stopped.wait(wait):
                raise fault
            delay = min(2 * delay, LONGEST_DELAY)
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """End all waiting between tries: nobody wants the answers any more."""
        self._stopped.set()

    def _exchange(self, method: str, path: str, content: bytes | None, timeout: float) -> tuple[int, httpx2.Headers, bytes]:
        """One request's status, headers and body, if it all comes in time."""
        self._due.at = time.monotonic() + timeout
        limits = httpx2.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT), pool=None)
        request = self._client.build_request(
            method, self._base + path, content=content, timeout=limits, extensions={"trace": self._bound}
        )
        try:
            response = self._client.send(request, stream=True)
        except (UnicodeError, OverflowError) as fault:  # the host or the port of a proxy
            raise httpx2.ConnectError(said(fault), request=request) from None
        with closing(response):
            data = bytearray()
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > MOST_BYTES:
                    raise Refused(f"an answer of more than {MOST_BYTES >> 20} MiB")
            return response.status_code, response.headers, bytes(data)

    def _bound(self, event: str, info: dict) -> None:
        """Let each read of a new connection wait only as long as is left of its request.

        By itself httpx2 limits the pause between bytes: headers that come byte by byte, or one `102 Processing` after the
        other, would never end. A connection serves many threads in turn, each with what is left of its own request.
        """
        if not event.endswith(("connect_tcp.complete", "start_tls.complete")):
            return
        stream = info["return_value"]
        read, write = stream.read, stream.write

        def write_pieces(data: bytes, timeout: float | None = None) -> None:
            for start in range(0, len(data), PIECE):
                write(data[start : start + PIECE], self._left())

        stream.read = lambda most, timeout=None: read(most, self._left())
        stream.write = write_pieces

    def _left(self) -> float:
        """Seconds that are left of this thread's request."""
        left = self._due.at - time.monotonic()
        if left <= 0:
            raise httpx2.ReadTimeout("too slow")
        return left

    def _reason(self, fault: httpx2.RequestError) -> str:
        if isinstance(fault, httpx2.TimeoutException):
            return f"timed out: no whole answer within {self._timeout:g} seconds"
        if isinstance(fault, httpx2.DecodingError):
            return f"malformed answer: {said(fault)}"
        return f"no connection: {said(fault)}"

    def _fault(self, status: int, data: bytes) -> Reject:
        """What a status other than 200 means, in the server's words."""
        text = self._words(data)
        if status in AGAIN or status >= 500:
            return NoAnswer(f"server fault ({status}): {text}")
        return (NoAnswer if status in CLOSED else Refused)(f"refused by the server ({status}): {text}")

    def _words(self, data: bytes) -> str:
        """What an error's body says, without the key."""
        text = error_text(data)
        return text.replace(self._key, "***") if self._key else text


def host_of(url: str) -> str:
    """The host that a URL names; raises UserError where it cannot be one of a server."""
    shown, example = without_login(url), "give one such as http://127.0.0.1:8000/v1"
    try:
        parsed = httpx2.URL(url)
        parsed.raw_host.decode().encode("idna")  # as the system's resolver will
    except (httpx2.InvalidURL, UnicodeError) as fault:
        reason = f": {said(fault)}" if shown == url else ""  # or it might tell a part of the password
        raise UserError(f"{shown!r}: no URL{reason}; {example}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"{shown}: no URL of a server; {example}")
    if parsed.port is not None and not 0 < parsed.port < 1 << 16:
        raise UserError(f"{shown}: ports are 1 to 65535; {example}")
    return parsed.host


def without_login(url: str) -> str:
    """A URL without the name and password that it may hold."""
    return re.sub("//.*@", "//***@", url, flags=re.DOTALL)


@contextmanager
def faults_of_the_environment() -> Iterator[None]:
    """Say which variables are at fault where no client can be made."""
    try:
        yield
    except OSError as fault:
        reason, names, advice = said(fault), ("ssl_cert_file", "ssl_cert_dir"), "a file of certificates in PEM"
    except (ImportError, ValueError, httpx2.InvalidURL) as fault:
        reason = "no SOCKS here" if isinstance(fault, ImportError) else without_login(said(fault))
        names, advice = ("http_proxy", "https_proxy", "all_proxy", "no_proxy"), "a URL such as http://127.0.0.1:3128"
    else:
        return
    named = " or ".join(name for name in os.environ if name.lower() in names and os.environ[name])
    raise UserError(f"{named}, a variable of the environment, cannot be used ({reason}); make it {advice}, or unset it")


class Malformed(NoAnswer):
    """Not what the protocol says an answer is."""


def read_answer(data: bytes) -> Answer:
    """An answer from its JSON; raises Malformed, or Refused where it holds nothing to learn from."""
    try:
        value = json.loads(data)
        choice = value["choices"][0]
        given, finish = choice["message"], choice.get("finish_reason")
        usage = value.get("usage") or {}
        tokens = usage.get("completion_tokens")
        content, calls = given.get("content"), given.get("tool_calls") or []
        thought = given.get("reasoning_content") or given.get("reasoning")  # vLLM has renamed it
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
        raise Malformed("malformed answer: no JSON with choices, a message and its usage") from None
    if not isinstance(finish, str):
        raise Malformed("malformed answer: it does not say why it ended")
    if finish in FAILED:
        raise (Refused if finish == "content_filter" else Malformed)(f"{FAILED[finish]} by the server: {finish}")
    if not isinstance(content, str | None) or not isinstance(thought, str | None) or not isinstance(calls, list):
        raise Malformed("malformed answer: its message is not text")
    if not (content or thought or calls):
        raise Refused("an empty answer")
    message = {"role": "assistant"} | ({"content": content or ""} if content or not calls else {})
    message |= {"reasoning_content": thought} if thought else {}
    message |= {"tool_calls": [checked_call(call) for call in calls]} if calls else {}
    if not is_utf8(message):
        raise Refused("an answer with a lone surrogate")
    return Answer(message, finish, tokens if type(tokens) is int and 0 < tokens <= MOST_TOKENS else 0)


def checked_call(call: object) -> dict:
    """A tool call with its name and with arguments that are a JSON object; one that was cut, say, has none."""
    try:
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError, TypeError, KeyError):
        raise Refused("a tool call whose arguments are not JSON") from None
    if not isinstance(name, str) or not isinstance(parsed, dict):
        raise Refused("a tool call whose arguments are not JSON")
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return named | {"type": "function", "function": {"name": name, "arguments": arguments}}


def is_utf8(value: object) -> bool:
    """Whether all text in a JSON value can be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def error_text(data: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        value = json.loads(data)
        value = value.get("error", value) if isinstance(value, dict) else value
        if isinstance(value, dict):
            value = value.get("message") or value.get("detail") or value
    except (ValueError, RecursionError):
        value = data[:2000].decode(errors="replace")
    text = value if isinstance(value, str) else str(value)
    return " ".join(text.split())[:300].encode(errors="replace").decode()


def retry_after(value: str | None) -> float | None:
    """The seconds that a Retry-After header asks for, given as a number or as a date; None where it says nothing."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), LONGEST_REQUESTED_DELAY) if seconds == seconds else None


def said(fault: Exception) -> str:
    """A fault in its own words, or by its kind where it has none."""
    return " ".join(str(fault).split()) or type(fault).__name__


def is_local(host: str) -> bool:
    """Whether a host is this machine by its name alone."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
    return address.is_loopback or address.is_unspecified
