"""An OpenAI-compatible server (vLLM, SGLang, llama-server): asked again where that may help, its answers checked."""

import ipaddress
import json
import random
import threading
import time
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import httpx2

from dflash_prep.errors import Reject, UserError

RETRIES = 6
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds; doubled from try to try: 16 to 32 seconds in all
LONGEST_REQUESTED_DELAY = 600.0  # of what a server asks for by Retry-After
CONNECT_TIMEOUT = START_TIMEOUT = 30.0  # seconds in which a server must be reached, and must list its models
MOST_BYTES = 1 << 26  # of one answer
AGAIN = {408, 425, 429}  # and every 5xx: may be answered when asked later
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
        self.url, self._key, self._timeout = url.rstrip("/"), (api_key or "").strip(), timeout
        self._stopped = threading.Event()
        if not (self._key.isascii() and self._key.isprintable()):
            raise UserError("the API key holds characters that no HTTP header can hold; give it as the server knows it")
        try:
            parsed = httpx2.URL(self.url)
        except (httpx2.InvalidURL, UnicodeError) as fault:
            raise UserError(f"{url!r}: no URL: {fault}; give one such as http://127.0.0.1:8000/v1") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UserError(f"{url}: no URL of a server; give one such as http://127.0.0.1:8000/v1")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        self._client = httpx2.Client(
            headers=headers,
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=not is_local(parsed.host),  # a proxy named in the environment cannot reach this machine's own servers
        )

    def models(self) -> list[str]:
        """The names of the models it serves; raises UserError where no server of this kind is."""
        try:
            status, _, data = self._exchange("GET", "/models", None, min(START_TIMEOUT, self._timeout))
        except httpx2.RequestError as fault:
            raise UserError(f"{self.url}: no server answers here ({said(fault)}); start it, or name its URL") from None
        if status in (401, 403):
            raise UserError(f"{self.url}: refuses the API key ({status}); give --api-key or set OPENAI_API_KEY")
        try:
            names = [entry["id"] for entry in json.loads(data)["data"]] if status == 200 else None
        except (ValueError, RecursionError, TypeError, KeyError):
            names = None
        if names is None or not all(isinstance(name, str) for name in names):
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
        """One request's status, headers and body, if it all comes in time: httpx2 limits only the pause between bytes."""
        deadline, connect = time.monotonic() + timeout, min(timeout, CONNECT_TIMEOUT)
        limits = httpx2.Timeout(timeout, connect=connect, pool=None)
        with self._client.stream(method, self.url + path, content=content, timeout=limits) as response:
            data = bytearray()
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > MOST_BYTES:
                    raise Refused(f"an answer of more than {MOST_BYTES >> 20} MiB")
                if time.monotonic() > deadline:
                    raise httpx2.ReadTimeout("too slow", request=response.request)
            return response.status_code, response.headers, bytes(data)

    def _reason(self, fault: httpx2.RequestError) -> str:
        if isinstance(fault, httpx2.TimeoutException):
            return f"timed out: no whole answer within {self._timeout:g} seconds"
        return f"no connection: {said(fault)}"

    def _fault(self, status: int, data: bytes) -> Reject:
        """What a status other than 200 means, in the server's words."""
        text = error_text(data)
        text = text.replace(self._key, "***") if self._key else text
        if status in AGAIN or status >= 500:
            return NoAnswer(f"server fault ({status}): {text}")
        return (NoAnswer if status in CLOSED else Refused)(f"refused by the server ({status}): {text}")


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
    return Answer(message, finish, tokens if isinstance(tokens, int) and tokens > 0 else 0)


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
