"""`m3jit serve` as a process: what it says, SIGTERM, and wrong usage."""
from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests.cli.command import call, environment

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")


@pytest.fixture
def process(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    found = subprocess.Popen([sys.executable, "-m", "m3jit", "serve", "default", "--port", "0", "--name", "austen",
                              "--threads", "1", "--chat-template", str(template), "--drain", "120"],
                             stderr=subprocess.PIPE, text=True,
                             env=environment(M3JIT_API_KEY="secret"))
    yield found
    found.kill()
    found.wait()
    found.stderr.close()


def test_it_serves_until_it_is_told_to_stop(process):
    said = process.stderr.readline()
    address = re.search(r"at http://127\.0\.0\.1:(\d+)/v1$", said.strip())
    assert address, said
    connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=180)
    body = {"model": "austen", "messages": [{"role": "user", "content": "She had"}], "max_tokens": 60, "stream": True,
            "temperature": 0}                              # drawn, one text in ten is shorter
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Authorization": "Bearer secret"})
    response = connection.getresponse()
    assert response.status == 200 and response.readline().startswith(b"data: ")
    process.send_signal(signal.SIGTERM)
    rest = response.read()
    assert rest.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in rest, "the text was to be completed"
    connection.close()
    assert process.wait(180) == 0 and process.stderr.read().splitlines()[-1] == "stopped"


def test_a_port_that_is_taken(capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, said = call(capfd, "serve", "--port", str(port))
        assert code == 1 and f"cannot listen on 127.0.0.1:{port}: Address already in use" in said and "--port" in said


@pytest.mark.parametrize("arguments, code, message", [
    (["--api-key", ""], 2, "--api-key: is empty"), (["--name", ""], 2, "--name: is empty"),
    (["--port", "70000"], 2, "--port"),
    (["no-such-model"], 1, "no such file"), (["--chat-template", "no-such-file"], 1, "no-such-file: No such file"),
    (["--host", "no.such.host.invalid"], 1, "cannot listen on")])
def test_wrong_usage(capfd, arguments, code, message):
    found, _, said = call(capfd, "serve", *arguments)
    assert found == code and message in said


def test_without_the_libraries(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette", None)
    code, _, said = call(capfd, "serve")
    assert code == 6 and "pip install 'm3jit[serve]'" in said


def test_an_open_address_without_a_key_is_warned_of(capfd, monkeypatch):
    from m3jit.serve.server import Server
    monkeypatch.setattr(Server, "run", lambda self: (self.engine.close(), self.socket.close()))
    warning = "warning: whoever reaches 0.0.0.0 can use this server; give it an --api-key"
    for options, expected in (([], True), (["--api-key", "k"], False)):
        code, _, said = call(capfd, "serve", "--host", "0.0.0.0", "--port", "0", *options)
        assert code == 0 and (warning in said) is expected and "serving" in said
    assert "warning" not in call(capfd, "serve", "--port", "0").err


def test_a_models_own_template_that_cannot_be_read_is_warned_of(capfd, monkeypatch):
    """The server starts, as all but chats can be asked for."""
    from m3jit.models.tokenizer import Tokenizer
    from m3jit.serve.server import Server
    monkeypatch.setattr(Server, "run", lambda self: (self.engine.close(), self.socket.close()))
    made = Tokenizer.__init__

    def broken(self, *given, **more):
        made(self, *given, **more)
        self.chat_template = "a\n{% magic %}"
    monkeypatch.setattr(Tokenizer, "__init__", broken)
    code, _, said = call(capfd, "serve", "--port", "0")
    assert code == 0 and "serving" in said
    assert re.search(r"warning: .*: chat template, line 2: Encountered unknown tag 'magic'", said)
    assert "Chat requests are refused; --chat-template FILE gives another template" in said
