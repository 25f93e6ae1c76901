"""OpenAI's own client: chats whole and streamed, cancelled ones, sixteen at once, tools, formats, and errors."""
from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from tests.serve.client import SCHEMA, TOOLS, Gate, chat_body, openai_client, running, wait_for  # noqa: E402

QUESTIONS = ["Hello", "Who is she?", "Where is Emma?", "What did he say?", "Is it a truth?", "Tell me more.", "Why?",
             "And then? 😀"]
CHATS = [chat_body(question, temperature=temperature, max_tokens=10 + i, seed=i)
         for i, (question, temperature) in enumerate((q, t) for t in (0.0, 0.9) for q in QUESTIONS)]


def streamed(chunks: Any) -> tuple[str, str | None]:
    """Text and finish reason of a streamed chat."""
    text, reason = "", None
    for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


# -- chats ------------------------------------------------------------------------------------------------------------

def test_a_chat(client, model):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = model.generate(messages, max_tokens=12, temperature=0, top_k=0, top_p=1.0, min_p=0.0)
    text = expected.result()
    answer = client.chat.completions.create(model="default", messages=messages, max_tokens=12, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected.usage.prompt_tokens, 12)
    chunks = list(client.chat.completions.create(model="default", messages=messages, max_tokens=12, temperature=0,
                                                 stream=True, stream_options={"include_usage": True}))
    assert streamed(chunks[:-1]) == (text, "length")
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens and len({c.id for c in chunks}) == 1


def test_sixteen_streamed_chats_at_once(model):
    """In one batch by the engine's own count, greedy and drawn: the bytes of one at a time, and of no server at all."""
    with running(model, batch=16) as server:
        client = openai_client(server)

        def ask(body: dict[str, Any]) -> tuple[str, str | None]:
            return streamed(client.chat.completions.create(**body, stream=True))
        alone = [ask(body) for body in CHATS]
        gate = Gate(server.engine)
        with ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(ask, body) for body in CHATS]
            assert wait_for(lambda: server.engine.active == 16)
            gate.release()
            together = [f.result() for f in futures]
        assert together == alone and len(set(alone)) == 16 and wait_for(server.nothing_left)
        assert server.metric("m3jit_cancelled_total") == 0
        largest = server.metric('m3jit_batch_size_bucket{le="16"}') - server.metric('m3jit_batch_size_bucket{le="8"}')
        assert largest >= 9, "steps of nine to sixteen texts"
    for body, (text, _) in zip(CHATS, alone):
        asked = {name: body[name] for name in ("temperature", "max_tokens", "seed")}
        assert model.generate(body["messages"], top_k=0, top_p=1.0, min_p=0.0, **asked).result() == text


def test_one_of_sixteen_is_cancelled(model):
    """In the middle, as the server counts it; the fifteen others say what they say alone."""
    with running(model, batch=16) as server:
        client = openai_client(server)
        alone = [streamed(client.chat.completions.create(**body, stream=True)) for body in CHATS[:15]]
        gate = Gate(server.engine)
        with ThreadPoolExecutor(15) as pool:
            others = [pool.submit(lambda b=body: streamed(client.chat.completions.create(**b, stream=True)))
                      for body in CHATS[:15]]
            stream = client.chat.completions.create(**chat_body(max_tokens=400, stream=True))
            assert wait_for(lambda: server.engine.active == 16)
            ticket = next(t for t in server.engine._active if t.job.settings.max_tokens == 400)
            assert wait_for(lambda: gate.one_more() or len(ticket.tokens) > 0)
            assert next(iter(stream)).choices[0].delta.role == "assistant"
            stream.close()
            assert wait_for(lambda: ticket.cancelled), "nobody noticed"
            assert not any(f.done() for f in others)
            gate.release()
            assert [f.result() for f in others] == alone
        assert ticket.done.wait(180) and ticket.finish_reason == "cancelled" and len(ticket.tokens) < 10
        assert server.metric("m3jit_cancelled_total") == 1 and wait_for(server.nothing_left)


# -- tools and formats ------------------------------------------------------------------------------------------------

def test_formats_that_the_client_makes_of_a_class(client):
    """`parse` sends the schema of a class and reads the answer back into one."""
    import pydantic

    class Found(pydantic.BaseModel):
        name: Literal["Emma", "Anne"]
    asked = chat_body(temperature=1.0, seed=4, max_tokens=60)
    answer = client.chat.completions.parse(**asked, response_format=Found)
    assert isinstance(answer.choices[0].message.parsed, Found) and answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked, response_format=Found) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    text, reason = streamed(client.chat.completions.create(**asked, response_format=form, stream=True))
    assert json.loads(text)["name"] in ("Emma", "Anne") and reason == "stop"
    form = {"type": "json_object"}
    assert client.chat.completions.create(**asked, response_format=form).choices[0].message.content.startswith("{")


@pytest.mark.parametrize("choice, names", [("required", {"find", "visit"}),
                                           ({"type": "function", "function": {"name": "visit"}}, {"visit"})])
def test_calls_of_tools(client, choice, names):
    """Whole and streamed: the client puts the pieces of a call together to the same call."""
    asked = chat_body(tools=TOOLS, tool_choice=choice, max_tokens=80, seed=3, temperature=1.0)
    answer = client.chat.completions.create(**asked).choices[0]
    call = answer.message.tool_calls[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None and call.type == "function"
    assert call.function.name in names and json.loads(call.function.arguments)["name"] in ("Emma", "Anne")
    chunks = list(client.chat.completions.create(**asked, stream=True))
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert len(calls) == 1 and calls[0].id and (calls[0].index, calls[0].type) == (0, "function")
    assert (calls[0].function.name, calls[0].function.arguments) == (call.function.name, call.function.arguments)
    assert streamed(chunks) == ("", "tool_calls")
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and len(final.message.tool_calls) == 1
    assert final.message.tool_calls[0].function.arguments == call.function.arguments


def test_an_answer_of_a_tool_is_taken_back(client, model):
    """The second turn: the call and what the tool said are part of the conversation."""
    asked = chat_body(tools=TOOLS, tool_choice="required", max_tokens=80, seed=3, temperature=1.0)
    said = client.chat.completions.create(**asked).choices[0].message
    messages = [*asked["messages"], said.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "She is in Bath."}]
    settings = {"max_tokens": 9, "temperature": 0}
    answer = client.chat.completions.create(model="default", messages=messages, tools=TOOLS, tool_choice="auto",
                                            **settings)
    expected = model.generate(model.chat_tokens(messages, tools=TOOLS), top_k=0, top_p=1.0, min_p=0.0, **settings)
    assert answer.choices[0].message.content == expected.result() and expected.usage.prompt_tokens == \
        answer.usage.prompt_tokens


# -- errors -----------------------------------------------------------------------------------------------------------

def test_errors(client):
    import openai
    with pytest.raises(openai.NotFoundError, match="this server runs 'default'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="2001 tokens, the context 512"):
        client.completions.create(model="default", prompt="a " * 2000)
    assert [m.id for m in client.models.list()] == ["default"] == [client.models.retrieve("default").id]


def test_a_wrong_key(model):
    import openai
    with running(model, keys=("right",)) as server:
        with pytest.raises(openai.AuthenticationError, match="the API key is not one this server knows"):
            openai_client(server, "wrong").chat.completions.create(**chat_body())
        assert openai_client(server, "right").chat.completions.create(**chat_body()).choices[0].message.content
