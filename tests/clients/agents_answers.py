"""Answers by the OpenAI Agents SDK: python agents_answers.py BASE_URL MODEL. See README.md."""

import asyncio
import json
import sys
from typing import Any

from agents import Agent, ModelSettings, Runner, function_tool, responses_websocket_session, set_tracing_disabled


async def main() -> None:
    _, model = sys.argv[1:]  # the client finds OPENAI_BASE_URL by itself
    set_tracing_disabled(True)
    report: dict[str, Any] = {"calls": [], "texts": []}

    @function_tool
    def lamp(on: bool) -> str:
        """Turns the lamp on or off."""
        report["calls"].append({"on": on})
        return "done"

    # a random model's text has no end of its own, and with another seed may end before it begins
    ends = {"stop": list("ABCDEFGHIJKLMNOP"), "seed": 1}
    required = ModelSettings(tool_choice="required", max_tokens=512, extra_body=ends)
    agent = Agent(name="housekeeper", instructions="Be brief.", tools=[lamp], model=model, model_settings=required)
    whole = await Runner.run(agent, "Light, please.")
    report["texts"].append(whole.final_output)
    streamed = Runner.run_streamed(agent, "Light, please.")
    async for _ in streamed.stream_events():
        pass
    report["texts"].append(streamed.final_output)
    async with responses_websocket_session() as session:
        for store in (True, False):
            agent.model_settings.store = store
            over_socket = session.run_streamed(agent, "Light, please.", auto_previous_response_id=True)
            async for _ in over_socket.stream_events():
                pass
            report["texts"].append(over_socket.final_output)
    print(json.dumps(report))


asyncio.run(main())
