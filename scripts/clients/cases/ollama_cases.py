"""Clients of Ollama's API: the official one, LangChain's, and `llm` with its plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ollama
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from pydantic import BaseModel
from report import KEY, MODEL, SCRATCH, SCRIPTED_URL, URL, case

os.environ |= {"OLLAMA_HOST": SCRIPTED_URL, "OLLAMA_API_KEY": KEY}
folder = Path(SCRATCH) / "llm-ollama"
folder.mkdir(parents=True, exist_ok=True)
os.environ["LLM_USER_PATH"] = str(folder)
client = ollama.Client(host=SCRIPTED_URL)
QUESTION = [{"role": "user", "content": "What is the weather in Rome?"}]


class Answer(BaseModel):
    """A structured answer."""

    city: str
    people: list[str]


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: the city
    """
    return f"22 degrees in {city}"


def llm(*arguments: str) -> str:
    """Run `llm` with these arguments; returns its standard output."""
    command = [sys.executable, "-m", "llm", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr[-300:]
    return result.stdout.strip()


@case("ollama: models, chat, generate, context, vectors")
def _() -> str:
    tiny = ollama.Client(host=URL)
    options = {"temperature": 0, "num_predict": 6}
    assert tiny.list().models[0].model == tiny.ps().models[0].model == f"{MODEL}:latest"
    answer = tiny.chat(MODEL, QUESTION, options=options)
    pieces = tiny.chat(MODEL, QUESTION, options=options, stream=True)
    assert "".join(piece.message.content for piece in pieces) == answer.message.content
    first = tiny.generate(MODEL, "Who?", options=options)
    second = tiny.generate(MODEL, "And?", context=first.context, options=options)
    assert second.prompt_eval_count > len(first.context)
    assert len(tiny.embed(MODEL, ["a", "b"]).embeddings) == 2
    return f"{answer.prompt_eval_count} tokens, context of {len(second.context)}"


@case("ollama: tool loop, whole and streamed")
def _() -> str:
    streamed = [
        call
        for piece in client.chat(MODEL, QUESTION, tools=[weather], stream=True)
        for call in piece.message.tool_calls or ()
    ]
    answer = client.chat(MODEL, QUESTION, tools=[weather])
    [call] = answer.message.tool_calls
    assert streamed[0].function == call.function
    result = weather(**call.function.arguments)
    turns = [answer.message, {"role": "tool", "tool_name": "weather", "content": result}]
    last = client.chat(MODEL, [*QUESTION, *turns], tools=[weather])
    assert "22 degrees" in last.message.content
    return last.message.content


@case("ollama: schema")
def _() -> str:
    answer = client.chat(MODEL, QUESTION, format=Answer.model_json_schema())
    return str(Answer.model_validate_json(answer.message.content))


@case("ollama: errors")
def _() -> str:
    texts = []
    cold = {"temperature": -1}
    for call in (lambda: client.chat(MODEL, QUESTION, options=cold), lambda: client.pull("a")):
        try:
            call()
        except ollama.ResponseError as error:
            texts.append(f"{error.status_code}: {error.error}")
    assert len(texts) == 2
    return texts[0]


def langchain() -> ChatOllama:
    """A chat model of LangChain."""
    return ChatOllama(model=MODEL, base_url=SCRIPTED_URL)


@case("langchain-ollama: invoke, stream, vectors")
def _() -> str:
    model = langchain()
    message = model.invoke("Who?")
    assert "".join(str(piece.text) for piece in model.stream("Who?")) == message.text
    assert OllamaEmbeddings(model=MODEL, base_url=URL).embed_query("a")
    return str(message.usage_metadata)


@case("langchain-ollama: tool loop, structured output")
def _() -> str:
    model = langchain().bind_tools([tool(weather)])
    question = HumanMessage("What is the weather in Rome?")
    message = model.invoke([question])
    [call] = message.tool_calls
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    assert "22 degrees" in model.invoke([question, message, result]).text
    return str(langchain().with_structured_output(Answer).invoke("Who lives in Rome?"))


@case("llm-ollama: models, prompt, schema, tool")
def _() -> str:
    assert "completion" in llm("ollama", "models")
    name = f"ollama/{MODEL}"
    llm("-m", name, "Who?")
    llm("-m", name, "--no-stream", "--schema", "name, age int", "Who?")
    code = "def weather(city: str) -> str:\n    'The weather of a city.'\n    return '22 degrees'"
    text = llm("-m", name, "--functions", code, "Weather in Rome?")
    assert "22 degrees" in text
    return text
