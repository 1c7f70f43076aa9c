"""Answers by LangChain: python langchain_answers.py BASE_URL MODEL. See README.md."""

import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

base_url, model = sys.argv[1:]


@tool
def lamp(on: bool) -> str:
    """Turns the lamp on or off."""
    return "done"


# a random model's text has no end of its own, and with another seed may end before it begins
ends = {"stop": list("ABCDEFGHIJKLMNOP"), "seed": 1}
asked = ChatOpenAI(model=model, base_url=base_url, use_responses_api=True, max_tokens=512, extra_body=ends)
report: dict[str, Any] = {"calls": [], "texts": []}
said: list[Any] = [HumanMessage("Light, please.")]
called = asked.bind_tools([lamp], tool_choice="lamp").invoke(said)
report["calls"] += [call["args"] for call in called.tool_calls]
said += [called, *(ToolMessage(lamp.invoke(call["args"]), tool_call_id=call["id"]) for call in called.tool_calls)]
report["texts"].append(asked.bind_tools([lamp], tool_choice="none").invoke(said).text)
report["texts"].append("".join(chunk.text for chunk in asked.stream("What is the sea like?")))
print(json.dumps(report))
