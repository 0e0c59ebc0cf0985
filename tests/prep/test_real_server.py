"""A real server, llama.cpp's, with the default target on loopback: what comes out is what it says when asked directly."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_prep.chat import ChatTemplate
from dflash_prep.embedded import packaged_gguf
from dflash_prep.errors import UserError
from dflash_prep.formats import Dialogue
from dflash_prep.tokenizer import load_tokenizer
from tests.prep.support import assert_user_error, chat, jsonl, run, unzstd_lines

pytest.importorskip("xllamacpp", reason="llama.cpp's server is not installed")
SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.model_alias, params.n_ctx, params.n_parallel = sys.argv[1], {"smollm2"}, 1024, 1
params.cpuparams.n_threads = 1  # several would wait for one another where others use the processor
params.cache_prompt = False  # what was cached would change the last bits
server = xllamacpp.Server(params)
print("listens", server.listening_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a running server."""
    try:
        model = packaged_gguf()
    except UserError as fault:
        pytest.skip(str(fault))
    command = [sys.executable, "-c", SERVER, str(model)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        line = next((line for line in process.stdout if line.startswith("listens")), None)
        assert line, "the server did not start"
        yield line.split()[1] + "/v1"
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """An empty directory to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return tmp_path


def asked(url: str, messages: list[dict]) -> dict:
    """What the server answers, without any code of ours."""
    body = json.dumps({"messages": messages, "temperature": 0, "max_tokens": 16}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
        return json.load(response)


CORPUS = [
    chat("Say hello.", "x"),
    chat("Name three colours.", "x", "And one more?", "y"),
    [{"role": "system", "content": "You answer in one word."}, *chat("What is the opposite of hot?", "x")],
    chat("What follows after Monday?"),
]


def test_answers_are_the_servers_own_turn_by_turn(url, here):
    Path("c.jsonl").write_bytes(jsonl(CORPUS))
    result = run("regenerate", "c.jsonl", "--endpoint", url, "-o", "o.jsonl.zst", "--max-tokens", 16, "--concurrency", 1)
    assert result.exit_code == 0, result.output
    rows = unzstd_lines(Path("o.jsonl.zst"))
    assert len(rows) == len(CORPUS)
    for row in rows:
        for place, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                choice = asked(url, row["messages"][:place])["choices"][0]
                assert message["content"] == choice["message"]["content"] != ""
        assert row["finish_reason"] == choice["finish_reason"]
    result = run("tokenize", "o.jsonl.zst", "-o", "store")
    assert result.exit_code == 0, result.stderr


def test_the_server_sees_the_tokens_that_training_sees(url):
    """The default target's template as we render it has as many tokens as the server counts."""
    tokenizer = load_tokenizer(None)
    template = ChatTemplate(tokenizer)
    for messages in CORPUS:
        said = Dialogue(messages[:-1] if messages[-1]["role"] == "assistant" else messages)
        text = template.render(said.messages, add_generation_prompt=True)
        tokens = len(tokenizer.encoder.encode(text, add_special_tokens=False).ids)
        assert asked(url, said.messages)["usage"]["prompt_tokens"] == tokens


def test_a_conversation_beyond_the_context_is_a_failure_that_is_not_asked_again(url, here):
    Path("c.jsonl").write_bytes(jsonl([chat("Say hello.", "x"), chat("too long " * 2000, "x")]))
    arguments = ["c.jsonl", "--endpoint", url, "-o", "o.jsonl.zst", "--max-tokens", 4]
    assert_user_error(run("regenerate", *arguments), "1 of 2 records failed (1 refused by the server (400))")
    assert "context" in unzstd_lines(Path("o.jsonl.zst.rejects.jsonl.zst"))[0]["reason"]
    assert run("regenerate", *arguments, "--max-reject-share", 0.5).exit_code == 0


def test_another_model_is_refused(url, here):
    Path("c.jsonl").write_bytes(jsonl(CORPUS))
    assert_user_error(run("regenerate", "c.jsonl", "--endpoint", url, "--model", "other"), "it serves smollm2")
